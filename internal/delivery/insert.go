package delivery

import (
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/tables"
)

// New is a row to be inserted.
type New struct {
	OutboxID       int64
	Action, Stream string
	Key            Key
	// Status is the status of the row if no other row of its key is open: Processing or Pending. Of several
	// new rows of a key, either all are Processing, or those behind the first are Parked. Dead is the
	// status of a row without a handler, whether its key is open or not.
	Status      Status
	MaxAttempts int
}

// sqlLock locks keys, and reads from which server and connection the floors of the next statement are.
const sqlLock = `
SELECT {schema}.outbox_lock_keys($1::text, $2::bigint[]), clock_timestamp(), pg_postmaster_start_time(),
       (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid()))`

// sqlInsert inserts rows with the status that their keys permit. It checks each key once, before it inserts
// a row, because the indexes also return the rows that it inserts itself. It checks from the latest row of
// a key backwards to its floor. Open rows are among the latest, and the indexes still have entries of many
// finished rows.
var sqlInsert = `
WITH ` + behind + `, keys AS MATERIALIZED (
    SELECT n.key, min(CASE WHEN (SELECT a.backend_start <= $11::timestamptz FROM pg_stat_get_activity(pg_backend_pid()) AS a WHERE pg_postmaster_start_time() = $12::timestamptz)
                           THEN n.floor ELSE 0 END) AS floor
      FROM unnest($7::bigint[], $10::bigint[]) AS n (key, floor) WHERE n.key IS NOT NULL GROUP BY n.key
), busy AS MATERIALIZED (
    SELECT k.key FROM keys AS k
     WHERE coalesce(
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE ` + ofKeyFrom("k.key", "k.floor") + ` AND ` + head + ` AND d.consumer_group = $1::text
             ORDER BY d.order_key DESC, d.id DESC LIMIT 1),
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE d.order_key = k.key AND d.put_back AND ` + open + ` AND d.consumer_group = $1::text
             ORDER BY d.order_key, (d.status = 'PARKED'), d.id LIMIT 1),
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE ` + ofKeyFrom("k.key", "k.floor") + ` AND d.status = 'PARKED' AND d.consumer_group = $1::text
             ORDER BY d.order_key DESC, d.id DESC LIMIT 1), false)
), inserted AS (
    INSERT INTO {schema}.event_delivery (consumer_group, action, stream, position, order_key, status, attempt_count, max_attempts,
           next_retry_at, last_attempt_at, locked_by, locked_until, created_at, updated_at, processed_at, last_error_code, last_error_message,
           event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type, partition_key, headers, size, occurred_at, recorded_at)
    SELECT $1::text, n.action, n.stream, n.id, n.key, n.status, CASE n.status WHEN 'PROCESSING' THEN 1 ELSE 0 END, n.most,
           t.at, CASE n.status WHEN 'PROCESSING' THEN t.at END, CASE n.status WHEN 'PROCESSING' THEN $2::text END,
           CASE n.status WHEN 'PROCESSING' THEN t.at + $3::interval END, t.at, t.at, CASE n.status WHEN 'DEAD' THEN t.at END,
           CASE n.status WHEN 'DEAD' THEN 'unknown_type' END, CASE n.status WHEN 'DEAD' THEN 'no handler of the group takes events of type ' || o.event_type::text END,
           o.event_id, o.event_type, o.source, o.aggregate_type, o.aggregate_id, o.payload, o.payload_bytes, o.content_type, o.partition_key,
           ` + tables.Headers + `, o.size, o.occurred_at, o.created_at
      FROM (SELECT p.*, CASE WHEN EXISTS (SELECT FROM behind) THEN '` + rejectedStatus + `' WHEN p.planned <> 'DEAD' AND p.key IN (SELECT key FROM busy) THEN 'PARKED' ELSE p.planned END AS status
              FROM unnest($4::bigint[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::int[]) AS p (id, action, stream, key, planned, most) OFFSET 0) AS n
     CROSS JOIN (SELECT clock_timestamp() AS at OFFSET 0) AS t
     CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id = n.id OFFSET 0) AS o
 RETURNING *
)
SELECT ` + columnsWithin("$13") + `
  FROM (SELECT i.*, CASE i.status WHEN 'PROCESSING' THEN sum(i.size) FILTER (WHERE i.status = 'PROCESSING') OVER (ORDER BY i.id) END AS until
          FROM inserted AS i WHERE i.status IN ('PROCESSING', 'PENDING')) AS d
 ORDER BY d.id`

// Queue adds the insertion of rows to a batch. The batch runs in one transaction with the statement that
// moves the cursor of the group, and nothing else. The function claimed gets the rows that were claimed by
// the insertion, in the order of insertion.
//
// If the batch fails because the sequence of ids is behind, [Store.PassTakenIDs] says so and makes the next one pass.
//
// Rows beyond the budget of bytes come bare: without payload and headers, which Store.readPayload reads. If
// PostgreSQL cannot print a row, the whole statement fails. With a budget of 0 it prints no payloads.
func (s *Store) Queue(batch *pgx.Batch, rows []New, budget int64, claimed func([]Delivery) error) {
	ids, actions, streams, keys := make([]int64, len(rows)), make([]string, len(rows)), make([]string, len(rows)), make([]pgtype.Int8, len(rows))
	statuses, most := make([]string, len(rows)), make([]int32, len(rows))
	for i, r := range rows {
		ids[i], actions[i], streams[i], keys[i], statuses[i], most[i] = r.OutboxID, r.Action, r.Stream, r.Key.value(), string(r.Status), int32(r.MaxAttempts)
	}
	var on session
	batch.Queue(s.sqlLock, s.group, keys).QueryRow(func(row pgx.Row) error { return row.Scan(nil, &on.at, &on.server, &on.born) })
	floors, until, server := s.floors.of(rows)
	batch.Queue(s.sqlInsert, s.group, s.newHolder(), s.lease, ids, actions, streams, keys, statuses, most, floors, until, server, budget).Query(func(rows pgx.Rows) error {
		found, err := readRows(rows)
		if err != nil {
			return err
		}
		s.floors.learn(withFloors(found), on)
		return claimed(slices.DeleteFunc(found, func(d Delivery) bool { return d.Attempt == 0 })) // PENDING
	})
}
