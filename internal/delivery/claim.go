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

// sqlClaim claims due rows of the pairs of action $4 and stream $5. Behind each row that was never tried,
// it also claims the parked rows of its key, up to the first row that was tried. It scans each pair
// separately, so that the rows of one pair do not hide the rows of another pair.
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

// suspect is the condition that a row d was taken over. An index has it as a column.
const suspect = `(coalesce(d.last_error_code, '') = '` + codeStale + `')`

// Pair is an action and a stream whose rows may be claimed.
type Pair struct{ Action, Stream string }

// claimScan is a scan of a claim. Each has its own [scanBounds].
type claimScan struct {
	Pair
	suspects bool
}

const sqlNow = `SELECT clock_timestamp()`

// sqlRemaining reads for each pair the due time of the first row that the claim has left. The next scan
// begins there. Such rows are beyond the limit of the claim, or locked by a transaction that may roll back.
var sqlRemaining = `
SELECT (SELECT d.next_retry_at FROM {schema}.event_delivery AS d
         WHERE d.consumer_group = $1::text AND d.action = w.action AND d.stream = w.stream AND d.status = 'PENDING'
           AND (d.record IS NOT NULL) = $6::bool AND d.next_retry_at >= w.since AND d.next_retry_at <= clock_timestamp() AND ` + suspect + ` = $5::bool
         ORDER BY d.consumer_group, d.action, d.stream, (d.record IS NOT NULL), ` + suspect + `, d.next_retry_at, d.id LIMIT 1)
  FROM unnest($2::text[], $3::text[], $4::timestamptz[]) WITH ORDINALITY AS w (action, stream, since, n)
 ORDER BY w.n`

// Claim claims at most limit due rows, and at most follow parked rows behind each. With suspects it claims
// only rows that were taken over, without the rows behind them. Rows beyond the budget of bytes come bare,
// as from Queue.
func (s *Store) Claim(ctx context.Context, pairs []Pair, limit, follow int, suspects bool, budget int64) (claimed []Delivery, err error) {
	actions, streams, since := make([]string, len(pairs)), make([]string, len(pairs)), make([]time.Time, len(pairs))
	for i, p := range pairs {
		actions[i], streams[i], since[i] = p.Action, p.Stream, s.due.start(claimScan{p, suspects})
	}
	if suspects {
		follow = 0
	}
	var now time.Time
	var left []pgtype.Timestamptz
	began := time.Now()
	transact := s.transactAsync
	if suspects {
		transact = s.transact // a crash must not forget the attempt at an event that makes PostgreSQL crash
	}
	claim := func(ctx context.Context, budget int64) error {
		return transact(ctx, func(b *pgx.Batch) {
			b.Queue(sqlNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
			b.Queue(s.sqlClaim, s.group, s.newHolder(), s.lease, actions, streams, limit, follow, suspects, since, budget, s.records).Query(func(rows pgx.Rows) (err error) {
				claimed, err = readRows(rows)
				return err
			})
			b.Queue(s.sqlRemaining, s.group, actions, streams, since, suspects, s.records).Query(func(rows pgx.Rows) (err error) {
				left, err = pgx.CollectRows(rows, pgx.RowTo[pgtype.Timestamptz])
				return err
			})
		})
	}
	half, cancel := context.WithTimeout(ctx, claimTimeout)
	err = claim(half, budget)
	cancel()
	if MayBeUnreadable(err) && ctx.Err() == nil {
		err = claim(ctx, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("claim deliveries: %w", err)
	}
	took := time.Since(began)
	for i, p := range pairs {
		s.due.scanned(claimScan{p, suspects}, since[i], scannedUntil(left[i], now), now, took)
	}
	return withFloors(claimed), nil
}

// scannedUntil returns the time up to which a scan has left no row, given the time of the first row that it
// has left.
func scannedUntil(left pgtype.Timestamptz, now time.Time) time.Time {
	if left.Valid {
		return left.Time
	}
	return now
}

// MayBeUnreadable reports whether PostgreSQL could not print a row, or may have run out of time with that.
func MayBeUnreadable(err error) bool {
	return pg.IsUnreadable(err) || pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
}

// claimTimeout bounds a claim. After it, the claim is retried without payloads, because PostgreSQL may be
// unable to print one.
const claimTimeout = 15 * time.Second

const sqlReadPayload = `
SELECT ` + payload + `, ` + headers + `, ` + record + ` FROM {schema}.event_delivery AS d
 WHERE d.id = $1 AND d.consumer_group = $2::text AND d.locked_by = $3::text`

// readPayload reads payload, headers and record of a bare row. It returns [ErrLost] if another process has
// the row. [MayBeUnreadable] tells whether PostgreSQL cannot print the row.
func (s *Store) readPayload(ctx context.Context, d *Delivery) error {
	err := pg.QueryRow(ctx, s.db, s.sqlReadPayload, d.ID, s.group, d.Holder).Scan(&d.Payload, &d.Headers, &d.Record)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return ErrLost
	case err != nil:
		return fmt.Errorf("read payload and headers: %w", err)
	}
	d.Bare = false
	return nil
}
