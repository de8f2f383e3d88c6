package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// sqlClaim takes due rows of the actions and streams, and of those that are tried for the first
// time also what is parked behind them, up to a row that was tried. They are found one pair of
// action and stream after the other, so that none of them, paused or failing, hides the rest.
var sqlClaim = `
WITH due AS MATERIALIZED (
    SELECT p.id, p.order_key, p.attempt_count FROM unnest($4::text[], $5::text[], $9::timestamptz[]) AS w (action, stream, since)
     CROSS JOIN LATERAL (
           SELECT d.id, d.order_key, d.attempt_count FROM {schema}.event_delivery AS d
            WHERE d.consumer_group = $1::text AND d.action = w.action AND d.stream = w.stream AND d.status = 'PENDING'
              AND (d.record IS NOT NULL) = $11::bool AND d.next_retry_at >= w.since AND d.next_retry_at <= clock_timestamp() AND ` + suspect + ` = $8::bool
            ORDER BY d.consumer_group, d.action, d.stream, (d.record IS NOT NULL), ` + suspect + `, d.next_retry_at, d.id LIMIT $6 FOR UPDATE SKIP LOCKED) AS p
     LIMIT $6
), behind AS MATERIALIZED (
    SELECT b.id FROM due
     CROSS JOIN LATERAL (
           SELECT f.id, bool_and(f.untried) OVER (ORDER BY f.id) AS untried
             FROM (SELECT d.id, d.attempt_count = 0 AND NOT ` + suspect + ` AS untried FROM {schema}.event_delivery AS d
                    WHERE ` + ofKeyFrom("due.order_key", "due.id + 1") + ` AND d.status = 'PARKED' AND d.consumer_group = $1::text
                      AND due.attempt_count = 0
                    ORDER BY d.order_key, d.id LIMIT $7 FOR UPDATE) AS f) AS b
     WHERE b.untried
), claimed AS (
    UPDATE {schema}.event_delivery AS d
       SET status = 'PROCESSING', locked_by = $2::text, locked_until = (SELECT clock_timestamp()) + $3::interval, attempt_count = d.attempt_count + 1,
           last_attempt_at = clock_timestamp(), updated_at = clock_timestamp()
     WHERE d.id = ANY (ARRAY(SELECT id FROM due UNION ALL SELECT id FROM behind))
 RETURNING d.*
)
SELECT ` + columnsWithin("$10") + ` FROM (SELECT c.*, sum(c.size) OVER (ORDER BY c.id) AS until FROM claimed AS c) AS d ORDER BY d.id`

// suspect is the condition that the worker of a row d was gone. It is a column of an index.
const suspect = `(coalesce(d.last_error_code, '') = '` + CodeStale + `')`

// Pair is an action and a stream whose rows may be claimed.
type Pair struct{ Action, Stream string }

// looking is what is looked for in a claim.
type looking struct {
	Pair
	suspects bool
}

const sqlNow = `SELECT clock_timestamp()`

// sqlLeft reads from when on rows of each pair are due that a claim has left: those beyond its limit, and those that
// others have locked, who may give them up.
var sqlLeft = `
SELECT (SELECT d.next_retry_at FROM {schema}.event_delivery AS d
         WHERE d.consumer_group = $1::text AND d.action = w.action AND d.stream = w.stream AND d.status = 'PENDING'
           AND (d.record IS NOT NULL) = $6::bool AND d.next_retry_at >= w.since AND d.next_retry_at <= clock_timestamp() AND ` + suspect + ` = $5::bool
         ORDER BY d.consumer_group, d.action, d.stream, (d.record IS NOT NULL), ` + suspect + `, d.next_retry_at, d.id LIMIT 1)
  FROM unnest($2::text[], $3::text[], $4::timestamptz[]) WITH ORDINALITY AS w (action, stream, since, n)
 ORDER BY w.n`

// Claim claims rows that are due, at most limit and as many behind each as follow. Suspects are
// claimed by themselves: no others are with them, and none that wait behind them. What does not fit into a budget of
// bytes with what is before it comes bare, as from Queue.
func (s *Store) Claim(ctx context.Context, pairs []Pair, limit, follow int, suspects bool, budget int64) (claimed []Delivery, err error) {
	actions, streams, since := make([]string, len(pairs)), make([]string, len(pairs)), make([]time.Time, len(pairs))
	for i, p := range pairs {
		actions[i], streams[i], since[i] = p.Action, p.Stream, s.due.of(looking{p, suspects})
	}
	if suspects {
		follow = 0
	}
	var now time.Time
	var left []pgtype.Timestamptz
	began := time.Now()
	transact := s.transactAsync
	if suspects {
		transact = s.transact // or an event that ends PostgreSQL never uses up its attempts
	}
	claim := func(ctx context.Context, budget int64) error {
		return transact(ctx, func(b *pgx.Batch) {
			b.Queue(sqlNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
			b.Queue(s.sqlClaim, s.group, s.newHolder(), s.lease, actions, streams, limit, follow, suspects, since, budget, s.records).Query(func(rows pgx.Rows) (err error) {
				claimed, err = scan(rows)
				return err
			})
			b.Queue(s.sqlLeft, s.group, actions, streams, since, suspects, s.records).Query(func(rows pgx.Rows) (err error) {
				left, err = pgx.CollectRows(rows, pgx.RowTo[pgtype.Timestamptz])
				return err
			})
		})
	}
	half, cancel := context.WithTimeout(ctx, claimTimeout)
	err = claim(half, budget)
	cancel()
	if IsUnprintable(err) && ctx.Err() == nil {
		err = claim(ctx, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("claim deliveries: %w", err)
	}
	took := time.Since(began)
	for i, p := range pairs {
		s.due.looked(looking{p, suspects}, since[i], seenUntil(left[i], now), took)
	}
	return onFloors(claimed), nil
}

// seenUntil returns up to when no row is left of what was seen in a look, given the first that is.
func seenUntil(left pgtype.Timestamptz, now time.Time) time.Time {
	if left.Valid {
		return left.Time
	}
	return now
}

// IsUnprintable reports whether PostgreSQL could not print a row, or has perhaps worked on that until its time
// was over.
func IsUnprintable(err error) bool {
	return pg.IsUnreadable(err) || pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
}

// claimTimeout bounds a claim, until it is tried without what may not be printable.
const claimTimeout = 15 * time.Second

const sqlPrint = `SELECT ` + payload + `, ` + headers + `, ` + record + ` FROM {schema}.event_delivery AS d WHERE d.id = $1 AND d.consumer_group = $2::text AND d.locked_by = $3::text`

// Print reads payload and headers of a bare row. The error may be one that [IsUnprintable] knows, or [ErrLost] if
// the row is not with this worker any more.
func (s *Store) Print(ctx context.Context, d *Delivery) error {
	err := s.db.QueryRow(ctx, s.sqlPrint, d.ID, s.group, d.Holder).Scan(&d.Payload, &d.Headers, &d.Record)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return ErrLost
	case err != nil:
		return fmt.Errorf("read payload and headers: %w", err)
	}
	d.Bare = false
	return nil
}
