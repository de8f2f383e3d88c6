package delivery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// sqlClaim claims due rows of the pairs of action $4 and stream $5 whose types are among $11, see
// [Claimable.types]. Behind each row that was never tried, it also claims the parked rows of its key, up to the
// first row that was tried, has another type or is locked: it waits for no other session, which would keep all pairs
// waiting. It scans each type of each pair separately, so that the rows of one do not hide the rows of another, and no
// rows of other types are read: they may be many. It claims none of the rows $12, which this process has yielded.
// With $13 it claims only rows without an attempt so far that have more than one.
var sqlClaim = `
WITH due AS MATERIALIZED (
    SELECT p.id, p.order_key, p.attempt_count, p.failed_at, w.types FROM unnest($4::text[], $5::text[], $9::timestamptz[], $11::text[]) AS w (action, stream, since, types)
     CROSS JOIN LATERAL pg_catalog.unnest(` + typesOf + `) AS t (type)
     CROSS JOIN LATERAL (
           SELECT d.id, d.order_key, d.attempt_count, d.failed_at FROM {schema}.event_delivery AS d
            WHERE d.consumer_group = $1::text AND d.action = w.action AND d.stream = w.stream AND ` + typeOf + ` = t.type AND d.status = 'PENDING'
              AND d.next_retry_at >= w.since AND d.next_retry_at <= clock_timestamp() AND ` + suspect + ` = $8::bool AND d.id <> ALL ($12::bigint[])
              AND (NOT $13::bool OR d.attempt_count = 0 AND d.max_attempts > 1)
            ORDER BY d.consumer_group, d.action, d.stream, ` + typeOf + `, ` + suspect + `, d.next_retry_at, d.id LIMIT $6 FOR UPDATE SKIP LOCKED) AS p
     LIMIT $6
), behind AS MATERIALIZED (
    SELECT b.id FROM due AS w
     CROSS JOIN LATERAL (
           SELECT f.id, bool_and(f.untried) OVER (ORDER BY f.id) AS untried
             FROM (SELECT n.id, coalesce(l.untried, false) AS untried
                     FROM (SELECT d.id FROM {schema}.event_delivery AS d
                            WHERE ` + ofKeyFrom("w.order_key", "w.id + 1") + ` AND d.status = 'PARKED' AND d.consumer_group = $1::text
                              AND w.attempt_count = 0 AND w.failed_at IS NULL
                            ORDER BY d.order_key, d.id LIMIT $7) AS n
                     LEFT JOIN LATERAL (
                          SELECT d.attempt_count = 0 AND NOT ` + suspect + ` AND ` + typeOf + ` = ANY (` + typesOf + `) AS untried FROM {schema}.event_delivery AS d
                           WHERE d.id = n.id AND d.status = 'PARKED' FOR UPDATE SKIP LOCKED) AS l ON true) AS f) AS b
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

// typeOf is the event type of a row d, as an index has it. It is empty for a row without an action: each process of its
// stream decodes its event again, because the type may come from a decoder that was wrong.
const typeOf = `(CASE WHEN d.action = '' THEN '' ELSE d.event_type END)`

// typesOf is the array of the types in w.types, see [Claimable.types].
const typesOf = `(pg_catalog.string_to_array(w.types, E'\n'))[2:]`

// Pair is an action and a stream.
type Pair struct{ Action, Stream string }

// Claimable is a pair whose rows may be claimed, if they have one of the types. Without an action it needs no types.
type Claimable struct {
	Pair
	Types []string
}

// types returns the types as a parameter of statements, with a line break before each. A type has no line breaks.
func (c *Claimable) types() string { return "\n" + strings.Join(c.Types, "\n") }

// columnsOfClaimable returns an array for each column of pairs.
func columnsOfClaimable(pairs []Claimable) (actions, streams, types []string) {
	return column(pairs, func(c *Claimable) string { return c.Action }), column(pairs, func(c *Claimable) string { return c.Stream }),
		column(pairs, (*Claimable).types)
}

// claimScan is a scan of a claim. Each has its own [scanBounds].
type claimScan struct {
	Pair
	suspects bool
}

// sqlRemaining reads for each pair the due time of the first row of its types that the claim has left. The next scan
// begins there. Such rows are beyond the limit of the claim, or locked by a transaction that may roll back.
var sqlRemaining = `
SELECT (SELECT min(first.next_retry_at) FROM pg_catalog.unnest(` + typesOf + `) AS t (type)
         CROSS JOIN LATERAL (
               SELECT d.next_retry_at FROM {schema}.event_delivery AS d
                WHERE d.consumer_group = $1::text AND d.action = w.action AND d.stream = w.stream AND ` + typeOf + ` = t.type AND d.status = 'PENDING'
                  AND d.next_retry_at >= w.since AND d.next_retry_at <= clock_timestamp() AND ` + suspect + ` = $5::bool AND d.id <> ALL ($7::bigint[])
                ORDER BY d.consumer_group, d.action, d.stream, ` + typeOf + `, ` + suspect + `, d.next_retry_at, d.id LIMIT 1) AS first)
  FROM unnest($2::text[], $3::text[], $4::timestamptz[], $6::text[]) WITH ORDINALITY AS w (action, stream, since, types, n)
 ORDER BY w.n`

// Claim is claim for callers without a process that suspects may end: it claims them, or all other rows.
func (s *Store) Claim(ctx context.Context, pairs []Claimable, limit, follow int, suspects bool, budget int64) ([]Delivery, error) {
	room := noSuspects
	if suspects {
		room = anySuspects
	}
	return s.claim(ctx, pairs, limit, follow, room, budget)
}

// claim claims at most limit due rows, and at most follow parked rows behind each. With room for suspects it claims
// only rows that were taken over, without the rows behind them. Rows beyond the budget of bytes come bare,
// as from Queue. Afterwards claimedUnseen says whether there may be other rows that it has claimed.
func (s *Store) claim(ctx context.Context, pairs []Claimable, limit, follow int, room suspectRoom, budget int64) (claimed []Delivery, err error) {
	suspects, fresh := room != noSuspects, room == freshSuspects
	actions, streams, types := columnsOfClaimable(pairs)
	since := column(pairs, func(c *Claimable) time.Time { return s.due.start(claimScan{c.Pair, suspects}) })
	yielded := s.yielded.current()
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
			b.Queue(pg.SQLNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
			b.Queue(s.sqlClaim, s.group, s.newHolder(), s.lease, actions, streams, limit, follow, suspects, since, budget, types, yielded, fresh).Query(func(rows pgx.Rows) (err error) {
				claimed, err = readRows(rows)
				return err
			})
			b.Queue(s.sqlRemaining, s.group, actions, streams, since, suspects, types, yielded).Query(func(rows pgx.Rows) (err error) {
				left, err = pgx.CollectRows(rows, pgx.RowTo[pgtype.Timestamptz])
				return err
			})
		})
	}
	half, cancel := context.WithTimeout(ctx, claimTimeout)
	err = claim(half, budget)
	cancel()
	if MayBeUnreadable(err) && ctx.Err() == nil {
		s.claimedUnseen.Store(true) // PostgreSQL may have committed that claim, and its rows are not due for this one
		err = claim(ctx, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("claim deliveries: %w", err)
	}
	took := time.Since(began)
	for i, p := range pairs {
		s.due.scanned(claimScan{p.Pair, suspects}, since[i], scannedUntil(left[i], now), now, took)
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
 WHERE d.id = $1 AND d.consumer_group = $2::text AND coalesce(d.locked_by, '') = $3::text`

// readPayload reads payload, headers and record of a bare row, which has no holder if its dead letter is owed. It
// returns [ErrLost] if another process has the row. [MayBeUnreadable] tells whether PostgreSQL cannot print the row.
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
