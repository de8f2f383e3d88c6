package outbox

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// maxWindowIDs bounds the ids of a window that are held at once: 8 MB.
const maxWindowIDs = 1_000_000

// sqlIDs reads which events of the open window are left. A large window is the
// backlog after an outage; sorting it once, index only, is what keeps the cost
// of a batch independent of the size of the backlog. Ranges and the fence of
// OFFSET are there for the reasons told at sqlOpen.
const sqlIDs = `
WITH opened AS MATERIALIZED (
    SELECT id, xid FROM {schema}.outbox WHERE xid >= $2::xid8 AND xid < $4::xid8
     UNION ALL
    SELECT late.id, late.xid FROM pg_snapshot_xip($1::pg_snapshot) AS x
     CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox WHERE xid >= x AND xid <= x OFFSET 0) AS late
)
SELECT id FROM opened
 WHERE id > $5 AND pg_visible_in_snapshot(xid, $3::pg_snapshot)
 ORDER BY id LIMIT $6`

// rest returns the ids of the open window's events behind p.last, in order, at
// most limit.
func (c *cursors) rest(ctx context.Context, p position, limit int) ([]int64, error) {
	rows, err := c.db.Query(ctx, c.sqlIDs, p.base, snapshotMax(p.base), p.window, snapshotMax(p.window), p.last, limit)
	if err != nil {
		return nil, fmt.Errorf("read window: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("read window: %w", err)
	}
	return ids, nil
}

const sqlFetch = `SELECT ` + eventColumns + ` FROM {schema}.outbox AS e WHERE e.id = ANY($1::bigint[]) ORDER BY e.id`

// fetch reads events by their ids, in order. Rows that somebody has deleted are
// missing from the result.
func (c *cursors) fetch(ctx context.Context, ids []int64) ([]envelope, error) {
	rows, err := c.db.Query(ctx, c.sqlFetch, ids)
	if err != nil {
		return nil, fmt.Errorf("fetch events: %w", err)
	}
	events, err := readEvents(rows)
	if err != nil {
		return nil, fmt.Errorf("fetch events: %w", err)
	}
	return events, nil
}

// eventColumns is what eventReader reads, in its order. Texts are the same
// bytes in both formats of the protocol.
const eventColumns = `e.id, e.event_id::text, e.event_type, e.source, e.aggregate_type, e.aggregate_id,
       e.payload::text, e.payload_bytes, e.content_type, e.topic, e.partition_key, e.headers::text, e.occurred_at`

// readEvents reads all rows and closes them. Columns in front of the event's are
// scanned into head, from the first row; a row without an event has head only.
func readEvents(rows pgx.Rows, head ...any) ([]envelope, error) {
	defer rows.Close()
	var events []envelope
	var r eventReader
	for rows.Next() {
		raw := rows.RawValues()
		if r.fields == nil {
			r = eventReader{types: rows.Conn().TypeMap(), fields: rows.FieldDescriptions()[len(head):]}
			for i, dst := range head {
				if err := scanValue(r.types, rows.FieldDescriptions()[i], raw[i], dst); err != nil {
					return nil, err
				}
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
	}
	return events, rows.Err()
}

// eventReader turns rows into envelopes. The bytes of many rows share one
// allocation: they are sent together and forgotten together.
type eventReader struct {
	types  *pgtype.Map
	fields []pgconn.FieldDescription
	chunk  []byte
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
	e.occurredAt, err = r.timestamptz(12, raw[12])
	return e, err
}

// keep copies b out of the connection's buffer. NULL remains nil.
func (r *eventReader) keep(b []byte) []byte {
	const chunkSize = 64 << 10
	if b == nil {
		return nil
	}
	if len(b) > cap(r.chunk)-len(r.chunk) {
		if len(b) > chunkSize/4 {
			return append(make([]byte, 0, len(b)), b...)
		}
		r.chunk = make([]byte, 0, chunkSize)
	}
	start := len(r.chunk)
	r.chunk = append(r.chunk, b...)
	return r.chunk[start:len(r.chunk):len(r.chunk)]
}

// The three types whose formats differ. Text comes from pools that are set to
// the simple protocol or to QueryExecModeExec.

func (r *eventReader) int8(column int, b []byte) (n int64, err error) {
	if r.fields[column].Format == pgx.BinaryFormatCode && len(b) == 8 {
		return int64(binary.BigEndian.Uint64(b)), nil
	}
	err = scanValue(r.types, r.fields[column], b, &n)
	return n, err
}

func (r *eventReader) bytea(column int, b []byte) (data []byte, err error) {
	if r.fields[column].Format == pgx.BinaryFormatCode {
		return r.keep(b), nil
	}
	err = scanValue(r.types, r.fields[column], b, &data)
	return data, err
}

func (r *eventReader) timestamptz(column int, b []byte) (t time.Time, err error) {
	if r.fields[column].Format == pgx.BinaryFormatCode && len(b) == 8 {
		const epoch2000 = 946_684_800_000_000 // microseconds from 1970 to 2000, where PostgreSQL counts from
		return time.UnixMicro(int64(binary.BigEndian.Uint64(b)) + epoch2000), nil
	}
	err = scanValue(r.types, r.fields[column], b, &t)
	return t, err
}

func scanValue(types *pgtype.Map, field pgconn.FieldDescription, b []byte, dst any) error {
	if err := types.Scan(field.DataTypeOID, field.Format, b, dst); err != nil {
		return fmt.Errorf("column %s: %w", field.Name, err)
	}
	return nil
}
