package outboxops_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

var background = context.Background()

// quick is the config of a relay that polls often, because tests wait for it.
var quick = outbox.RelayConfig{
	PollInterval: 10 * time.Millisecond, RetryInterval: 20 * time.Millisecond, Breaker: outbox.BreakerConfig{OpenFor: 100 * time.Millisecond},
	Logger: slog.New(slog.DiscardHandler),
}

// opsFixture is a migrated schema, a topic of its own, and a recorder of events that
// go there.
type opsFixture struct {
	db      *pgxpool.Pool
	schema  string
	topic   string
	brokers []string
	rec     *outbox.Recorder
}

func newFixture(t testing.TB) *opsFixture {
	t.Helper()
	return newFixtureOf(t, 0)
}

// newFixtureOf returns a fixture whose outbox has partitions of partitionRows ids. 0 means no partitions.
func newFixtureOf(t testing.TB, partitionRows int64) *opsFixture {
	t.Helper()
	newSchema := testenv.Schema
	if partitionRows == 0 {
		newSchema = testenv.Migrated
	}
	db, schema := newSchema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema, PartitionRows: partitionRows}))
	h := &opsFixture{db: db, schema: schema, topic: "test-" + uuid.NewString(), brokers: testenv.Brokers(t)}
	events, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(h.topic))
	require.NoError(t, err)
	h.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	return h
}

// newPoisonedFixture returns a fixture whose topic takes only small records, and a reader of the topic.
func newPoisonedFixture(t *testing.T) (*opsFixture, *oracle.Reader) {
	t.Helper()
	h := newFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "2000")
	return h, h.follow(t)
}

// poison is an event that the topic of [newPoisonedFixture] refuses.
func poison(key string, version int) oracle.Event {
	e := numbered(key, version, 1)[0]
	e.Filler = random(5000)
	return e
}

// numbered returns n events of one key with versions from first.
func numbered(key string, first, n int) []oracle.Event {
	events := make([]oracle.Event, n)
	for i := range events {
		events[i] = oracle.Event{ID: uuid.NewString(), Key: key, Version: int64(first + i)}
	}
	return events
}

// random returns n characters that do not compress well.
func random(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[rand.IntN(36)]
	}
	return string(b)
}

func (h *opsFixture) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return h.rec.Record(ctx, tx, all...)
}

// commit records events in a transaction of their own.
func (h *opsFixture) commit(t testing.TB, events ...oracle.Event) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error { return h.record(background, tx, events...) }))
}

// relay returns a relay of the fixture; cfg.Schema is set.
func (h *opsFixture) relay(t testing.TB, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	cfg.Schema = h.schema
	r, err := outbox.NewRelay(h.db, testenv.KafkaOpts(h.brokers), cfg)
	require.NoError(t, err)
	return r
}

// follow reads the topic until the test ends.
func (h *opsFixture) follow(t testing.TB) *oracle.Reader {
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

// requireInOrder requires of events that have arrived that they did so in order.
func requireInOrder(t *testing.T, reader *oracle.Reader, events []oracle.Event) {
	t.Helper()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	mine := map[string]bool{}
	for _, e := range events {
		mine[e.ID] = true
	}
	var got []oracle.Event
	for _, e := range arrived {
		if mine[e.ID] {
			got = append(got, e)
		}
	}
	require.Equal(t, events, got)
}

// sql completes a statement with the schema.
func (h *opsFixture) sql(s string) string { return pg.InSchema(s, h.schema) }

func (h *opsFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := h.db.Exec(background, h.sql(sql), args...)
	require.NoError(t, err)
}

func (h *opsFixture) count(t testing.TB, table string) (n int) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(background, h.sql("SELECT count(*) FROM {schema}."+table)).Scan(&n))
	return n
}

// statuses returns the rows of outbox_failed by status.
func (h *opsFixture) statuses(t *testing.T) map[string]int {
	t.Helper()
	rows, err := h.db.Query(background, h.sql(`SELECT status, count(*)::int FROM {schema}.outbox_failed GROUP BY status`))
	require.NoError(t, err)
	all, status, n := map[string]int{}, "", 0
	_, err = pgx.ForEachRow(rows, []any{&status, &n}, func() error { all[status] = n; return nil })
	require.NoError(t, err)
	return all
}

func (h *opsFixture) awaitStatuses(t *testing.T, want map[string]int) {
	t.Helper()
	require.Eventually(t, func() bool {
		got := h.statuses(t)
		for status, n := range want {
			if got[status] != n {
				return false
			}
		}
		return len(got) == len(want)
	}, testenv.Patience, 10*time.Millisecond, "%v, not %v", h.statuses(t), want)
}

// setTopic changes a setting of the topic.
func (h *opsFixture) setTopic(t *testing.T, setting, value string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(h.brokers...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrIncrementalAlterConfigsRequest()
	request.Resources = []kmsg.IncrementalAlterConfigsRequestResource{{
		ResourceType: kmsg.ConfigResourceTypeTopic, ResourceName: h.topic,
		Configs: []kmsg.IncrementalAlterConfigsRequestResourceConfig{{Name: setting, Value: &value}},
	}}
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.Zero(t, response.Resources[0].ErrorCode)
}

// position gives a relay a position, as it has before its first failed event.
func (h *opsFixture) position(t testing.TB, relay string) {
	t.Helper()
	h.exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT $1, 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system()`, relay)
}
