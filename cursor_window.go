package outbox

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/outboxgo/outbox/internal/tables"
)

const (
	// maxWindowIDs bounds the ids of a window that are held at once: 8 MB.
	maxWindowIDs = 1_000_000
	// maxBatchBytes bounds the events that are read at once. A relay holds two
	// batches: one is being sent while the next is fetched.
	maxBatchBytes = 32 << 20
)

// errBatchTooLarge means that several events together exceed maxBatchBytes.
var errBatchTooLarge = errors.New("batch is too large")

// sqlIDs reads the ids of the open window that are left. A large window is the backlog
// after an outage. Sorting it once, from the index only, keeps the cost of a batch
// independent of the size of the backlog. The comment at sqlOpen explains the ranges and
// OFFSET.
//
// If the row that announced the window has vanished in a crash or a failover, ids and
// transaction ids may have been given to other rows. Then nothing is found, and the next
// statement that moves or opens returns errStale. A newer row is the relay's own, written
// while this was fetched ahead.
const sqlIDs = `
WITH opened AS MATERIALIZED (
   (SELECT id, xid FROM {schema}.outbox WHERE xid >= $2::xid8 AND xid < $4::xid8 ORDER BY xid, id)
     UNION ALL
    SELECT late.id, late.xid FROM pg_snapshot_xip($1::pg_snapshot) AS x
     CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox WHERE xid >= x AND xid <= x ORDER BY xid, id OFFSET 0) AS late
)
SELECT id FROM opened
 WHERE id > $5 AND pg_visible_in_snapshot(xid, $3::pg_snapshot)
   AND (SELECT max(id) FROM {schema}.outbox_cursor WHERE relay = $7::text) >= $8
   AND pg_postmaster_start_time() = $9
 ORDER BY id LIMIT $6`

// remaining returns the ids of the open window's events above p.last, in order, at most
// limit.
func (c *cursors) remaining(ctx context.Context, p position, limit int) (ids []int64, err error) {
	err = c.query(ctx, func(rows pgx.Rows) (err error) {
		ids, err = readIDs(rows)
		return err
	}, c.sqlIDs, p.base, tables.SnapshotMax(p.base), p.window, tables.SnapshotMax(p.window), p.last, limit, c.relay, p.cursorID, p.server)
	if err != nil {
		return nil, fmt.Errorf("read window: %w", err)
	}
	return ids, nil
}

// sqlFetch reads events by ranges of ids. ORDER BY makes the planner use the primary key:
// over an empty table the other index looks as good. Where sqlIDs would find nothing, this
// finds nothing either.
const sqlFetch = `
SELECT ` + eventColumns + `
  FROM unnest($1::bigint[], $2::bigint[]) AS r (first, last)
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id BETWEEN r.first AND r.last ORDER BY id OFFSET 0) AS e
 WHERE (SELECT max(id) FROM {schema}.outbox_cursor WHERE relay = $3::text) >= $4
   AND pg_postmaster_start_time() = $5
 ORDER BY e.id`

// fetch reads events of the open window by their ids, in order, or returns
// errBatchTooLarge. Rows that have been deleted are missing from the result.
func (c *cursors) fetch(ctx context.Context, p position, ids []int64) (events []envelope, err error) {
	first, last := ranges(ids)
	err = c.query(ctx, func(rows pgx.Rows) (err error) {
		events, err = readEvents(rows, len(ids))
		return err
	}, c.sqlFetch, first, last, c.relay, p.cursorID, p.server)
	if err != nil {
		return nil, fmt.Errorf("fetch events: %w", err)
	}
	return events, nil
}

// ranges returns the first and the last number of each run without a gap in ids, which
// ascend. Almost all of a backlog is one run.
func ranges(ids []int64) (first, last []int64) {
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
       e.payload::text, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::text, e.occurred_at, e.created_at`
)

// readIDs reads rows of one id and closes them.
func readIDs(rows pgx.Rows) (ids []int64, err error) {
	defer rows.Close()
	var r eventReader
	for rows.Next() {
		r.describe(rows, 0)
		id, err := r.int8(0, rows.RawValues()[0])
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

// readEvents reads all rows, about n of them, and closes them. The columns in front of
// those of the event are scanned into head, from the first row only. A row without an
// event has only these columns.
func readEvents(rows pgx.Rows, n int, head ...any) ([]envelope, error) {
	defer rows.Close()
	events := make([]envelope, 0, n)
	var r eventReader
	for first := true; rows.Next(); first = false {
		r.describe(rows, len(head))
		raw := rows.RawValues()
		for i := 0; i < len(head) && first; i++ {
			if err := scanValue(r.types, rows.FieldDescriptions()[i], raw[i], head[i]); err != nil {
				return nil, err
			}
		}
		if raw[len(head)] == nil {
			continue
		}
		e, err := r.event(raw[len(head):])
		if err != nil {
			return nil, err
		}
		events = append(events, e)
		if r.kept > maxBatchBytes && len(events) > 1 {
			return nil, errBatchTooLarge
		}
	}
	return events, rows.Err()
}

// eventReader turns rows into envelopes. The bytes of many rows share one allocation,
// because they are sent together and freed together.
type eventReader struct {
	types  *pgtype.Map
	fields []pgconn.FieldDescription
	chunk  []byte
	kept   int // bytes, so far
}

// describe reads the types of the columns; those of the event begin at first. It is called
// with a row, because a result that is an error has no columns.
func (r *eventReader) describe(rows pgx.Rows, first int) {
	if r.fields == nil {
		r.types, r.fields = rows.Conn().TypeMap(), rows.FieldDescriptions()[first:]
	}
}

func (r *eventReader) event(raw [][]byte) (e envelope, err error) {
	e = envelope{
		eventID:       r.keep(raw[1]),
		eventType:     r.keep(raw[2]),
		source:        r.keep(raw[3]),
		aggregateType: r.keep(raw[4]),
		aggregateID:   r.keep(raw[5]),
		payload:       r.keep(raw[6]),
		isJSON:        raw[6] != nil,
		contentType:   r.keep(raw[8]),
		topic:         r.keep(raw[9]),
		partitionKey:  r.keep(raw[10]),
		headers:       r.keep(raw[11]),
	}
	if e.id, err = r.int8(0, raw[0]); err != nil {
		return e, err
	}
	if !e.isJSON {
		if e.payload, err = r.bytea(7, raw[7]); err != nil {
			return e, err
		}
	}
	at, err := r.timestamptz(12, raw[12])
	if err != nil {
		return e, err
	}
	e.occurredAt = r.time(at)
	e.createdAt, err = r.timestamptz(13, raw[13])
	return e, err
}

// keep copies b out of the buffer of the connection. NULL stays nil.
func (r *eventReader) keep(b []byte) []byte {
	if b == nil {
		return nil
	}
	r.kept += len(b)
	if len(b) > chunkSize/4 {
		return append(make([]byte, 0, len(b)), b...)
	}
	start := r.reserve(len(b))
	r.chunk = append(r.chunk, b...)
	return r.chunk[start:len(r.chunk):len(r.chunk)]
}

// time keeps a time as text.
func (r *eventReader) time(t time.Time) []byte {
	start := r.reserve(len("2006-01-02T15:04:05.000000Z"))
	r.chunk = appendTime(r.chunk, t)
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

// These three types differ between the formats. Pools that are set to the simple protocol
// or to QueryExecModeExec return the text format.

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
	return scan[time.Time](r, column, b)
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
