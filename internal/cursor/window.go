package cursor

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// A window that is too large for the statement that announces it is read afterwards, in steps. No
// step takes longer because more events wait. First its ids are read page by page, in the order of
// the index on (xid, id). Then its events are read in the order of ids, as many at once as the
// memory has room for.
//
// Each step checks that the row of outbox_cursor that the session knows is still there. If the row
// vanished in a crash or a failover, ids and transaction ids may have been given to other rows. The
// result has no row then, and the error is ErrStale.

const (
	// maxOpenBytes bounds the events that are read in the statement that announces their
	// window.
	maxOpenBytes = 1 << 20
	// maxBatchBytes bounds the events that are read at once. A relay holds two batches: one is being sent while
	// the next is fetched. Beside them it holds the events for partitions that have not answered, at most a few
	// megabytes of each of 16 sends.
	maxBatchBytes = 16 << 20
)

// sqlProof has a row if the row of outbox_cursor with the id $1 is still there.
const sqlProof = `
    SELECT FROM {schema}.outbox_cursor
     WHERE id = $1 AND relay = $2::text AND epoch = $3 AND pg_postmaster_start_time() = $4`

// proofArgs are the parameters of sqlProof.
func (c *Store) proofArgs(p Position) []any { return []any{p.CursorID, c.Relay, p.Epoch, p.Server} }

// Unpaged is the part of a window that no page has read yet: ascending ranges of transaction ids, and the last id
// that was read in the first of them.
type Unpaged struct {
	Ranges []XidRange
	ID     int64 // of outbox, in the first transaction of the first range
}

// XidRange is a range of transaction ids, including both ends.
type XidRange struct{ First, Last uint64 }

// UnpagedOf returns a whole window: each transaction that was in progress in the base, and all later ones. The
// transactions between those in progress were attempted; there may be very many. Transactions that were in progress at
// the end of the window are left out: they are not in the window, and may have very many rows.
func UnpagedOf(p Position) (u Unpaged, err error) {
	u.ID = math.MinInt64
	var xids []uint64
	late, open := tables.SnapshotInProgress(p.Base), tables.SnapshotInProgress(p.Window)
	for _, text := range slices.Concat(late, open, []string{tables.SnapshotMax(p.Base), tables.SnapshotMax(p.Window)}) {
		xid, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return u, fmt.Errorf("read snapshots %s and %s: %w", p.Base, p.Window, err)
		}
		xids = append(xids, xid)
	}
	inBase, inWindow, ends := xids[:len(late)], xids[len(late):len(late)+len(open)], xids[len(xids)-2:]
	for _, xid := range inBase {
		if _, stillOpen := slices.BinarySearch(inWindow, xid); !stillOpen {
			u.Ranges = append(u.Ranges, XidRange{xid, xid})
		}
	}
	next := ends[0]
	for _, xid := range slices.Concat(inWindow, ends[1:]) { // the gaps between those in progress
		if next < xid {
			u.Ranges = append(u.Ranges, XidRange{next, xid - 1})
		}
		next = max(next, xid+1)
	}
	return u, nil
}

// args returns the ranges as two arrays.
func (u Unpaged) args() (first, last []string) {
	for _, r := range u.Ranges {
		first, last = append(first, strconv.FormatUint(r.First, 10)), append(last, strconv.FormatUint(r.Last, 10))
	}
	return first, last
}

// After returns the part that is left when a page has ended at a row.
func (u Unpaged) After(xid uint64, id int64) (Unpaged, error) {
	ranges := u.Ranges
	for len(ranges) > 0 && ranges[0].Last < xid {
		ranges = ranges[1:]
	}
	if len(ranges) == 0 || xid < u.Ranges[0].First || xid == u.Ranges[0].First && id <= u.ID {
		return u, fmt.Errorf("page ended at (%d, %d), outside of what was to be read", xid, id)
	}
	rest := Unpaged{Ranges: slices.Clone(ranges), ID: id}
	rest.Ranges[0].First = xid
	return rest, nil
}

// sqlPage reads the next ids of a window, from the index only: $8 rows from ($5, $7) on.
// With a comparison of rows the index is entered in the right place, however deep a page
// is. A page may have no id of the window and not be the last one. The last row of a full
// page is where the next one begins.
const sqlPage = `
WITH proof AS MATERIALIZED (` + sqlProof + `
), page AS MATERIALIZED (
    SELECT o.xid, o.id
      FROM unnest($5::text[], $6::text[]) WITH ORDINALITY AS r (first, last, n)
     CROSS JOIN LATERAL (SELECT xid, id FROM {schema}.outbox
                          WHERE (xid, id) > (r.first::xid8, CASE r.n WHEN 1 THEN $7::bigint ELSE '-9223372036854775808' END) AND xid <= r.last::xid8
                          ORDER BY xid, id LIMIT $8) AS o
     WHERE EXISTS (SELECT FROM proof)
       AND CASE r.first WHEN r.last THEN (SELECT ` + tables.NotRolledBack + ` FROM (SELECT r.first::xid8) AS one (x)) ELSE true END
     LIMIT $8
)
SELECT (SELECT pg_catalog.array_agg(id) FROM page WHERE id > $9 AND pg_visible_in_snapshot(xid, $10::pg_snapshot)),
       (SELECT xid::text FROM page OFFSET $8::bigint - 1), (SELECT id FROM page OFFSET $8::bigint - 1)
  FROM proof`

// MaxPageIDs is the most rows that [Store.Page] should read, which takes about 50 ms.
const MaxPageIDs = 50_000

// Page returns ids of the open window's events above p.Last, in no order, and the part that is left. It reads limit
// rows of the index.
func (c *Store) Page(ctx context.Context, p Position, u Unpaged, limit int) (ids []int64, rest Unpaged, err error) {
	first, last := u.args()
	attempted := p.Last
	if attempted == 0 { // of a new window, and an id may be below 1
		attempted = math.MinInt64
	}
	var endXid pgtype.Text
	var endID pgtype.Int8
	err = c.query(ctx, func(rows pgx.Rows) error {
		_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&ids, &endXid, &endID)
		})
		return err
	}, c.SQLPage, append(c.proofArgs(p), first, last, u.ID, limit, attempted, p.Window)...)
	if err == nil && endXid.Valid {
		var xid uint64
		if xid, err = strconv.ParseUint(endXid.String, 10, 64); err == nil {
			rest, err = u.After(xid, endID.Int64)
		}
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, u, ErrStale
	}
	if err != nil {
		return nil, u, fmt.Errorf("read window: %w", err)
	}
	return ids, rest, nil
}

// sqlFetch reads events by ranges of ids, up to the first that does not fit into $7 bytes with
// those before it. One event always fits. Of an event with more than $8 bytes it reads neither payload nor
// headers; such an event counts with the bytes in which PostgreSQL stores it, which the statement copies that parks it.
// ORDER BY makes the planner use the primary key: over an empty table the other index looks as good. The
// statement sorts sizes, never rows, and the rows come in the order of the ranges.
const sqlFetch = `
WITH proof AS MATERIALIZED (` + sqlProof + `
), sizes AS MATERIALIZED (
    SELECT o.id, sum(o.size) OVER (ORDER BY o.id) - o.size AS before
      FROM unnest($5::bigint[], $6::bigint[]) AS r (first, last)
     CROSS JOIN LATERAL (SELECT id, CASE WHEN size <= $8::int THEN size
                                       ELSE coalesce(pg_catalog.pg_column_size(payload), 0) + coalesce(pg_catalog.pg_column_size(payload_bytes), 0)
                                            + coalesce(pg_catalog.pg_column_size(headers), 0) END AS size
                           FROM {schema}.outbox WHERE id BETWEEN r.first AND r.last ORDER BY id OFFSET 0) AS o
     WHERE EXISTS (SELECT FROM proof)
), rest AS MATERIALIZED (
    SELECT min(id) AS first FROM sizes WHERE before >= $7::bigint
)
SELECT rest.first, ` + eventColumns + `, e.size
  FROM proof CROSS JOIN rest
  LEFT JOIN LATERAL (
       SELECT o.* FROM unnest($5::bigint[], $6::bigint[]) AS r (first, last)
        CROSS JOIN LATERAL (SELECT id, event_id, event_type, source, aggregate_type, aggregate_id,
                                   CASE WHEN size <= $8::int THEN payload END AS payload,
                                   CASE WHEN size <= $8::int THEN payload_bytes END AS payload_bytes, content_type, topic, partition_key,
                                   CASE WHEN size <= $8::int THEN headers END AS headers, occurred_at, created_at, expires_at, size
                              FROM {schema}.outbox
                             WHERE id BETWEEN r.first AND least(r.last, rest.first - 1) ORDER BY id OFFSET 0) AS o) AS e ON true`

// Fetch reads events of the open window by their ids, which ascend. It returns them in their order, and the id
// through which it has read, which is not the last id if the events are large. Rows that have been deleted are
// missing. With an error it returns the events that came before it. Events with more than c.Most bytes are Unreadable,
// with an [envelope.TooLargeError].
func (c *Store) Fetch(ctx context.Context, p Position, ids []int64) (events []envelope.Event, through int64, err error) {
	first, last := Ranges(ids)
	var rest pgtype.Int8
	known := false
	err = c.query(ctx, func(rows pgx.Rows) (err error) {
		events, err = readEvents(make([]envelope.Event, 0, len(ids)), rows, &rest)
		known = rows.CommandTag().RowsAffected() > 0
		return err
	}, c.SQLFetch, append(c.proofArgs(p), first, last, maxBatchBytes, c.Most)...)
	for i := range events {
		if e := &events[i]; e.Size > c.Most {
			e.Unreadable = &envelope.TooLargeError{ID: e.ID, EventID: string(e.EventID), Size: e.Size, Most: c.Most}
		}
	}
	switch {
	case err != nil && !slices.IsSortedFunc(events, byID):
		return nil, 0, fmt.Errorf("fetch events: %w", err)
	case err != nil:
		if len(events) > 0 {
			through = events[len(events)-1].ID
		}
		return events, through, fmt.Errorf("fetch events: %w", err)
	case !known:
		return nil, 0, ErrStale
	}
	c.InOrder(events)
	if rest.Valid {
		return events, rest.Int64 - 1, nil
	}
	return events, ids[len(ids)-1], nil
}

func byID(a, b envelope.Event) int { return cmp.Compare(a.ID, b.ID) }

// SortByID sorts events by outbox.id.
func SortByID(events []envelope.Event) { slices.SortFunc(events, byID) }

// sqlFetchBare reads an event without its payload, and without its headers unless $6.
const sqlFetchBare = `
SELECT e.id, e.event_id::text, e.event_type, e.source, e.aggregate_type, e.aggregate_id,
       NULL::text, NULL::bytea, e.content_type, e.topic, e.partition_key, CASE WHEN $6::bool THEN e.headers::text END, e.occurred_at, e.created_at,
       e.expires_at, CASE WHEN e.expires_at IS NOT NULL THEN clock_timestamp() END
  FROM {schema}.outbox AS e
 WHERE e.id = $5 AND EXISTS (` + sqlProof + `)`

// FetchBare reads an event of the open window without its payload, and without its headers
// unless they are asked for.
func (c *Store) FetchBare(ctx context.Context, p Position, id int64, headers bool) (e envelope.Event, err error) {
	var events []envelope.Event
	err = c.query(ctx, func(rows pgx.Rows) (err error) {
		defer rows.Close()
		events, err = readEvents(nil, rows)
		return err
	}, c.SQLFetchBare, append(c.proofArgs(p), id, headers)...)
	if err != nil {
		return e, fmt.Errorf("fetch event without its payload: %w", err)
	}
	if len(events) == 0 {
		return e, ErrStale
	}
	return events[0], nil
}

// Ranges returns the first and the last number of each run without a gap in ids, which
// ascend. Almost all of a backlog is one run.
func Ranges(ids []int64) (first, last []int64) {
	for i, id := range ids {
		if i == 0 || id != ids[i-1]+1 {
			first, last = append(first, id), append(last, id)
		}
		last[len(last)-1] = id
	}
	return first, last
}

// eventColumns are the columns that eventReader reads, in its order. A text has the same
// bytes in both formats of the protocol.
const (
	eventColumns    = `e.id, ` + envelopeColumns
	envelopeColumns = `e.event_id::text, e.event_type, e.source, e.aggregate_type, e.aggregate_id,
       e.payload::text, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::text, e.occurred_at, e.created_at,
       e.expires_at, CASE WHEN e.expires_at IS NOT NULL THEN clock_timestamp() END`
)

// sizeColumn is the place of outbox.size behind eventColumns, where a statement reads it.
const sizeColumn = 16

// readEvents reads all rows and appends their events to events. The columns in front of those of the event are scanned
// into head, from the first row only. A row without an event has only these columns. With an error it returns the
// events before it.
func readEvents(events []envelope.Event, rows pgx.Rows, head ...any) ([]envelope.Event, error) {
	var r eventReader
	for first := true; rows.Next(); first = false {
		r.describe(rows, len(head))
		raw := rows.RawValues()
		for i := 0; i < len(head) && first; i++ {
			if err := scanValue(r.types, rows.FieldDescriptions()[i], raw[i], head[i]); err != nil {
				return events, err
			}
		}
		if raw[len(head)] == nil {
			continue
		}
		e, err := r.event(raw[len(head):])
		if err != nil {
			return events, err
		}
		events = append(events, e)
	}
	return events, rows.Err()
}

// eventReader turns rows into envelopes. The bytes of many rows share one allocation,
// because they are sent together and freed together.
type eventReader struct {
	types  *pgtype.Map
	fields []pgconn.FieldDescription
	chunk  []byte
}

// describe reads the types of the columns; those of the event begin at first. It is called
// with a row, because a result that is an error has no columns.
func (r *eventReader) describe(rows pgx.Rows, first int) {
	if r.fields == nil {
		r.types, r.fields = rows.Conn().TypeMap(), rows.FieldDescriptions()[first:]
	}
}

func (r *eventReader) event(raw [][]byte) (e envelope.Event, err error) {
	e = envelope.Event{
		EventID:       r.keep(raw[1]),
		EventType:     r.keep(raw[2]),
		Source:        r.keep(raw[3]),
		AggregateType: r.keep(raw[4]),
		AggregateID:   r.keep(raw[5]),
		Payload:       r.keep(raw[6]),
		IsJSON:        raw[6] != nil,
		ContentType:   r.keep(raw[8]),
		Topic:         r.keep(raw[9]),
		PartitionKey:  r.keep(raw[10]),
		Headers:       r.keep(raw[11]),
	}
	if e.ID, err = r.int8(0, raw[0]); err != nil {
		return e, err
	}
	if !e.IsJSON {
		if e.Payload, err = r.bytea(7, raw[7]); err != nil {
			return e, err
		}
	}
	at, err := r.timestamptz(12, raw[12])
	if err != nil {
		return e, err
	}
	e.OccurredAt = r.time(at)
	if e.CreatedAt, err = r.timestamptz(13, raw[13]); err == nil && raw[14] != nil {
		e.Expiry, err = r.expiry(raw)
	}
	if err == nil && len(raw) > sizeColumn {
		e.Size, err = r.int4(sizeColumn, raw[sizeColumn])
	}
	return e, err
}

// expiry reads when an event expires, and the clock of the database behind it.
func (r *eventReader) expiry(raw [][]byte) (*envelope.Expiry, error) {
	at, err := r.timestamptz(14, raw[14])
	if err != nil {
		return nil, err
	}
	now, err := r.timestamptz(15, raw[15])
	return envelope.NewExpiry(at, now), err
}

// keep copies b out of the buffer of the connection. NULL stays nil.
func (r *eventReader) keep(b []byte) []byte {
	if b == nil {
		return nil
	}
	if len(b) > chunkSize/4 {
		return append(make([]byte, 0, len(b)), b...)
	}
	start := r.reserve(len(b))
	r.chunk = append(r.chunk, b...)
	return r.chunk[start:len(r.chunk):len(r.chunk)]
}

// time keeps a time as text, or nil if RFC 3339 cannot write it.
func (r *eventReader) time(t time.Time) []byte {
	if check.Time(t) != nil {
		return nil
	}
	start := r.reserve(len("2006-01-02T15:04:05.000000Z"))
	r.chunk = envelope.AppendTime(r.chunk, t)
	return r.chunk[start:len(r.chunk):len(r.chunk)]
}

const chunkSize = 64 << 10

// reserve makes room for n more bytes in chunk, and returns where they begin.
func (r *eventReader) reserve(n int) (start int) {
	if n > cap(r.chunk)-len(r.chunk) {
		r.chunk = make([]byte, 0, chunkSize)
	}
	return len(r.chunk)
}

// These types differ between the formats. Pools that are set to the simple protocol
// or to QueryExecModeExec return the text format.

func (r *eventReader) int4(column int, b []byte) (int, error) {
	if r.fields[column].Format == pgx.BinaryFormatCode && len(b) == 4 {
		return int(int32(binary.BigEndian.Uint32(b))), nil
	}
	return scan[int](r, column, b)
}

func (r *eventReader) int8(column int, b []byte) (int64, error) {
	if r.fields[column].Format == pgx.BinaryFormatCode && len(b) == 8 {
		return int64(binary.BigEndian.Uint64(b)), nil
	}
	return scan[int64](r, column, b)
}

func (r *eventReader) bytea(column int, b []byte) ([]byte, error) {
	if r.fields[column].Format == pgx.BinaryFormatCode {
		return r.keep(b), nil
	}
	return scan[[]byte](r, column, b)
}

func (r *eventReader) timestamptz(column int, b []byte) (time.Time, error) {
	if r.fields[column].Format == pgx.BinaryFormatCode && len(b) == 8 {
		const epoch2000 = 946_684_800_000_000 // microseconds from 1970 to 2000, where PostgreSQL counts from
		return time.UnixMicro(int64(binary.BigEndian.Uint64(b)) + epoch2000), nil
	}
	var at time.Time
	err := scanValue(r.types, r.fields[column], b, pg.Instant{At: &at})
	return at, err
}

func scan[T any](r *eventReader, column int, b []byte) (v T, err error) {
	err = scanValue(r.types, r.fields[column], b, &v)
	return v, err
}

func scanValue(types *pgtype.Map, field pgconn.FieldDescription, b []byte, dst any) error {
	if err := types.Scan(field.DataTypeOID, field.Format, b, dst); err != nil {
		return fmt.Errorf("column %s: %w", field.Name, err)
	}
	return nil
}
