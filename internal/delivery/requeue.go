package delivery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// What operators do with DEAD rows is in 0005_operators_and_audit.sql. Here is what happens without one: to rows whose dead letters
// came back, and to those of an error after which the host wants them tried again some time later.

// again are the columns of a DEAD row that has all its attempts again.
const again = `
       status = CASE WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END, held = false, put_back = true, attempt_count = 0,
       next_retry_at = clock_timestamp(), updated_at = clock_timestamp(), processed_at = NULL`

// sqlReplayed gives rows all their attempts again, but for those that an operator has resolved.
const sqlReplayed = `
UPDATE {schema}.event_delivery AS d SET ` + again + `
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM unnest($2::text[], $3::bytea[]) AS n (action, digest)
                           JOIN {schema}.event_delivery AS r ON r.consumer_group = $1::text AND r.action = n.action AND r.record_digest = n.digest AND r.status <> 'DONE'
                          WHERE r.status = 'DEAD' AND r.resolved_at IS NULL ORDER BY r.id FOR UPDATE OF r))
RETURNING d.action, d.record_digest`

// sqlGiveTurn has rows that wait for their turn give it up to an earlier one of their key that is parked. One that is being claimed
// is locked, and keeps it.
var sqlGiveTurn = `
WITH heads AS MATERIALIZED (
    SELECT head.id FROM unnest($2::bigint[]) AS k (order_key)
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

// queueTurns has the first of what waits in each key handled next.
func (s *Store) queueTurns(b *pgx.Batch, keys []pgtype.Int8) {
	b.Queue(s.sqlGiveTurn, s.group, keys)
	b.Queue(s.sqlPromote, s.group, keys, nil)
}

// Replayed has those of some events that are DEAD handled again, because their dead letters came back from where they were sent. It
// returns their indexes. What an operator has resolved stays so.
func (s *Store) Replayed(ctx context.Context, subjects []Subject) (again []int, err error) {
	actions, keys, digests := columnsOf(subjects)
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(pg.Durable)
		b.Queue(s.sqlLock, s.group, locksOf(subjects))
		b.Queue(s.sqlReplayed, s.group, actions, digests).Query(func(rows pgx.Rows) error {
			var action string
			var digest []byte
			_, err := pgx.ForEachRow(rows, []any{&action, &digest}, func() error {
				again = append(again, slices.IndexFunc(subjects, func(s Subject) bool { return s.Action == action && string(s.Digest[:]) == string(digest) }))
				return nil
			})
			return err
		})
		s.queueTurns(b, keys)
	})
	if err != nil {
		return nil, fmt.Errorf("requeue replayed events: %w", err)
	}
	return again, nil
}

// mostRetriedDead is how many rows are retried in a transaction.
const mostRetriedDead = 500

// sqlDeadFor finds rows that have been DEAD for some time, by the code of their error.
const sqlDeadFor = `
SELECT d.id, d.order_key FROM {schema}.event_delivery AS d JOIN unnest($2::text[], $3::interval[]) AS c (code, after) ON c.code = d.last_error_code
 WHERE d.consumer_group = $1::text AND d.status = 'DEAD' AND d.resolved_at IS NULL AND (d.record IS NOT NULL) = $4::bool AND d.processed_at < clock_timestamp() - c.after
 ORDER BY d.id LIMIT $5`

// sqlRetryDead gives rows all their attempts again, if they are still DEAD.
const sqlRetryDead = `
UPDATE {schema}.event_delivery AS d SET ` + again + `
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM {schema}.event_delivery AS r
                          WHERE r.id = ANY ($2) AND r.consumer_group = $1::text AND r.status = 'DEAD' AND r.resolved_at IS NULL ORDER BY r.id FOR UPDATE))`

// RetryDead gives rows all their attempts again that have been DEAD for as long as after says of the code of their error, at most 500
// of them. It returns how many these are.
func (s *Store) RetryDead(ctx context.Context, after map[string]time.Duration) (retried int64, err error) {
	var codes []string
	var waits []time.Duration
	for code, wait := range after {
		codes, waits = append(codes, code), append(waits, wait)
	}
	var ids []int64
	var keys []pgtype.Int8 // NULL for what has no order
	rows, err := s.db.Query(ctx, s.sqlDeadFor, s.group, codes, waits, s.records, mostRetriedDead)
	if err == nil {
		var id int64
		var key pgtype.Int8
		_, err = pgx.ForEachRow(rows, []any{&id, &key}, func() error {
			ids, keys = append(ids, id), append(keys, key)
			return nil
		})
	}
	if err == nil && len(ids) > 0 {
		err = s.transact(ctx, func(b *pgx.Batch) {
			b.Queue(s.sqlLock, s.group, keys)
			b.Queue(s.sqlRetryDead, s.group, ids).Exec(func(tag pgconn.CommandTag) error { retried = tag.RowsAffected(); return nil })
			s.queueTurns(b, keys)
		})
	}
	if err != nil {
		return 0, fmt.Errorf("retry dead deliveries: %w", err)
	}
	return retried, nil
}
