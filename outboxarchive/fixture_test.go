package outboxarchive_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
)

var background = context.Background()

// archiveFixture is a migrated schema with its own topic.
type archiveFixture struct {
	db      *pgxpool.Pool
	schema  string
	topic   string
	brokers []string
}

func newFixture(t testing.TB) *archiveFixture { return newFixtureOf(t, 0) }

// newFixtureOf returns a fixture whose outbox has partitions of partitionRows ids. 0 means no partitions.
func newFixtureOf(t testing.TB, partitionRows int64) *archiveFixture {
	t.Helper()
	newSchema := testenv.Schema
	if partitionRows == 0 {
		newSchema = testenv.Migrated
	}
	db, schema := newSchema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema, PartitionRows: partitionRows}))
	return &archiveFixture{db: db, schema: schema, topic: "archive-" + uuid.NewString(), brokers: testenv.Brokers(t)}
}

// table creates the archive of the schema and returns it.
func (f *archiveFixture) table(t testing.TB) *outboxarchive.Table {
	t.Helper()
	table, err := outboxarchive.NewTable(f.db, f.config())
	require.NoError(t, err)
	require.NoError(t, table.Ensure(background))
	return table
}

func (f *archiveFixture) config() outboxarchive.TableConfig {
	return outboxarchive.TableConfig{Schema: f.schema, OutboxSchema: f.schema}
}

func (f *archiveFixture) sql(s string) string { return pg.InSchema(s, f.schema) }

func (f *archiveFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := f.db.Exec(background, f.sql(sql), args...)
	require.NoError(t, err)
}

func (f *archiveFixture) count(t testing.TB, table string) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(background, f.sql("SELECT count(*) FROM {schema}."+table)).Scan(&n))
	return n
}

// why is who expires partitions, and for which reason.
var why = outboxops.AuditInfo{Operator: "kim", Reason: "five years are over"}

// expired returns what the audit says was dropped, and by why.
func (f *archiveFixture) expired(t testing.TB) []string {
	t.Helper()
	rows, err := f.db.Query(background, f.sql(`SELECT parking_key FROM {schema}.outbox_audit WHERE action = 'expire' AND operator = $1 AND reason = $2 ORDER BY id`), why.Operator, why.Reason)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// newRand returns random numbers and logs their seed.
func newRand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// texts are samples of unusual texts.
var texts = []string{"a", "Größe", "日本", `"quoted"`, `back\slash`, "</script>&amp;", "line\nbreak", "\u2028", "tab\t", "emoji 🎉", "ctrl\x01\x7f"}

// payloads are JSON texts, some in a form that jsonb prints differently.
var payloads = []string{`{}`, `[]`, `null`, `"text"`, `1.0`, `1e30`, `-0.000000000000000000001`, `{"b":1,"a":{"z":[1,2,{"k":null}]}}`, `{"s":"\u00e9 \" \\ \n \u2028 </x>"}`,
	`12345678901234567890123456789.123456789012345678901234567890`, `"\ud83c\udf89"`}

// event returns an event of random form, recorded at a time.
func (f *archiveFixture) event(rng *rand.Rand, n int, at time.Time) outbox.ArchivedEvent {
	pick := func(list []string) string { return list[rng.IntN(len(list))] }
	e := outbox.ArchivedEvent{EventID: uuid.NewString(), Type: fmt.Sprintf("test.archive.kind%d.v1", n%3), Source: "test " + pick(texts), AggregateType: "Thing",
		AggregateID: fmt.Sprintf("key-%d %s", n%5, pick(texts)), Topic: f.topic, ContentType: "application/json", JSON: true, Payload: []byte(pick(payloads)),
		OccurredAt: at.Add(time.Duration(rng.IntN(1e9))).Truncate(time.Microsecond), CreatedAt: at}
	if rng.IntN(3) == 0 {
		e.JSON, e.ContentType, e.Payload = false, "application/octet-stream", make([]byte, rng.IntN(300))
		for i := range e.Payload {
			e.Payload[i] = byte(rng.Uint32())
		}
	}
	if rng.IntN(2) == 0 {
		e.PartitionKey = "own " + pick(texts)
	}
	if rng.IntN(2) == 0 {
		e.Headers = []byte(`{"traceparent":"00-` + strings.Repeat("a", 32) + `-` + strings.Repeat("b", 16) + `-01","x":"é \" \\ </x>"}`)
	}
	return e
}

// insert records events. The ids come from the sequence.
func (f *archiveFixture) insert(t testing.TB, events ...outbox.ArchivedEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		for _, e := range events {
			var payload, headers *string
			var bytes []byte
			if text := string(e.Payload); e.JSON {
				payload = &text
			} else {
				bytes = slices.Concat(e.Payload, []byte{})
				if bytes == nil {
					bytes = []byte{}
				}
			}
			if text := string(e.Headers); e.Headers != nil {
				headers = &text
			}
			if _, err := tx.Exec(background, f.sql(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes,
				content_type, topic, partition_key, headers, occurred_at, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, nullif($10, ''), $11, $12, $13)`),
				e.EventID, e.Type, e.Source, e.AggregateType, e.AggregateID, payload, bytes, e.ContentType, e.Topic, e.PartitionKey, headers, e.OccurredAt, e.CreatedAt); err != nil {
				return err
			}
		}
		return nil
	}))
}

// mixed inserts n events of all forms, one each minute. The last one is two months old.
func (f *archiveFixture) mixed(t testing.TB, rng *rand.Rand, n int) {
	t.Helper()
	events := make([]outbox.ArchivedEvent, n)
	for i := range events {
		events[i] = f.event(rng, i, time.Now().UTC().AddDate(0, -2, 0).Truncate(time.Microsecond).Add(time.Duration(i-n)*time.Minute))
	}
	f.insert(t, events...)
}

// inSevens calls archive for seven rows at a time.
func inSevens(archive func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error) func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error {
	return func(ctx context.Context, tx pgx.Tx, rows []outbox.ArchivedEvent) error {
		for seven := range slices.Chunk(rows, 7) {
			if err := archive(ctx, tx, seven); err != nil {
				return err
			}
		}
		return nil
	}
}

// quick returns a relay that archives all the time.
func (f *archiveFixture) quick(archive func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error) outbox.RelayConfig {
	return outbox.RelayConfig{Schema: f.schema, PollInterval: 10 * time.Millisecond, RetryInterval: 20 * time.Millisecond, DeliveryTimeout: time.Second, Lease: 3 * time.Second, Logger: slog.New(slog.DiscardHandler),
		Retention: outbox.RetentionConfig{CursorsFor: 50 * time.Millisecond, Archive: inSevens(archive)}}
}

// archiveAll runs a relay until outbox is empty.
func (f *archiveFixture) archiveAll(t testing.TB, archive func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error) {
	t.Helper()
	relay, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), f.quick(archive))
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return f.count(t, "outbox") == 0 }, testenv.Patience, 10*time.Millisecond, "outbox is not empty")
	stop()
}

// columns returns all columns of events in a table as PostgreSQL prints them.
func (f *archiveFixture) columns(t testing.TB, table string) []string {
	t.Helper()
	rows, err := f.db.Query(background, f.sql(`SELECT jsonb_build_array(id, event_id, event_type, source, aggregate_type, aggregate_id, payload::text, encode(payload_bytes, 'hex'),
		content_type, topic, partition_key, headers::text, occurred_at AT TIME ZONE 'UTC', created_at AT TIME ZONE 'UTC')::text FROM {schema}.`+table+` ORDER BY id, event_id`))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// events returns the events of a source, with times in UTC. An error fails the test.
func events(t testing.TB, source outboxarchive.Source, filter outboxarchive.Filter) (all []outbox.ArchivedEvent) {
	t.Helper()
	for e, err := range source.Events(background, filter) {
		require.NoError(t, err)
		e.OccurredAt, e.CreatedAt = e.OccurredAt.UTC(), e.CreatedAt.UTC()
		all = append(all, e)
	}
	return all
}

// recorded returns the events that are in outbox.
func (f *archiveFixture) recorded(t testing.TB) []outbox.ArchivedEvent {
	t.Helper()
	source, err := outboxarchive.Recorded(f.db, f.schema)
	require.NoError(t, err)
	return events(t, source, outboxarchive.Filter{})
}
