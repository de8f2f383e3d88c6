package delivery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// Operators requeue DEAD rows with functions of 0005_operators_and_audit.sql. This file requeues DEAD rows
// without an operator: rows whose dead letters were sent back to their topic, and rows that RetryDeadAfter
// retries.

// requeued sets the columns of a row so that it has all its attempts again.
const requeued = `
       status = CASE WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END, held = false, put_back = true, dead_letter_owed = false, attempt_count = 0, failed_at = NULL, witness_after = NULL,
       next_retry_at = clock_timestamp(), updated_at = clock_timestamp(), processed_at = NULL`

// sqlReplayed requeues the DEAD rows of events. Rows that an operator has resolved stay as they are. A stripped row
// gets the record of the replay, also if an operator has retried the row before. A process that has claimed it loses
// it. So does any row if the dead letter was edited, $8.
const sqlReplayed = `
UPDATE {schema}.event_delivery AS d SET ` + requeued + `, locked_by = NULL, locked_until = NULL,
       payload_bytes = CASE WHEN d.dead_letter IS NULL AND NOT $8::bool THEN d.payload_bytes ELSE $4::bytea END,
       record = CASE WHEN d.dead_letter IS NULL AND NOT $8::bool THEN d.record ELSE $5::bytea END,
       size = CASE WHEN d.dead_letter IS NULL AND NOT $8::bool THEN d.size ELSE octet_length($4::bytea) + octet_length($5::bytea) END,
       record_partition = CASE WHEN d.dead_letter IS NULL AND NOT $8::bool THEN d.record_partition ELSE $6::int END,
       position = CASE WHEN d.dead_letter IS NULL AND NOT $8::bool THEN d.position ELSE $7::bigint END, dead_letter = NULL
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM unnest($2::text[], $3::bytea[]) AS n (action, digest)
                           JOIN {schema}.event_delivery AS r ON r.consumer_group = $1::text AND r.action = n.action AND r.record_digest = n.digest AND r.status <> 'DONE'
                          WHERE (r.status = 'DEAD' OR r.dead_letter IS NOT NULL OR $8) AND r.resolved_at IS NULL ORDER BY r.id FOR UPDATE OF r))
RETURNING d.action, d.record_digest`

// sqlYieldHead parks PENDING rows whose keys have an earlier parked row, which can be promoted then. A row
// that is being claimed is locked, and stays as it is.
var sqlYieldHead = `
WITH heads AS MATERIALIZED (
    SELECT head.id FROM pg_catalog.unnest($2::bigint[]) AS k (order_key)
     CROSS JOIN LATERAL (
           SELECT d.id, d.status FROM {schema}.event_delivery AS d
            WHERE ` + ofKey("k.order_key") + ` AND ` + head + ` AND d.consumer_group = $1::text ORDER BY d.order_key, d.id LIMIT 1) AS head
     CROSS JOIN LATERAL (
           SELECT d.id FROM {schema}.event_delivery AS d
            WHERE ` + ofKey("k.order_key") + ` AND d.status = 'PARKED' AND d.consumer_group = $1::text ORDER BY d.order_key, d.id LIMIT 1) AS first
     WHERE head.status = 'PENDING' AND first.id < head.id
), waiting AS MATERIALIZED (
    SELECT d.id FROM {schema}.event_delivery AS d
     WHERE d.id = ANY (ARRAY(SELECT h.id FROM heads AS h)) AND d.status = 'PENDING' ORDER BY d.id FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.event_delivery AS d SET status = 'PARKED', updated_at = clock_timestamp() WHERE d.id = ANY (ARRAY(SELECT w.id FROM waiting AS w))`

// queueReorder makes the first open row of each key the next one to be handled.
func (s *Store) queueReorder(b *pgx.Batch, keys []pgtype.Int8) {
	b.Queue(s.sqlYieldHead, s.group, keys)
	b.Queue(s.sqlPromote, s.group, keys, nil)
}

// Requeue requeues the events among subjects whose rows are DEAD, because their dead letters were sent back
// to their topic. It returns their indexes. Rows that an operator has resolved stay as they are. Replay is the record
// that was sent back, for rows without a value, or for all rows if an operator has edited its dead letter.
func (s *Store) Requeue(ctx context.Context, subjects []Subject, replay *Received, edited bool) (indexes []int, err error) {
	actions, keys, digests := columnsOf(subjects)
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(pg.Durable)
		b.Queue(s.sqlLock, s.group, locksOf(subjects))
		b.Queue(s.sqlReplayed, s.group, actions, digests, orEmpty(replay.Payload), replay.Record, replay.Partition, replay.Offset, edited).Query(func(rows pgx.Rows) error {
			var action string
			var digest []byte
			_, err := pgx.ForEachRow(rows, []any{&action, &digest}, func() error {
				indexes = append(indexes, slices.IndexFunc(subjects, func(s Subject) bool { return s.Action == action && string(s.Digest[:]) == string(digest) }))
				return nil
			})
			return err
		})
		s.queueReorder(b, keys)
	})
	if err != nil {
		return nil, fmt.Errorf("requeue replayed events: %w", err)
	}
	return indexes, nil
}

// retryDeadBatch is the largest number of rows that retryDead requeues in a transaction.
const retryDeadBatch = 500

// sqlRetryable finds rows that have been DEAD for as long as the code of their error requires, and have their value.
// What an operator holds is left out; if each DEAD row holds its key, $5, that is not known.
const sqlRetryable = `
SELECT d.id, d.order_key FROM {schema}.event_delivery AS d JOIN unnest($2::text[], $3::interval[]) AS c (code, after) ON c.code = d.last_error_code
 WHERE d.consumer_group = $1::text AND d.status = 'DEAD' AND d.resolved_at IS NULL AND d.dead_letter IS NULL AND d.processed_at < clock_timestamp() - c.after AND (NOT d.held OR $5::bool)
 ORDER BY d.id LIMIT $4`

// sqlRetryDead requeues rows that are still DEAD. Their keys are locked since sqlRetryable has found them.
const sqlRetryDead = `
UPDATE {schema}.event_delivery AS d SET ` + requeued + `
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM {schema}.event_delivery AS r
                          WHERE r.id = ANY ($2) AND r.consumer_group = $1::text AND r.status = 'DEAD' AND r.resolved_at IS NULL AND r.dead_letter IS NULL AND (NOT r.held OR $3::bool) ORDER BY r.id FOR UPDATE))`

// retryDead requeues rows that have been DEAD for as long as after says for the code of their error, at
// most 500 of them. Hold says that each DEAD row holds its key. It returns their number.
func (s *Store) retryDead(ctx context.Context, after map[string]time.Duration, hold bool) (retried int64, err error) {
	var codes []string
	var waits []time.Duration
	for code, wait := range after {
		codes, waits = append(codes, code), append(waits, wait)
	}
	var ids []int64
	var keys []pgtype.Int8 // NULL for rows without order
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlRetryable, s.group, codes, waits, retryDeadBatch, hold).Query(func(rows pgx.Rows) error {
			var id int64
			var key pgtype.Int8
			_, err := pgx.ForEachRow(rows, []any{&id, &key}, func() error {
				ids, keys = append(ids, id), append(keys, key)
				return nil
			})
			return err
		})
	})
	if err == nil && len(ids) > 0 {
		err = s.transact(ctx, func(b *pgx.Batch) {
			b.Queue(s.sqlLock, s.group, keys)
			b.Queue(s.sqlRetryDead, s.group, ids, hold).Exec(affected(&retried))
			s.queueReorder(b, keys)
		})
	}
	if err != nil {
		return 0, fmt.Errorf("retry dead deliveries: %w", err)
	}
	return retried, nil
}
