package itest

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// relayFixture is a migrated schema, a topic of its own, and a recorder for events
// that go there.
type relayFixture struct {
	db      *pgxpool.Pool
	schema  string
	topic   string
	brokers []string
	rec     *outbox.Recorder
}

func newRelayFixture(t testing.TB) *relayFixture {
	t.Helper()
	return newPartitionedFixture(t, 0)
}

// newPartitionedFixture returns a relayFixture whose outbox has partitions of so many ids; 0: none.
func newPartitionedFixture(t testing.TB, partitionRows int64) *relayFixture {
	t.Helper()
	newSchema := testenv.Schema
	if partitionRows == 0 {
		newSchema = testenv.Migrated
	}
	db, schema := newSchema(t)
	return migratedFixture(t, db, schema, partitionRows)
}

// migratedFixture is newPartitionedFixture in a schema that is there.
func migratedFixture(t testing.TB, db *pgxpool.Pool, schema string, partitionRows int64) *relayFixture {
	t.Helper()
	require.NoError(t, outbox.Migrate(context.Background(), db, outbox.MigrateConfig{Schema: schema, PartitionRows: partitionRows}))
	h := &relayFixture{db: db, schema: schema, topic: "test-" + uuid.NewString(), brokers: testenv.Brokers(t)}
	events, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(h.topic))
	require.NoError(t, err)
	h.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	return h
}

// record is an oracle.Record.
func (h *relayFixture) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return h.rec.Record(ctx, tx, all...)
}

// commit records events in a transaction of their own.
func (h *relayFixture) commit(t testing.TB, events ...oracle.Event) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(context.Background(), h.db, func(tx pgx.Tx) error {
		return h.record(context.Background(), tx, events...)
	}))
}

// numbered returns n events of one key with versions from first.
func numbered(key string, first, n int) []oracle.Event {
	events := make([]oracle.Event, n)
	for i := range events {
		events[i] = oracle.Event{ID: uuid.NewString(), Key: key, Version: int64(first + i)}
	}
	return events
}

// relay returns a relay of the fixture; cfg.Schema is set.
func (h *relayFixture) relay(t testing.TB, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	cfg.Schema = h.schema
	if cfg.Logger == nil {
		cfg.Logger = logTo(t, slog.LevelWarn)
	}
	r, err := outbox.NewRelay(h.db, testenv.KafkaOpts(h.brokers), cfg)
	require.NoError(t, err)
	return r
}

// follow reads the fixture's topic until the test ends.
func (h *relayFixture) follow(t testing.TB) *oracle.Reader {
	t.Helper()
	reader, err := oracle.Follow(h.brokers, h.topic, nil)
	require.NoError(t, err)
	t.Cleanup(reader.Close)
	return reader
}

// requireArrival waits until all events have arrived.
func requireArrival(t testing.TB, reader *oracle.Reader, events ...oracle.Event) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, e := range events {
			if !reader.Has(e.ID) {
				return false
			}
		}
		return true
	}, testenv.Patience, 5*time.Millisecond, "events did not arrive")
}

// logTo sends log lines to the test's log.
func logTo(t testing.TB, level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: level}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(string(b[:len(b)-1]))
	return len(b), nil
}

// failures returns the failed events of the fixture.
func (h *relayFixture) failures(t *testing.T) *outboxops.Failures {
	t.Helper()
	f, err := outboxops.NewFailures(h.db, outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	return f
}

// relayStatus returns the state of a relay; of one that is not known, nothing.
func (h *relayFixture) relayStatus(t testing.TB, name string) (status outbox.RelayStatus) {
	t.Helper()
	i, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	all, err := i.Relays(background)
	require.NoError(t, err)
	for _, r := range all {
		if r.Name == name {
			status = r
		}
	}
	return status
}

func (h *relayFixture) count(t testing.TB, table string) (n int) {
	t.Helper()
	sql := fmt.Sprintf("SELECT count(*) FROM %s", pgx.Identifier{h.schema, table}.Sanitize())
	require.NoError(t, h.db.QueryRow(context.Background(), sql).Scan(&n))
	return n
}

// random returns n characters that do not compress well.
func random(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[rand.IntN(36)]
	}
	return string(b)
}
