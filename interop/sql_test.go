package interop

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What psql records with the statements of docs/sql.md arrives, and the notification brings it before the next poll.
func TestSQLContract(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	orders(t, db, schema, "order-1")
	plain, everything, notify := sqlBlock(t, "BEGIN;"), sqlBlock(t, "'LEDGER_POSTED'"), sqlBlock(t, "pg_notify")
	// The topics of the statements belong to all tests.
	own := "interop-" + uuid.NewString()
	ledger := newTopic(t, brokers)
	plain = strings.Replace(plain, "acme.order.paid.v1", "acme."+own+".paid.v1", 1)
	everything = strings.Replace(everything, "ledger-events", ledger, 1)
	testenv.CreateTopic(t, brokers, own+"-events", 1)

	sending := make(chan bool, 10)
	relay(t, db, brokers, outbox.RelayConfig{Schema: schema, PollInterval: time.Hour, Hooks: outbox.RelayHooks{
		Leading: func(leads bool) { sending <- leads },
	}})
	require.True(t, <-sending)
	psql := func(text string) {
		cmd := program(t, db, schema, "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		run(t, cmd)
	}
	psql(plain)
	psql(everything)
	psql(sqlBlock(t, "INSERT INTO outbox_delayed"))
	delayed := func() (n int) {
		require.NoError(t, db.QueryRow(t.Context(), `SELECT count(*) FROM `+pgx.Identifier{schema, "outbox_delayed"}.Sanitize()).Scan(&n))
		return n
	}
	require.Equal(t, 1, delayed())
	psql(sqlBlock(t, "outbox_cancel"))
	require.Zero(t, delayed())
	require.Eventually(t, func() bool {
		psql(strings.Replace(notify, "'public'", "'"+schema+"'", 1)) // the first may come before the relay listens
		var done bool
		err := db.QueryRow(t.Context(), `SELECT max(highest_id) >= 2 FROM `+pgx.Identifier{schema, "outbox_cursor"}.Sanitize()).Scan(&done)
		return err == nil && done
	}, testenv.Patience, 200*time.Millisecond, "not within an hour")

	paid := fetch(t, brokers, own+"-events", 1)[0]
	require.Equal(t, "order-1", string(paid.Key))
	require.JSONEq(t, `{"orderId": "order-1", "total": 1250}`, string(paid.Value))
	m, err := outbox.DecodeCloudEvent(paid)
	require.NoError(t, err)
	require.Equal(t, []string{"shop", "order-1", "application/json", "Order"}, []string{m.Source, m.Subject, m.ContentType, m.Extensions["aggregatetype"]})
	require.WithinDuration(t, time.Now(), m.Time, testenv.Patience)

	posted := fetch(t, brokers, ledger, 1)[0]
	require.Equal(t, "customer-3", string(posted.Key))
	require.Equal(t, "\x0a\x03\xab\xc1", string(posted.Value))
	m, err = outbox.DecodeCloudEvent(posted)
	require.NoError(t, err)
	require.Equal(t, &outbox.Message{
		ID: "0196b0c5-6a00-7000-8000-000000000001", Source: "/ledger", Type: "LEDGER_POSTED", Subject: "account-7", ContentType: "application/protobuf",
		Time: time.Date(2026, 2, 3, 4, 5, 6, 123456000, time.UTC), Data: posted.Value,
		Extensions: map[string]string{"aggregatetype": "Account", "correlationid": "c-17", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
	}, m)
	require.True(t, slices.ContainsFunc(posted.Headers, func(h kgo.RecordHeader) bool { return h.Key == "tenant" && string(h.Value) == "acme" }))
}

// sqlBlock returns the statements of docs/sql.md that contain a text.
func sqlBlock(t *testing.T, with string) string {
	t.Helper()
	for _, block := range blocks(t, "sql.md", "sql") {
		if strings.Contains(block, with) {
			return block
		}
	}
	require.Fail(t, "no statement has "+with)
	return ""
}

// What the Python program of docs/sql.md records arrives; what its transaction rolls back does not.
func TestPythonRecords(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	orders(t, db, schema, "1", "2", "주문 \"3\"")
	own := "interop-" + uuid.NewString()
	testenv.CreateTopic(t, brokers, own+"-events", 1)
	text := strings.ReplaceAll(blocks(t, "sql.md", "python")[0], "acme.order.paid.v1", "acme."+own+".paid.v1")
	python(t, db, schema, "psycopg", text+`
with psycopg.connect() as db:
    pay(db, "1", 1250)
    try:
        with db.transaction():
            pay(db, "2", 0)
            raise KeyError
    except KeyError:
        pass
    pay(db, '주문 "3"', 12345678901234567890)
`, "")
	relay(t, db, brokers, outbox.RelayConfig{Schema: schema, Mode: outbox.Structured})
	for i, want := range []struct{ order, total string }{{"1", "1250"}, {`주문 "3"`, "12345678901234567890"}} {
		r := fetch(t, brokers, own+"-events", 2)[i]
		m, err := outbox.DecodeCloudEvent(r)
		require.NoError(t, err)
		require.Equal(t, want.order, string(r.Key))
		require.Equal(t, "c-"+want.order, m.Extensions["correlationid"])
		require.Contains(t, string(m.Data), want.total)
		_, err = uuid.Parse(m.ID)
		require.NoError(t, err)
	}
}

// badRows are those of docs/sql.md, in its order.
var badRows = []struct {
	name          string
	column, value string // what the row has there
	status, class string // of outbox_failed
}{
	{"no topic follows from `event_type`, and `topic` is NULL", "event_type", "'LEDGER_POSTED'", "failed", "invalid_event"},
	{"`headers` is no object of strings", "headers", `'{"n": 1}'`, "failed", "invalid_event"},
	{"an attribute among `headers` that a column has", "headers", `'{"ce_id": "1"}'`, "failed", "invalid_event"},
	{"`content-type` among `headers`", "headers", `'{"Content-Type": "a/b"}'`, "failed", "invalid_event"},
	{"`content_type` is one of `application/cloudevents`", "content_type", `'application/cloudevents+json'`, "failed", "invalid_event"},
	{"`event_type` is empty, and `topic` is not NULL", "event_type", `''`, "failed", "invalid_event"},
	{"`source` is empty", "source", `''`, "failed", "invalid_event"},
	{"`aggregate_id` is empty", "aggregate_id", `''`, "failed", "invalid_event"},
	{"`occurred_at` is infinite", "occurred_at", `'infinity'`, "failed", "invalid_event"},
	{"`occurred_at` is behind the year 9999", "occurred_at", `'10000-01-01'`, "failed", "invalid_event"},
	{"larger than `max.message.bytes`", "payload", `to_jsonb((SELECT string_agg(md5(n::text), '') FROM generate_series(1, 40000) AS n))`, "failed", "message_too_large"},
	{"the topic does not exist", "topic", "'no-such-topic-" + uuid.NewString() + "'", "waiting", "unknown_topic"},
	{"Kafka does not allow such a name of a topic", "topic", "'no topic!'", "waiting", "invalid_topic"},
}

// Each row that docs/sql.md calls bad becomes what it says there, and the next event of another key is sent.
func TestSQLBadRows(t *testing.T) {
	t.Parallel()
	page := document(t, "sql.md")
	brokers := testenv.RealBrokers(t)
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	topic := newTopic(t, brokers)
	insert := func(key, column, value string) {
		row := map[string]string{
			"event_id": "gen_random_uuid()", "event_type": "'acme.thing.happened.v1'", "source": "'shop'", "aggregate_type": "'Thing'",
			"aggregate_id": "'" + key + "'", "payload": "'{}'", "content_type": "'application/json'", "occurred_at": "now()", "topic": "'" + topic + "'",
		}
		if row[column] = value; value == "'LEDGER_POSTED'" {
			row["topic"] = "NULL"
		}
		columns := slices.Sorted(maps.Keys(row))
		values := make([]string, len(columns))
		for i, name := range columns {
			values[i] = row[name]
		}
		_, err := db.Exec(t.Context(), fmt.Sprintf(`INSERT INTO %s (%s) VALUES (%s)`, pgx.Identifier{schema, "outbox"}.Sanitize(),
			strings.Join(columns, ", "), strings.Join(values, ", ")))
		require.NoError(t, err)
	}
	for _, bad := range badRows {
		insert(bad.name, bad.column, bad.value)
		require.Contains(t, page, fmt.Sprintf("\n| %s | `%s` | `%s` |", bad.name, bad.status, bad.class))
	}
	insert("good", "headers", "NULL")
	r, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(brokers...)}, outbox.RelayConfig{Schema: schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	testenv.Run(t, r.Run)

	require.Equal(t, "good", string(fetch(t, brokers, topic, 1)[0].Key))
	for _, bad := range badRows {
		key := bad.name
		if bad.column == "aggregate_id" {
			key = ""
		}
		var status, class string
		require.Eventually(t, func() bool {
			err := db.QueryRow(t.Context(), `SELECT status, coalesce(error_class, '') FROM `+pgx.Identifier{schema, "outbox_failed"}.Sanitize()+
				` WHERE aggregate_id = $1`, key).Scan(&status, &class)
			return err == nil
		}, testenv.Patience, 20*time.Millisecond, bad.name)
		require.Equal(t, []string{bad.status, bad.class}, []string{status, class}, bad.name)
	}
}
