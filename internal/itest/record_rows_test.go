package itest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The last time before year 10000 stays in its year however it is rounded.
func TestLastNanosecond(t *testing.T) {
	t.Parallel()
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

// Every column of every kind of row.
func TestStoredRow(t *testing.T) {
	t.Parallel()
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

// By size readers know how much they read, so it is what PostgreSQL prints, whatever a writer says.
func TestStoredSize(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	c := newCounter(t, parcels(t))
	rec := c.recorder(t, header("tenant", "주문 \"<1>\"\n"))
	c.commit(t, background, rec, good, raw("key", nil), raw("key", []byte(random(100_000))), content(text(`[1e300, -1E-300, {"a":1,"b":[ ]}]`)), content(text(`1e131071`)))
	c.commit(t, background, c.rec, good)
	var rows, wrong int
	require.NoError(t, c.db.QueryRow(background, c.sql(`
		SELECT count(*), count(*) FILTER (WHERE size <> coalesce(octet_length(payload_bytes), octet_length(payload::text)) + coalesce(octet_length(headers::text), 0))
		  FROM {s}.outbox`)).Scan(&rows, &wrong))
	require.Equal(t, []int{6, 0}, []int{rows, wrong})

	const insert = `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at%s)
		SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'A', '1', %s, 'application/json', now()%s`
	for what, rejected := range map[string]struct{ sql, code string }{
		"a size of its own":           {fmt.Sprintf(insert, ", size", `'1'`, ", 1"), "428C9"},
		"more than 200 MiB printed":   {fmt.Sprintf(insert, "", `(SELECT jsonb_agg(1e131071) FROM generate_series(1, 1700))`, ""), "23514"},
		"more than 200 MiB of header": {fmt.Sprintf(insert, ", headers", `'1'`, ", (SELECT jsonb_agg(1e131071) FROM generate_series(1, 1700))"), "23514"},
	} {
		_, err := c.db.Exec(background, c.sql(rejected.sql))
		require.Equal(t, rejected.code, pg.Code(err), what)
	}
	_, err := c.db.Exec(background, c.sql(fmt.Sprintf(insert, "", `(SELECT jsonb_agg(1e131071) FROM generate_series(1, 1000))`, "")))
	require.NoError(t, err)
}

func TestDefaultIDs(t *testing.T) {
	t.Parallel()
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

// Bytes are stored as they are, and an empty message is no NULL.
func TestRawPayload(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
	t.Parallel()
	for _, text := range []string{"", "{", "1 2"} {
		codec := outbox.JSON()
		codec.Encode = func(context.Context, any) ([]byte, error) { return []byte(text), nil }
		events, err := outbox.NewRegistry("post-office", outbox.Event(parcelSent, "Parcel", parcel.Number).Codec(codec))
		require.NoError(t, err)
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
		require.NoError(t, err)
		requireRefused(t, rec.Queue(background, &pgx.Batch{}, good), outbox.ErrJSON, refusal{parcelSent, 0, "payload"})
	}
}

// What a codec says is in the error, for those who know the codec.
func TestCodecErrorIsWrapped(t *testing.T) {
	t.Parallel()
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	_, ok := errors.AsType[*json.UnsupportedTypeError](rec.Queue(background, &pgx.Batch{}, content(make(chan int))))
	require.True(t, ok)
}

// The same rows are stored however pgx talks to PostgreSQL, or to what stands
// between them.
func TestRecordExecModes(t *testing.T) {
	t.Parallel()
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

// A codec may encode into the same buffer again and again.
func TestCodecReusesItsBuffer(t *testing.T) {
	t.Parallel()
	buffer := make([]byte, 1)
	events, err := outbox.NewRegistry("post-office", outbox.Event(rawSent, "Raw", rawParcel.Number).Codec(outbox.Codec{
		ContentType: "application/octet-stream",
		Encode: func(_ context.Context, event any) ([]byte, error) {
			copy(buffer, event.(rawParcel).ID)
			return buffer, nil
		},
		Decode: func(context.Context, []byte, any) error { return nil },
	}))
	require.NoError(t, err)
	c := newCounter(t, events)
	c.commit(t, background, c.rec, rawParcel{parcel{ID: "a", Sent: noon}}, rawParcel{parcel{ID: "b", Sent: noon}})
	var payloads string
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT string_agg(convert_from(payload_bytes, 'UTF8'), '' ORDER BY id) FROM {s}.outbox`)).Scan(&payloads))
	require.Equal(t, "ab", payloads)
}
