package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// parcel is an event that can go wrong in every way. Its payload is its content.
type parcel struct {
	ID, Address string
	Sent        time.Time
	Content     any
}

func (p parcel) OccurredAt() time.Time        { return p.Sent }
func (p parcel) Number() string               { return p.ID }
func (p parcel) To() string                   { return p.Address }
func (p parcel) MarshalJSON() ([]byte, error) { return json.Marshal(p.Content) }

type (
	// rawParcel travels byte for byte, to a topic and under a key of its own.
	rawParcel struct{ parcel }
	// pointerParcel has its methods on the pointer, so it cannot be registered.
	pointerParcel struct{ sent time.Time }
	// strayParcel is registered nowhere.
	strayParcel struct{ parcel }
	// mapParcel is no struct.
	mapParcel map[string]string
)

func (p *pointerParcel) OccurredAt() time.Time { return p.sent }
func (p mapParcel) OccurredAt() time.Time      { return noon }
func (p mapParcel) Number() string             { return p["id"] }

const (
	parcelSent = "test.parcel.sent.v1"
	rawSent    = "test.raw.sent.v1"
)

var (
	noon = time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)
	good = parcel{ID: "good", Sent: noon, Content: "good"}
)

// rawCodec hands over the content as it is.
var rawCodec = outbox.Codec{
	ContentType: "application/octet-stream",
	Encode: func(event any) ([]byte, error) {
		b, _ := event.(rawParcel).Content.([]byte)
		return b, nil
	},
	Decode: func(data []byte, event any) error { event.(*rawParcel).Content = data; return nil },
}

func parcels(t testing.TB) *outbox.Registry {
	t.Helper()
	events, err := outbox.NewRegistry("post-office",
		outbox.Event(parcelSent, "Parcel", parcel.Number),
		outbox.Event(rawSent, "Raw", rawParcel.Number).Topic("raw").Key(rawParcel.To).Codec(rawCodec),
		outbox.Event("test.map.sent.v1", "Map", mapParcel.Number),
	)
	require.NoError(t, err)
	return events
}

// counter is a migrated schema with a recorder, as in a post office.
type counter struct {
	db     *pgxpool.Pool
	schema string
	events *outbox.Registry
	rec    *outbox.Recorder
}

func newCounter(t testing.TB, events *outbox.Registry) *counter {
	t.Helper()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	c := &counter{db: db, schema: schema, events: events}
	c.rec = c.recorder(t, outbox.RecorderConfig{})
	return c
}

func (c *counter) recorder(t testing.TB, cfg outbox.RecorderConfig) *outbox.Recorder {
	t.Helper()
	cfg.Schema = c.schema
	rec, err := outbox.NewRecorder(c.events, cfg)
	require.NoError(t, err)
	return rec
}

// sql completes a statement with the schema.
func (c *counter) sql(s string) string {
	return strings.ReplaceAll(s, "{s}", pgx.Identifier{c.schema}.Sanitize())
}

func (c *counter) begin(t testing.TB) pgx.Tx {
	t.Helper()
	tx, err := c.db.Begin(background)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(background) })
	return tx
}

// commit records events in a transaction of their own.
func (c *counter) commit(t testing.TB, ctx context.Context, rec *outbox.Recorder, events ...outbox.DomainEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(ctx, c.db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, events...) }))
}

// ids returns the aggregate ids of the committed events in their order.
func (c *counter) ids(t testing.TB) []string {
	t.Helper()
	rows, err := c.db.Query(background, c.sql(`SELECT aggregate_id FROM {s}.outbox ORDER BY id`))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// row is a row of the table outbox.
type row struct {
	ID            int64
	EventID       uuid.UUID
	EventType     string
	Source        string
	AggregateType string
	AggregateID   string
	Payload       *string
	PayloadBytes  []byte
	ContentType   string
	Topic         *string
	PartitionKey  *string
	Headers       *string
	OccurredAt    time.Time
	CreatedAt     time.Time
	Xid           uint64
}

func (c *counter) rows(t testing.TB) []row {
	t.Helper()
	rows, err := c.db.Query(background, c.sql(`
		SELECT id, event_id, event_type, source, aggregate_type, aggregate_id, payload::text, payload_bytes,
		       content_type, topic, partition_key, headers::text, occurred_at, created_at, xid::text::bigint AS xid
		  FROM {s}.outbox ORDER BY id`))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	require.NoError(t, err)
	for i := range all {
		all[i].OccurredAt = all[i].OccurredAt.UTC()
	}
	return all
}

const (
	traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	manyEvents  = 10_000
)

func numberedParcels(n int) (events []outbox.DomainEvent, ids []string) {
	for i := range n {
		id := fmt.Sprintf("parcel-%05d", i)
		events, ids = append(events, parcel{ID: id, Sent: noon, Content: i}), append(ids, id)
	}
	return events, ids
}

func TestRecordOne(t *testing.T) {
	c := newCounter(t, parcels(t))
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, good))
	require.Empty(t, c.ids(t), "nobody sees it before the commit")
	require.NoError(t, tx.Commit(background))
	require.Equal(t, []string{"good"}, c.ids(t))
}

func TestRecordKeepsOrder(t *testing.T) {
	c := newCounter(t, parcels(t))
	events, ids := numberedParcels(manyEvents)
	c.commit(t, background, c.rec, events...)
	c.commit(t, background, c.rec, events[7], events[3])
	stored := c.ids(t)
	require.Len(t, stored, manyEvents+2)
	for i, id := range append(ids, ids[7], ids[3]) {
		require.Equal(t, id, stored[i], "event %d", i)
	}
}

func TestNothingToRecord(t *testing.T) {
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = counts })
	tx, err := db.Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	counts.reset()
	require.NoError(t, c.rec.Record(background, tx))
	require.NoError(t, c.rec.Record(background, tx, []outbox.DomainEvent{}...))
	require.Equal(t, statements{}, counts.reset())
	var batch pgx.Batch
	require.NoError(t, c.rec.Queue(background, &batch))
	require.Zero(t, batch.Len())
}

// statements counts what a connection asks PostgreSQL. It is a tracer of one
// connection at a time.
type statements struct{ queries, batches, queued, copies, prepares int }

func (s *statements) reset() statements { defer func() { *s = statements{} }(); return *s }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.queries++
	return ctx
}
func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	s.batches++
	return ctx
}
func (s *statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) { s.queued++ }
func (s *statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

func (s *statements) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceCopyFromStartData) context.Context {
	s.copies++
	return ctx
}
func (s *statements) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {}

func (s *statements) TracePrepareStart(ctx context.Context, _ *pgx.Conn, d pgx.TracePrepareStartData) context.Context {
	s.prepares++
	return ctx
}
func (s *statements) TracePrepareEnd(_ context.Context, _ *pgx.Conn, d pgx.TracePrepareEndData) {
	if d.AlreadyPrepared {
		s.prepares--
	}
}

// It is one statement, and COPY for many events. A connection that meets a
// statement for the first time prepares it before.
func TestRecordIsOneRoundTrip(t *testing.T) {
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = counts, 1 })
	events, _ := numberedParcels(manyEvents)
	prepares := map[int]int{1: 1, 2: 1, 500: 1}
	for _, n := range []int{1, 2, 3, 499, 1, 500, manyEvents} {
		tx, err := db.Begin(background)
		require.NoError(t, err)
		defer tx.Rollback(background)
		counts.reset()
		require.NoError(t, c.rec.Record(background, tx, events[:n]...))
		want := statements{queries: 1, prepares: prepares[n]}
		if n >= 500 {
			want = statements{copies: 1, prepares: prepares[n]}
		}
		require.Equal(t, want, counts.reset(), "%d events", n)
		delete(prepares, n)
		require.NoError(t, tx.Commit(background))
	}
	require.Len(t, c.ids(t), 1006+manyEvents)
}

// A call of Queue is one statement among the caller's own, with one result.
func TestQueue(t *testing.T) {
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = counts, 1 })
	events, ids := numberedParcels(300)
	var batch pgx.Batch
	batch.Queue(`SELECT set_config('outbox.test', 'on', true)`)
	require.NoError(t, c.rec.Queue(background, &batch, events[0]))
	require.Equal(t, 2, batch.Len())
	require.NoError(t, c.rec.Queue(background, &batch))
	require.Equal(t, 2, batch.Len(), "no events, no statement")
	batch.Queue(`SELECT 42`)
	require.NoError(t, c.rec.Queue(background, &batch, events[1:]...))
	require.Equal(t, 4, batch.Len())

	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error {
		counts.reset()
		results := tx.SendBatch(background, &batch)
		_, err := results.Exec()
		require.NoError(t, err)
		tag, err := results.Exec()
		require.NoError(t, err)
		require.EqualValues(t, 1, tag.RowsAffected())
		var answer int
		require.NoError(t, results.QueryRow().Scan(&answer))
		require.Equal(t, 42, answer)
		tag, err = results.Exec()
		require.NoError(t, err)
		require.EqualValues(t, 299, tag.RowsAffected())
		require.NoError(t, results.Close())
		n := counts.reset()
		require.Equal(t, [3]int{0, 1, 4}, [3]int{n.queries, n.batches, n.queued})
		return nil
	}))
	require.Equal(t, ids, c.ids(t))
}

// A batch's results reach the functions that its statements were queued with.
func TestQueueBesideCallbacks(t *testing.T) {
	c := newCounter(t, parcels(t))
	var batch pgx.Batch
	var before, after int
	scan := func(into *int) func(pgx.Row) error { return func(row pgx.Row) error { return row.Scan(into) } }
	batch.Queue(c.sql(`SELECT count(*)::int FROM {s}.outbox`)).QueryRow(scan(&before))
	require.NoError(t, c.rec.Queue(background, &batch, good, good))
	batch.Queue(c.sql(`SELECT count(*)::int FROM {s}.outbox`)).QueryRow(scan(&after))
	require.NoError(t, pgx.BeginFunc(background, c.db, func(tx pgx.Tx) error { return tx.SendBatch(background, &batch).Close() }))
	require.Equal(t, [2]int{0, 2}, [2]int{before, after})
}

func TestRollback(t *testing.T) {
	c := newCounter(t, parcels(t))
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, good, good))
	require.NoError(t, tx.Rollback(background))
	require.Empty(t, c.ids(t))

	var batch pgx.Batch
	require.NoError(t, c.rec.Queue(background, &batch, good))
	tx = c.begin(t)
	require.NoError(t, tx.SendBatch(background, &batch).Close())
	require.NoError(t, tx.Rollback(background))
	require.Empty(t, c.ids(t))
}

func TestSavepoints(t *testing.T) {
	c := newCounter(t, parcels(t))
	event := func(id string) parcel { return parcel{ID: id, Sent: noon} }
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, event("before")))
	lost, err := tx.Begin(background)
	require.NoError(t, err)
	require.NoError(t, c.rec.Record(background, lost, event("lost")))
	require.NoError(t, lost.Rollback(background))
	kept, err := tx.Begin(background)
	require.NoError(t, err)
	require.NoError(t, c.rec.Record(background, kept, event("kept")))
	require.NoError(t, kept.Commit(background))
	require.NoError(t, c.rec.Record(background, tx, event("after")))
	var xid uint64
	require.NoError(t, tx.QueryRow(background, `SELECT pg_current_xact_id()::text::bigint`).Scan(&xid))
	require.NoError(t, tx.Commit(background))
	require.Equal(t, []string{"before", "kept", "after"}, c.ids(t))
	for _, r := range c.rows(t) {
		require.Equal(t, xid, r.Xid, "%s: the transaction's id, not the savepoint's", r.AggregateID)
	}
}

// A savepoint rescues a transaction from an error of PostgreSQL's, too.
func TestDatabaseErrorAborts(t *testing.T) {
	c := newCounter(t, parcels(t))
	tx := c.begin(t)
	_, err := tx.Exec(background, c.sql(`ALTER TABLE {s}.outbox ADD CHECK (aggregate_id <> 'good')`))
	require.NoError(t, err)
	inner, err := tx.Begin(background)
	require.NoError(t, err)
	err = c.rec.Record(background, inner, good)
	pg, ok := errors.AsType[*pgconn.PgError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "23514", pg.Code)
	_, refused := errors.AsType[*outbox.FieldError](err)
	require.False(t, refused)
	require.NoError(t, inner.Rollback(background))
	require.NoError(t, c.rec.Record(background, tx, parcel{ID: "other", Sent: noon}))
	require.NoError(t, tx.Commit(background))
	require.Equal(t, []string{"other"}, c.ids(t))
}

var errGenerator = errors.New("out of numbers")

func text(s string) json.RawMessage { return json.RawMessage(s) }

// sent returns a good parcel but for one thing.
func sent(change func(*parcel)) parcel {
	p := good
	change(&p)
	return p
}

func id(s string) parcel                 { return sent(func(p *parcel) { p.ID = s }) }
func content(v any) parcel               { return sent(func(p *parcel) { p.Content = v }) }
func at(at time.Time) parcel             { return sent(func(p *parcel) { p.Sent = at }) }
func raw(key string, b []byte) rawParcel { return rawParcel{parcel{"raw", key, noon, b}} }

// What is refused before PostgreSQL hears of it, so that tx remains usable.
var refusedEvents = []struct {
	name      string
	event     outbox.DomainEvent
	eventType string
	field     string
	want      error
}{
	{"a type that nobody registered", strayParcel{good}, "outbox_test.strayParcel", "event", outbox.ErrUnregistered},
	{"a pointer to a type that nobody registered", &strayParcel{good}, "outbox_test.strayParcel", "event", outbox.ErrUnregistered},
	{"a type with pointer receivers", &pointerParcel{noon}, "*outbox_test.pointerParcel", "event", outbox.ErrUnregistered},
	{"a nil event", nil, "<nil>", "event", outbox.ErrNil},
	{"a typed nil event", (*parcel)(nil), "*outbox_test.parcel", "event", outbox.ErrNil},

	{"no aggregate id", id(""), parcelSent, "aggregate_id", outbox.ErrEmpty},
	{"no aggregate id in a nil map", mapParcel(nil), "test.map.sent.v1", "aggregate_id", outbox.ErrEmpty},
	{"an aggregate id of 256 characters", id(strings.Repeat("x", 256)), parcelSent, "aggregate_id", outbox.ErrTooLong},
	{"an aggregate id of 256 characters of several bytes", id(strings.Repeat("주", 256)), parcelSent, "aggregate_id", outbox.ErrTooLong},
	{"a blank aggregate id", id("  "), parcelSent, "aggregate_id", outbox.ErrMalformed},
	{"a control character in the aggregate id", id("a\tb"), parcelSent, "aggregate_id", outbox.ErrMalformed},
	{"a noncharacter in the aggregate id", id("a\ufffe"), parcelSent, "aggregate_id", outbox.ErrMalformed},
	{"NUL in the aggregate id", id("a\x00"), parcelSent, "aggregate_id", outbox.ErrNUL},
	{"an aggregate id that is not UTF-8", id(badText), parcelSent, "aggregate_id", outbox.ErrUTF8},
	{"an aggregate id that is not UTF-8 and too long", id(strings.Repeat("\xff", 256)), parcelSent, "aggregate_id", outbox.ErrUTF8},

	{"no partition key", raw("", nil), rawSent, "partition_key", outbox.ErrEmpty},
	{"a partition key of 256 characters", raw(strings.Repeat("주", 256), nil), rawSent, "partition_key", outbox.ErrTooLong},
	{"NUL in the partition key", raw("\x00", nil), rawSent, "partition_key", outbox.ErrNUL},
	{"a partition key that is not UTF-8", raw("\xff", nil), rawSent, "partition_key", outbox.ErrUTF8},

	{"a payload with a channel", content(make(chan int)), parcelSent, "payload", outbox.ErrEncode},
	{"a payload with NaN", content(math.NaN()), parcelSent, "payload", outbox.ErrEncode},
	{"a payload with JSON that is none", content(text(`{`)), parcelSent, "payload", outbox.ErrEncode},
	{"a payload with a number that is none", content(json.Number("x")), parcelSent, "payload", outbox.ErrEncode},
	{"a payload of 960 KiB and one byte", content(strings.Repeat("x", 960<<10-1)), parcelSent, "payload", outbox.ErrTooLarge},
	{"a payload whose numbers PostgreSQL prints in full", content(text("[" + strings.Repeat("1e300,", 4000) + "1e300]")), parcelSent, "payload", outbox.ErrTooLarge},
	{"a payload whose fractions PostgreSQL prints in full", content(text("[" + strings.Repeat("1e-16000,", 70) + "1]")), parcelSent, "payload", outbox.ErrTooLarge},
	{"a raw payload of 960 KiB and one byte", raw("key", make([]byte, 960<<10+1)), rawSent, "payload", outbox.ErrTooLarge},
	{"NUL in a payload", content("\x00"), parcelSent, "payload", outbox.ErrNUL},
	{"NUL in a payload's key", content(map[string]int{"a\x00b": 1}), parcelSent, "payload", outbox.ErrNUL},
	{"NUL in a payload, escaped", content(text(`"\u0000"`)), parcelSent, "payload", outbox.ErrNUL},
	{"a payload that is not UTF-8", content(badText), parcelSent, "payload", outbox.ErrUTF8},
	{"a payload's key that is not UTF-8", content(map[string]int{badText: 1}), parcelSent, "payload", outbox.ErrUTF8},
	{"a payload that is not UTF-8, as JSON", content(text(`"` + badText + `"`)), parcelSent, "payload", outbox.ErrUTF8},
	{"a lone surrogate", content(text(`"\ud800"`)), parcelSent, "payload", outbox.ErrJSON},
	{"a number that is too large", content(json.Number("1e200000")), parcelSent, "payload", outbox.ErrJSON},
	{"a number that is too small", content(text(`[1e-16384]`)), parcelSent, "payload", outbox.ErrJSON},
	{"a payload of 1001 levels", content(text(strings.Repeat("[", 1001) + strings.Repeat("]", 1001))), parcelSent, "payload", outbox.ErrJSON},

	{"a zero time", at(time.Time{}), parcelSent, "occurred_at", outbox.ErrTime},
	{"year 10000", at(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)), parcelSent, "occurred_at", outbox.ErrTime},
	{"year 10000 in Greenwich only", at(time.Date(9999, 12, 31, 23, 0, 0, 0, time.FixedZone("", -2*3600))), parcelSent, "occurred_at", outbox.ErrTime},
	{"year 0", at(time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)), parcelSent, "occurred_at", outbox.ErrTime},
	{"a year before Christ", at(time.Date(-44, 3, 15, 0, 0, 0, 0, time.UTC)), parcelSent, "occurred_at", outbox.ErrTime},
}

func TestRecordRefusesEvent(t *testing.T) {
	c := newCounter(t, parcels(t))
	for _, tt := range refusedEvents {
		t.Run(tt.name, func(t *testing.T) {
			c.requireRefused(t, background, c.rec, tt.want, refusal{tt.eventType, 2, tt.field}, good, good, tt.event, good)
			c.requireRefused(t, background, c.rec, tt.want, refusal{tt.eventType, 0, tt.field}, tt.event)
		})
	}
}

// requireRefused requires that Record and Queue refuse the events, that nothing
// is written or queued, and that the transaction goes on.
func (c *counter) requireRefused(t *testing.T, ctx context.Context, rec *outbox.Recorder, want error, says refusal, events ...outbox.DomainEvent) {
	t.Helper()
	tx := c.begin(t)
	before := len(c.ids(t))
	requireRefused(t, rec.Record(ctx, tx, events...), want, says)
	var n int
	require.NoError(t, tx.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox`)).Scan(&n))
	require.Equal(t, before, n, "nothing was written")

	batch := &pgx.Batch{}
	batch.Queue(`SELECT 1`)
	requireRefused(t, rec.Queue(ctx, batch, events...), want, says)
	require.Equal(t, 1, batch.Len(), "nothing was queued")

	require.NoError(t, c.rec.Record(background, tx, good), "the transaction is usable")
	require.NoError(t, tx.Commit(background))
	require.Len(t, c.ids(t), before+1)
}

var refusedSettings = []struct {
	name    string
	cfg     outbox.RecorderConfig
	context context.Context
	field   string
	want    error
}{
	{name: "a generator that fails", cfg: outbox.RecorderConfig{NewID: func() (uuid.UUID, error) { return uuid.UUID{}, errGenerator }}, field: "event_id", want: errGenerator},
	{name: "a payload above a lower limit", cfg: outbox.RecorderConfig{MaxPayload: 5}, field: "payload", want: outbox.ErrTooLarge},

	{name: "NUL in the correlation id", context: outbox.WithCorrelationID(background, "\x00"), field: "correlation_id", want: outbox.ErrNUL},
	{name: "a correlation id that is not UTF-8", context: outbox.WithCorrelationID(background, badText), field: "correlation_id", want: outbox.ErrUTF8},
	{name: "a correlation id of 256 characters", context: outbox.WithCorrelationID(background, strings.Repeat("주", 256)), field: "correlation_id", want: outbox.ErrTooLong},

	{name: "a header ce_id", cfg: header("ce_id", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header CE_own", cfg: header("CE_own", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header content-type", cfg: header("content-type", "text/plain"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header Content-Type", cfg: header("Content-Type", "text/plain"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header correlationid", cfg: header("correlationid", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header CorrelationID", cfg: header("CorrelationID", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header traceparent", cfg: header("traceparent", traceparent), field: "headers", want: outbox.ErrMalformed},
	{name: "a header TraceParent", cfg: header("TraceParent", traceparent), field: "headers", want: outbox.ErrMalformed},
	{name: "a header without a name", cfg: header("", "1"), field: "headers", want: outbox.ErrEmpty},
	{name: "NUL in a header", cfg: header("tenant", "a\x00"), field: "headers", want: outbox.ErrNUL},
	{name: "NUL in a header's name", cfg: header("ten\x00ant", "a"), field: "headers", want: outbox.ErrNUL},
	{name: "a header that is not UTF-8", cfg: header("tenant", badText), field: "headers", want: outbox.ErrUTF8},
	{name: "a header's name that is not UTF-8", cfg: header(badText, "a"), field: "headers", want: outbox.ErrUTF8},
	{name: "headers of 8 KiB and a byte", cfg: headersOf(8<<10 + 1), field: "headers", want: outbox.ErrTooLarge},
}

func header(name, value string) outbox.RecorderConfig {
	return outbox.RecorderConfig{Headers: func(context.Context, outbox.DomainEvent) map[string]string {
		return map[string]string{name: value}
	}}
}

// headersOf returns two headers that are n bytes as JSON.
func headersOf(n int) outbox.RecorderConfig {
	half := strings.Repeat("x", n/2-len(`{"a":"",`))
	return outbox.RecorderConfig{Headers: func(context.Context, outbox.DomainEvent) map[string]string {
		return map[string]string{"a": half, "b": strings.Repeat("x", n-len(`{"a":"","b":""}`)-len(half))}
	}}
}

func TestRecordRefusesSettings(t *testing.T) {
	c := newCounter(t, parcels(t))
	for _, tt := range refusedSettings {
		t.Run(tt.name, func(t *testing.T) {
			ctx := tt.context
			if ctx == nil {
				ctx = background
			}
			c.requireRefused(t, ctx, c.recorder(t, tt.cfg), tt.want, refusal{parcelSent, 0, tt.field}, good)
		})
	}
}

// Headers that exceed their limit in bytes are ErrTooLarge, whether one of them
// does alone or all do together; they have no columns that count characters.
func TestRecordRefusesLargeHeader(t *testing.T) {
	for name, cfg := range map[string]outbox.RecorderConfig{
		"a value of 9 KiB":        header("tenant", strings.Repeat("x", 9<<10)),
		"a value of 8 KiB":        header("tenant", strings.Repeat("x", 8<<10)),
		"a value that JSON grows": header("tenant", strings.Repeat("<", 2<<10)),
		"a name of 9 KiB":         header(strings.Repeat("x", 9<<10), "1"),
	} {
		t.Run(name, func(t *testing.T) {
			rec, err := outbox.NewRecorder(parcels(t), cfg)
			require.NoError(t, err)
			err = rec.Queue(background, &pgx.Batch{}, good)
			require.Error(t, err)
			require.True(t, errors.Is(err, outbox.ErrTooLarge), "%.200v", err)
		})
	}
}

// What is just small, short or early enough is stored.
var acceptedEvents = []struct {
	name  string
	event outbox.DomainEvent
	cfg   outbox.RecorderConfig
}{
	{"an aggregate id of 255 characters in 765 bytes", id(strings.Repeat("주", 255)), outbox.RecorderConfig{}},
	{"a partition key of 255 characters in 1020 bytes", raw(strings.Repeat("😀", 255), nil), outbox.RecorderConfig{}},
	{"blanks at the ends of the aggregate id", id(" 7 "), outbox.RecorderConfig{}},
	{"a payload of 960 KiB", content(strings.Repeat("x", 960<<10-2)), outbox.RecorderConfig{}},
	{"a raw payload of 960 KiB", raw("key", make([]byte, 960<<10)), outbox.RecorderConfig{}},
	{"a payload at a limit of one byte", content(7), outbox.RecorderConfig{MaxPayload: len("-.7")}},
	{"a payload above the usual limit under a higher one", content(strings.Repeat("x", 2<<20)), outbox.RecorderConfig{MaxPayload: 4 << 20}},
	{"a payload of null", content(nil), outbox.RecorderConfig{}},
	{"a payload of 1000 levels", content(text(strings.Repeat("[", 1000) + strings.Repeat("]", 1000))), outbox.RecorderConfig{}},
	{"the largest number", content(json.Number("-1e131071")), outbox.RecorderConfig{}},
	{"a pair of surrogates", content(text(`"\ud83d\ude00"`)), outbox.RecorderConfig{}},
	{"an escaped U+FFFD", content(text(`"\ufffd"`)), outbox.RecorderConfig{}},
	{"a time just behind zero", at(time.Time{}.Add(time.Microsecond)), outbox.RecorderConfig{}},
	{"a time that is not yet year 1 where it was taken", at(time.Date(0, 12, 31, 23, 0, 0, 0, time.FixedZone("", -2*3600))), outbox.RecorderConfig{}},
	{"the last second of year 9999", at(time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)), outbox.RecorderConfig{}},
	{"a map", mapParcel{"id": "map"}, outbox.RecorderConfig{}},
	{"a header with nothing in it", good, header("tenant", "")},
	{"headers of 8 KiB", good, headersOf(8 << 10)},
}

func TestRecordAcceptsEvent(t *testing.T) {
	c := newCounter(t, parcels(t))
	for i, tt := range acceptedEvents {
		t.Run(tt.name, func(t *testing.T) {
			c.commit(t, background, c.recorder(t, tt.cfg), tt.event)
			require.Len(t, c.ids(t), i+1)
		})
	}
}

// The last time before year 10000 stays in its year however it is rounded.
func TestLastNanosecond(t *testing.T) {
	c := newCounter(t, parcels(t))
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			db := testenv.PoolIn(t, mode)
			require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error {
				return c.rec.Record(background, tx, at(time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC)))
			}))
			all := c.rows(t)
			require.Equal(t, time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC), all[len(all)-1].OccurredAt)
		})
	}
}

func TestNilTransactionAndBatch(t *testing.T) {
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	var typed *pgxpool.Tx
	for name, tx := range map[string]pgx.Tx{"nil": nil, "typed nil": typed} {
		t.Run(name, func(t *testing.T) {
			requireRefused(t, rec.Record(background, tx, good), outbox.ErrNil, refusal{"", -1, "tx"})
			requireRefused(t, rec.Record(background, tx), outbox.ErrNil, refusal{"", -1, "tx"})
		})
	}
	requireRefused(t, rec.Queue(background, nil, good), outbox.ErrNil, refusal{"", -1, "batch"})
	requireRefused(t, rec.Queue(background, nil), outbox.ErrNil, refusal{"", -1, "batch"})
}

// Nothing that commits each statement for itself can be passed as a transaction (T10).
func TestOnlyTransactionsAreTransactions(t *testing.T) {
	tx := reflect.TypeFor[pgx.Tx]()
	require.Equal(t, tx, reflect.TypeOf((*outbox.Recorder).Record).In(2), "Record asks for a pgx.Tx")
	for _, not := range []reflect.Type{
		reflect.TypeFor[*pgxpool.Pool](), reflect.TypeFor[*pgxpool.Conn](), reflect.TypeFor[*pgx.Conn](), reflect.TypeFor[*pgconn.PgConn](),
	} {
		require.False(t, not.Implements(tx), "%s", not)
	}
	require.True(t, reflect.TypeFor[*pgxpool.Tx]().Implements(tx))
}

func TestEndedTransaction(t *testing.T) {
	c := newCounter(t, parcels(t))
	committed, rolledBack := c.begin(t), c.begin(t)
	require.NoError(t, committed.Commit(background))
	require.NoError(t, rolledBack.Rollback(background))
	require.ErrorIs(t, c.rec.Record(background, committed, good), pgx.ErrTxClosed)
	require.ErrorIs(t, c.rec.Record(background, rolledBack, good), pgx.ErrTxClosed)
	require.Empty(t, c.ids(t))
}

func TestCanceledContext(t *testing.T) {
	c := newCounter(t, parcels(t))
	ctx, cancel := context.WithCancel(background)
	cancel()
	require.ErrorIs(t, c.rec.Record(ctx, c.begin(t), good), context.Canceled)
	require.Empty(t, c.ids(t))
}

func TestPointersAreDereferenced(t *testing.T) {
	c := newCounter(t, parcels(t))
	var seen []outbox.DomainEvent
	rec := c.recorder(t, outbox.RecorderConfig{Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string {
		seen = append(seen, e)
		return nil
	}})
	p, r := id("a"), raw("key", []byte{1})
	c.commit(t, background, rec, &p, p, &r) // rawCodec asserts that it gets a value
	require.Equal(t, []string{"a", "a", "raw"}, c.ids(t))
	require.Equal(t, []outbox.DomainEvent{p, p, r}, seen, "the hook sees values")
}

// Every column of every kind of row.
func TestStoredRow(t *testing.T) {
	c := newCounter(t, parcels(t))
	ids := []uuid.UUID{uuid.New(), uuid.New(), uuid.New()}
	next := 0
	rec := c.recorder(t, outbox.RecorderConfig{
		NewID: func() (uuid.UUID, error) { next++; return ids[next-1], nil },
		Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string {
			if p, ok := e.(parcel); ok && p.ID == "주문-1" {
				return map[string]string{"tenant": `a "b" <c>`}
			}
			return nil
		},
	})
	ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, "corr-1"), traceparent)
	seoul := time.FixedZone("KST", 9*3600)
	first := parcel{ID: "주문-1", Sent: time.Date(2026, 2, 3, 4, 5, 6, 123_456_789, seoul), Content: map[string]any{"b": 1.50, "a": "x\\\"\n😀"}}
	second := rawParcel{parcel{"raw-1", "key-1", noon, []byte{0, 255, '"', '\\', 0}}}

	tx := c.begin(t)
	require.NoError(t, rec.Record(ctx, tx, first, second))
	require.NoError(t, rec.Record(background, tx, good))
	var xid uint64
	var now time.Time
	require.NoError(t, tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text::bigint, now()`).Scan(&xid, &now))
	require.NoError(t, tx.Commit(ctx))

	got := c.rows(t)
	for i := range got {
		require.True(t, now.Equal(got[i].CreatedAt))
		got[i].CreatedAt = now
	}
	require.Equal(t, []row{
		{
			ID: 1, EventID: ids[0], EventType: parcelSent, Source: "post-office", AggregateType: "Parcel", AggregateID: "주문-1",
			Payload: new(`{"a": "x\\\"\n😀", "b": 1.5}`), ContentType: "application/json",
			Headers:    new(`{"tenant": "a \"b\" <c>", "traceparent": "` + traceparent + `", "correlationid": "corr-1"}`),
			OccurredAt: time.Date(2026, 2, 2, 19, 5, 6, 123_456_000, time.UTC), CreatedAt: now, Xid: xid,
		},
		{
			ID: 2, EventID: ids[1], EventType: rawSent, Source: "post-office", AggregateType: "Raw", AggregateID: "raw-1",
			PayloadBytes: []byte{0, 255, '"', '\\', 0}, ContentType: "application/octet-stream", Topic: new("raw"), PartitionKey: new("key-1"),
			Headers:    new(`{"traceparent": "` + traceparent + `", "correlationid": "corr-1"}`),
			OccurredAt: noon, CreatedAt: now, Xid: xid,
		},
		{
			ID: 3, EventID: ids[2], EventType: parcelSent, Source: "post-office", AggregateType: "Parcel", AggregateID: "good",
			Payload: new(`"good"`), ContentType: "application/json", OccurredAt: noon, CreatedAt: now, Xid: xid,
		},
	}, got)
}

func TestDefaultIDs(t *testing.T) {
	c := newCounter(t, parcels(t))
	events, _ := numberedParcels(1000)
	c.commit(t, background, c.rec, events...)
	var ids []string
	for _, r := range c.rows(t) {
		require.EqualValues(t, 7, r.EventID.Version())
		require.Equal(t, uuid.RFC4122, r.EventID.Variant())
		ids = append(ids, r.EventID.String())
	}
	require.True(t, slices.IsSorted(ids), "in the order of time")
	require.Len(t, slices.Compact(ids), 1000)
}

var traceParentTests = []struct {
	name, traceparent string
	kept              bool
}{
	{"that is well formed", traceparent, true},
	{"that is not sampled", strings.TrimSuffix(traceparent, "01") + "00", true},
	{"that is not there", "", false},
	{"in capitals", strings.ToUpper(traceparent), false},
	{"without flags", strings.TrimSuffix(traceparent, "-01"), false},
	{"with a space in front", " " + traceparent, false},
	{"with a newline behind", traceparent + "\n", false},
	{"with NUL", traceparent + "\x00", false},
	{"that is no UTF-8", "\xff", false},
	{"with more behind", traceparent + "-what-the-future-brings", false},
	{"of many bytes", strings.Repeat("0", 1<<20), false},
}

// The W3C asks those who pass a traceparent on to leave out what is malformed.
func TestTraceParent(t *testing.T) {
	c := newCounter(t, parcels(t))
	for _, tt := range traceParentTests {
		t.Run(tt.name, func(t *testing.T) { c.requireTraceParent(t, tt.traceparent, tt.kept) })
	}
}

// https://www.w3.org/TR/trace-context/#traceparent-header: version ff is
// forbidden, and an id of zeros means that there is none.
func TestTraceParentOfZeros(t *testing.T) {
	c := newCounter(t, parcels(t))
	for name, tp := range map[string]string{
		"trace id":  "00-00000000000000000000000000000000-b7ad6b7169203331-01",
		"parent id": "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
		"version":   "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
	} {
		t.Run(name, func(t *testing.T) { c.requireTraceParent(t, tp, false) })
	}
}

// requireTraceParent requires that a recorded event carries it or not, whether
// it comes from the context or from the hook, which has the last word.
func (c *counter) requireTraceParent(t *testing.T, tp string, kept bool) {
	t.Helper()
	hooked := c.recorder(t, outbox.RecorderConfig{TraceParent: func(context.Context) string { return tp }})
	c.commit(t, outbox.WithTraceParent(background, tp), c.rec, good)
	c.commit(t, outbox.WithTraceParent(background, strings.Replace(traceparent, "0af", "fff", 1)), hooked, good)
	var want *string
	if kept {
		want = new(`{"traceparent": "` + tp + `"}`)
	}
	all := c.rows(t)
	for _, r := range all[len(all)-2:] {
		require.Equal(t, want, r.Headers)
	}
}

func TestContextValues(t *testing.T) {
	require.Empty(t, outbox.CorrelationID(background))
	require.Empty(t, outbox.TraceParent(background))
	ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, "c"), "t")
	require.Equal(t, "c", outbox.CorrelationID(ctx))
	require.Equal(t, "t", outbox.TraceParent(ctx))
	require.Empty(t, outbox.CorrelationID(outbox.WithCorrelationID(ctx, "")))
}

// Bytes are stored as they are, and an empty message is no NULL.
func TestRawPayload(t *testing.T) {
	c := newCounter(t, parcels(t))
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	payloads := [][]byte{nil, {}, {0}, []byte("NULL"), []byte(`"\x00"`), all, []byte(random(100_000))}
	var events []outbox.DomainEvent
	for _, b := range payloads {
		events = append(events, raw("key", b))
	}
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			db := testenv.PoolIn(t, mode)
			require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return c.rec.Record(background, tx, events...) }))
			rows := c.rows(t)
			for i, r := range rows[len(rows)-len(payloads):] {
				require.NotNil(t, r.PayloadBytes)
				require.Equal(t, string(payloads[i]), string(r.PayloadBytes))
				require.Nil(t, r.Payload)
			}
		})
	}
}

// application/json with a parameter is not jsonb's business.
func TestJSONWithParameterIsRaw(t *testing.T) {
	codec := outbox.JSON()
	codec.ContentType = "application/json; charset=utf-8"
	events, err := outbox.NewRegistry("post-office", outbox.Event(parcelSent, "Parcel", parcel.Number).Codec(codec))
	require.NoError(t, err)
	c := newCounter(t, events)
	c.commit(t, background, c.rec, content(text(`{"b": 1e2,"a":"\u0000"}`)))
	r := c.rows(t)[0]
	require.Equal(t, `{"b":1e2,"a":"\u0000"}`, string(r.PayloadBytes), "as encoding/json compacts it")
	require.Nil(t, r.Payload)
}

// A codec of one's own that says application/json and writes something else.
func TestBadJSONFromCodec(t *testing.T) {
	for _, text := range []string{"", "{", "1 2"} {
		codec := outbox.JSON()
		codec.Encode = func(any) ([]byte, error) { return []byte(text), nil }
		events, err := outbox.NewRegistry("post-office", outbox.Event(parcelSent, "Parcel", parcel.Number).Codec(codec))
		require.NoError(t, err)
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
		require.NoError(t, err)
		requireRefused(t, rec.Queue(background, &pgx.Batch{}, good), outbox.ErrJSON, refusal{parcelSent, 0, "payload"})
	}
}

// What a codec says is in the error, for those who know the codec.
func TestCodecErrorIsWrapped(t *testing.T) {
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	_, ok := errors.AsType[*json.UnsupportedTypeError](rec.Queue(background, &pgx.Batch{}, content(make(chan int))))
	require.True(t, ok)
}

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// The same rows are stored however pgx talks to PostgreSQL, or to what stands
// between them.
func TestRecordExecModes(t *testing.T) {
	c := newCounter(t, parcels(t))
	rec := c.recorder(t, header("tenant", `{"a",'b'\}`))
	events := []outbox.DomainEvent{
		good,
		parcel{ID: `{"a",'b'\ NULL}`, Sent: time.Date(2026, 2, 3, 4, 5, 6, 123_456_789, time.FixedZone("KST", 9*3600)), Content: []any{`\`, `"`, `'`, "{},", nil, "NULL", "주문😀", 1e300}},
		rawParcel{parcel{"NULL", "null", time.Date(1969, 12, 31, 23, 59, 59, 999_999_999, time.UTC), []byte{0, '\\', 'x', '"', 255}}},
		raw("$1", []byte(`\x00`)),
		at(time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC)), at(time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)),
		mapParcel{"id": "map"},
	}
	ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, `{"a",'b'\}`), traceparent)
	var want []row
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			db := testenv.PoolIn(t, mode)
			for range 2 { // the second time with what the first one has cached
				require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, events...) }))
				got := c.takeRows(t)
				if want == nil {
					want = got
					require.Len(t, want, len(events))
					require.Equal(t, `{"a",'b'\ NULL}`, want[1].AggregateID)
					require.Equal(t, `["\\", "\"", "'", "{},", null, "NULL", "주문😀", 1`+strings.Repeat("0", 300)+`]`, *want[1].Payload)
					require.Equal(t, time.Date(2026, 2, 2, 19, 5, 6, 123_456_000, time.UTC), want[1].OccurredAt)
				}
				require.Equal(t, want, got)

				var batch pgx.Batch
				require.NoError(t, rec.Queue(ctx, &batch, events[:3]...))
				batch.Queue(`SELECT 1`)
				require.NoError(t, rec.Queue(ctx, &batch, events[3:]...))
				require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return tx.SendBatch(ctx, &batch).Close() }))
				require.Equal(t, want, c.takeRows(t))

				require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
					for _, e := range events {
						if err := rec.Record(ctx, tx, e); err != nil {
							return err
						}
					}
					return nil
				}))
				require.Equal(t, want, c.takeRows(t), "one by one")

				times := 500/len(events) + 1
				require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
					return rec.Record(ctx, tx, slices.Repeat(events, times)...)
				}))
				require.Equal(t, slices.Repeat(want, times), c.takeRows(t), "by COPY")
			}
		})
	}
}

// takeRows returns the rows without what differs from one call to the next, and
// removes them.
func (c *counter) takeRows(t *testing.T) []row {
	t.Helper()
	all := c.rows(t)
	for i := range all {
		all[i].ID, all[i].EventID, all[i].CreatedAt, all[i].Xid = 0, uuid.Nil, time.Time{}, 0
	}
	_, err := c.db.Exec(background, c.sql(`DELETE FROM {s}.outbox`))
	require.NoError(t, err)
	return all
}

// One recorder serves all requests at once; go test -race watches it.
func TestConcurrentRecord(t *testing.T) {
	c := newCounter(t, parcels(t))
	var all sync.WaitGroup
	errs := make(chan error, 16)
	for i := range 16 {
		all.Go(func() {
			for j := range 20 {
				id := fmt.Sprintf("%d-%d", i, j)
				ctx := outbox.WithCorrelationID(background, id)
				err := pgx.BeginFunc(ctx, c.db, func(tx pgx.Tx) error {
					return c.rec.Record(ctx, tx, parcel{ID: id, Sent: noon, Content: id}, &rawParcel{parcel{id, id, noon, []byte(id)}})
				})
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	require.Empty(t, errs)
	seen := map[string]int{}
	for _, r := range c.rows(t) {
		seen[r.AggregateID]++
		require.Equal(t, `{"correlationid": "`+r.AggregateID+`"}`, *r.Headers, "nobody else's")
		if r.EventType == rawSent {
			require.Equal(t, r.AggregateID, string(r.PayloadBytes))
		} else {
			require.Equal(t, `"`+r.AggregateID+`"`, *r.Payload)
		}
	}
	require.Len(t, seen, 320)
	require.Equal(t, []int{2}, slices.Compact(slices.Collect(maps.Values(seen))))
}

// A codec may encode into the same buffer again and again.
func TestCodecReusesItsBuffer(t *testing.T) {
	buffer := make([]byte, 1)
	events, err := outbox.NewRegistry("post-office", outbox.Event(rawSent, "Raw", rawParcel.Number).Codec(outbox.Codec{
		ContentType: "application/octet-stream",
		Encode: func(event any) ([]byte, error) {
			copy(buffer, event.(rawParcel).ID)
			return buffer, nil
		},
		Decode: func([]byte, any) error { return nil },
	}))
	require.NoError(t, err)
	c := newCounter(t, events)
	c.commit(t, background, c.rec, rawParcel{parcel{ID: "a", Sent: noon}}, rawParcel{parcel{ID: "b", Sent: noon}})
	var payloads string
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT string_agg(convert_from(payload_bytes, 'UTF8'), '' ORDER BY id) FROM {s}.outbox`)).Scan(&payloads))
	require.Equal(t, "ab", payloads)
}

func TestRecorderConfig(t *testing.T) {
	_, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{MaxPayload: 100<<20 + 1})
	require.ErrorContains(t, err, "MaxPayload")
	_, err = outbox.NewRecorder(nil, outbox.RecorderConfig{Schema: strings.Repeat("x", 64), MaxPayload: -1})
	require.ErrorIs(t, err, outbox.ErrNil)
	require.ErrorIs(t, err, outbox.ErrTooLong)
	for _, field := range []string{"registry", "Schema", "MaxPayload"} {
		require.ErrorContains(t, err, field)
	}
	for name, tt := range map[string]struct {
		schema string
		want   error
	}{
		"63 bytes":                 {strings.Repeat("x", 63), nil},
		"64 bytes":                 {strings.Repeat("x", 64), outbox.ErrTooLong},
		"more bytes than letters":  {strings.Repeat("주", 22), outbox.ErrTooLong},
		"quotes":                   {`a "b"`, nil},
		"NUL":                      {"a\x00", outbox.ErrNUL},
		"bytes that are not UTF-8": {badText, outbox.ErrUTF8},
		"whoever is logged in":     {"$user", outbox.ErrMalformed},
	} {
		t.Run("a schema of "+name, func(t *testing.T) {
			_, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: tt.schema})
			require.ErrorIs(t, err, tt.want)
			if tt.want == nil {
				require.NoError(t, err)
			}
		})
	}
}

// A service without any setting uses the schema public.
func TestDefaultSchema(t *testing.T) {
	db := testenv.OtherDatabase(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{}))
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return rec.Record(background, tx, good) }))
	var id string
	require.NoError(t, db.QueryRow(background, `SELECT aggregate_id FROM public.outbox`).Scan(&id))
	require.Equal(t, "good", id)
}

// A schema that is not on the search path, and a search path that leads to
// another outbox: the recorder writes where it was told to.
func TestSearchPathDoesNotMatter(t *testing.T) {
	testenv.Direct(t) // a setting of sessions
	c, trap := newCounter(t, parcels(t)), newCounter(t, parcels(t))
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{trap.schema}.Sanitize()
	})
	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return c.rec.Record(background, tx, good) }))
	require.Equal(t, []string{"good"}, c.ids(t))
	require.Empty(t, trap.ids(t))
}

var errConflict = errors.New("somebody else was faster")

// A business method that runs again after a conflict leaves one event, whether
// PostgreSQL finds the conflict or the service does (T9).
func TestRetryLeavesOneEvent(t *testing.T) {
	for name, tt := range map[string]struct {
		level  pgx.TxIsoLevel
		update string
		again  func(error) bool
	}{
		"version in the row": {pgx.ReadCommitted, `UPDATE {s}.stock SET left_over = left_over - 1, version = version + 1 WHERE version = $1`,
			func(err error) bool { return errors.Is(err, errConflict) }},
		"repeatable read": {pgx.RepeatableRead, `UPDATE {s}.stock SET left_over = left_over - 1, version = $1 + 1`, isSerializationFailure},
		"serializable":    {pgx.Serializable, `UPDATE {s}.stock SET left_over = left_over - 1, version = $1 + 1`, isSerializationFailure},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCounter(t, parcels(t))
			_, err := c.db.Exec(background, c.sql(`CREATE TABLE {s}.stock AS SELECT 10 AS left_over, 1 AS version`))
			require.NoError(t, err)
			attempts := 0
			buy := func(tx pgx.Tx) error {
				attempts++
				var version int
				if err := tx.QueryRow(background, c.sql(`SELECT version FROM {s}.stock`)).Scan(&version); err != nil {
					return err
				}
				if attempts == 1 {
					_, err := c.db.Exec(background, c.sql(`UPDATE {s}.stock SET left_over = left_over - 1, version = version + 1`))
					require.NoError(t, err)
				}
				if err := c.rec.Record(background, tx, id(fmt.Sprintf("attempt-%d", attempts))); err != nil {
					return err
				}
				tag, err := tx.Exec(background, c.sql(tt.update), version)
				if err == nil && tag.RowsAffected() == 0 {
					return errConflict
				}
				return err
			}
			for err = errConflict; err != nil; {
				err = pgx.BeginTxFunc(background, c.db, pgx.TxOptions{IsoLevel: tt.level}, buy)
				require.True(t, err == nil || tt.again(err), "%v", err)
			}
			require.Equal(t, 2, attempts)
			require.Equal(t, []string{"attempt-2"}, c.ids(t))
			var left int
			require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT left_over FROM {s}.stock`)).Scan(&left))
			require.Equal(t, 8, left)
		})
	}
}

// A conflict that PostgreSQL finds inside Record or at COMMIT is still there to
// be recognised.
func TestRecordKeepsPostgresError(t *testing.T) {
	c := newCounter(t, parcels(t))
	_, err := c.db.Exec(background, c.sql(`
		CREATE FUNCTION {s}.clash() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN RAISE EXCEPTION 'clash' USING ERRCODE = 'serialization_failure'; END$$;
		CREATE TRIGGER clash BEFORE INSERT ON {s}.outbox FOR EACH STATEMENT EXECUTE FUNCTION {s}.clash()`))
	require.NoError(t, err)
	tx := c.begin(t)
	require.True(t, isSerializationFailure(c.rec.Record(background, tx, good)))
	require.Error(t, tx.Commit(background), "the transaction is aborted, as documented")
	require.Empty(t, c.ids(t))
}

func isSerializationFailure(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.Code == "40001"
}

// Three events of one transaction, by convention to three topics, arrive each in
// its own (T10).
func TestThreeTopicsInOneTransaction(t *testing.T) {
	shop := "shop" + strings.ReplaceAll(uuid.NewString(), "-", "")
	topics := map[string]string{}
	for _, domain := range []string{"order", "payment", "like"} {
		topics[domain] = fmt.Sprintf("%s-%s-events", shop, domain)
	}
	name := func(domain, action string) string { return fmt.Sprintf("loopers.%s-%s.%s.v1", shop, domain, action) }
	events, err := outbox.NewRegistry("commerce-api",
		outbox.Event(name("order", "created"), "Order", orderCreated.AggregateID),
		outbox.Event(name("payment", "paid"), "Payment", paymentPaid.AggregateID),
		outbox.Event(name("like", "created"), "Like", likeCreated.AggregateID))
	require.NoError(t, err)
	c := newCounter(t, events)
	c.commit(t, background, c.rec,
		orderCreated{shopEvent{"order-1", noon}}, paymentPaid{shopEvent{"payment-1", noon}}, likeCreated{shopEvent{"like-1", noon}})

	kafka := []kgo.Opt{kgo.SeedBrokers(testenv.Brokers(t)...), kgo.AllowAutoTopicCreation(), kgo.MetadataMinAge(100 * time.Millisecond)}
	cfg := quick
	cfg.Schema = c.schema
	relay, err := outbox.NewRelay(c.db, kafka, cfg)
	require.NoError(t, err)
	run(t, relay)
	require.Equal(t, map[string]string{
		topics["order"]: "order-1", topics["payment"]: "payment-1", topics["like"]: "like-1",
	}, keysByTopic(t, kafka, slices.Collect(maps.Values(topics))))
}

// keysByTopic waits for a record of each topic and returns its key.
func keysByTopic(t *testing.T, kafka []kgo.Opt, topics []string) map[string]string {
	t.Helper()
	client, err := kgo.NewClient(append(kafka, kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxWait(100*time.Millisecond))...) // a topic that appears later waits for the fetch before it
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, patience)
	defer cancel()
	keys := map[string]string{}
	for len(keys) < len(topics) {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "so far %v", keys)
		fetches.EachRecord(func(r *kgo.Record) { keys[r.Topic] = string(r.Key) })
	}
	return keys
}

// The functions of one call are called once for each event, in order, and none
// of them for events behind a refused one.
func TestHooksAreCalledOnce(t *testing.T) {
	c := newCounter(t, parcels(t))
	var ids atomic.Int64
	rec := c.recorder(t, outbox.RecorderConfig{NewID: func() (uuid.UUID, error) { ids.Add(1); return uuid.NewV7() }})
	c.commit(t, background, rec, good, good, good)
	require.EqualValues(t, 3, ids.Swap(0))
	require.Error(t, rec.Queue(background, &pgx.Batch{}, good, id(""), good))
	require.EqualValues(t, 1, ids.Load())
}
