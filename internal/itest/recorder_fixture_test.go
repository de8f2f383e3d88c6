package itest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
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

// rawCodec passes the content as it is.
var rawCodec = outbox.Codec{
	ContentType: "application/octet-stream",
	Encode: func(_ context.Context, event any) ([]byte, error) {
		b, _ := event.(rawParcel).Content.([]byte)
		return b, nil
	},
	Decode: func(_ context.Context, data []byte, event any) error { event.(*rawParcel).Content = data; return nil },
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
	db, schema := testenv.Migrated(t)
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

func header(name, value string) outbox.RecorderConfig {
	return outbox.RecorderConfig{Headers: func(context.Context, outbox.DomainEvent) map[string]string {
		return map[string]string{name: value}
	}}
}

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

func isSerializationFailure(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.Code == "40001"
}
