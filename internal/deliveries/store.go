package deliveries

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// ErrLost means that a row is not with this worker any more: its lease had expired, and another
// worker has taken it. Then this worker must not handle what it has behind it: it gives the rows
// of the key back with Return.
var ErrLost = errors.New("delivery is with another worker")

// CodeStale is the last_error_code of a row whose worker was gone.
const CodeStale = "stale"

// Store reads and writes the deliveries of a group for one worker.
type Store struct {
	db     *pgxpool.Pool
	group  string
	worker string
	claims atomic.Int64 // that were made
	lease  time.Duration

	floors   floors
	due      bounds[looking]
	expiring bounds[struct{}]

	sqlInsert, sqlClaim, sqlPrint, sqlFinish, sqlRenew, sqlReturn, sqlFail, sqlExpire, sqlLock, sqlLockRows, sqlPromote, sqlHeadless, sqlLook, sqlMine string
}

// NewStore returns the deliveries of a group for a worker, which has what it claims for the time of
// a lease.
func NewStore(db *pgxpool.Pool, schema, group, worker string, lease time.Duration) *Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Store{
		db: db, group: group, worker: worker, lease: lease,
		due: bounds[looking]{rare: time.Minute}, expiring: bounds[struct{}]{rare: 10 * time.Minute},
		sqlInsert: in(sqlInsert), sqlClaim: in(sqlClaim), sqlPrint: in(sqlPrint), sqlFinish: in(sqlFinish), sqlRenew: in(sqlRenew), sqlReturn: in(sqlReturn),
		sqlFail: in(sqlFail), sqlExpire: in(sqlExpire), sqlLock: in(sqlLock), sqlLockRows: in(sqlLockRows), sqlPromote: in(sqlPromote), sqlHeadless: in(sqlHeadless), sqlLook: in(sqlLook), sqlMine: in(sqlMine),
	}
}

// newHolder returns what locked_by is in the rows of a claim. Each claim has its own, because a crash of
// PostgreSQL may forget a claim, and with it the row: then the id may be another row's, and be claimed by this
// worker again.
func (s *Store) newHolder() string { return s.worker + "/" + strconv.FormatInt(s.claims.Add(1), 10) }

// IsUnprintable reports whether PostgreSQL could not print a row, or has perhaps worked on that until its time
// was over.
func IsUnprintable(err error) bool {
	return pg.IsUnreadable(err) || pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
}

// claimTimeout bounds a claim, until it is tried without what may not be printable.
const claimTimeout = 15 * time.Second

const sqlPrint = `SELECT ` + payload + `, ` + headers + ` FROM {schema}.event_delivery AS d WHERE d.id = $1 AND d.consumer_group = $2::text AND d.locked_by = $3::text`

// Print reads payload and headers of a bare row. The error may be one that [IsUnprintable] knows, or [ErrLost] if
// the row is not with this worker any more.
func (s *Store) Print(ctx context.Context, d *Delivery) error {
	err := s.db.QueryRow(ctx, s.sqlPrint, d.ID, s.group, d.Holder).Scan(&d.Payload, &d.Headers)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return ErrLost
	case err != nil:
		return fmt.Errorf("read payload and headers: %w", err)
	}
	d.Bare = false
	return nil
}

// settings precede the statements of a transaction.
const settings = pg.PlannerSettings + `, set_config('lock_timeout', '5s', true), set_config('idle_in_transaction_session_timeout', '10s', true)`

// sqlLook fails if the tables do not exist, or are of an earlier release.
const sqlLook = `
SELECT d.id, d.order_key, d.held FROM {schema}.event_delivery AS d, {schema}.event_subscription AS s LIMIT 0`

// Check reports why the tables cannot be used.
func (s *Store) Check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.sqlLook)
	return err
}

// New is a row to be inserted.
type New struct {
	OutboxID       int64
	Action, Stream string
	Key            Key
	// Status is what it becomes if no other row of its key is open: Processing, or Pending. Of
	// several new rows of a key, either all are Processing, or those behind the first are Parked.
	// A row that is to be Dead is so in any case, for want of a handler.
	Status      Status
	MaxAttempts int
}

// Conditions of rows d of event_delivery, and of their indexes: head, that parked rows of its key
// wait for it; open, that it is head or parked.
const (
	head = `(d.status IN ('PENDING', 'PROCESSING') OR d.held)`
	open = `(d.status IN ('PENDING', 'PARKED', 'PROCESSING') OR d.held)`
)

// sqlInsert looks once at each key, before it inserts a row: the indexes also have those that it
// inserts itself, and those that have gone on and are still to be removed. It looks from the latest
// row of a key backwards, to its floor: if any row is open, that is among the first.
var sqlInsert = `
WITH keys AS MATERIALIZED (
    SELECT n.key, min(CASE WHEN (SELECT a.backend_start <= $11::timestamptz FROM pg_stat_get_activity(pg_backend_pid()) AS a WHERE pg_postmaster_start_time() = $12::timestamptz)
                           THEN n.floor ELSE 0 END) AS floor
      FROM unnest($7::bigint[], $10::bigint[]) AS n (key, floor) WHERE n.key IS NOT NULL GROUP BY n.key
), busy AS MATERIALIZED (
    SELECT k.key FROM keys AS k
     WHERE coalesce(
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE d.order_key = k.key AND ` + head + ` AND d.id >= k.floor AND d.consumer_group = $1::text
             ORDER BY d.order_key DESC, d.id DESC LIMIT 1),
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE d.order_key = k.key AND d.put_back AND ` + open + ` AND d.consumer_group = $1::text
             ORDER BY d.order_key, (d.status = 'PARKED'), d.id LIMIT 1),
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE d.order_key = k.key AND d.status = 'PARKED' AND d.id >= k.floor AND d.consumer_group = $1::text
             ORDER BY d.order_key DESC, d.id DESC LIMIT 1), false)
), inserted AS (
    INSERT INTO {schema}.event_delivery (consumer_group, action, stream, position, order_key, status, attempt_count, max_attempts,
           next_retry_at, last_attempt_at, locked_by, locked_until, created_at, updated_at, processed_at, last_error_code, last_error_message,
           event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type, partition_key, headers, size, occurred_at, recorded_at)
    SELECT $1::text, n.action, n.stream, n.id, n.key, n.status, CASE n.status WHEN 'PROCESSING' THEN 1 ELSE 0 END, n.most,
           t.at, CASE n.status WHEN 'PROCESSING' THEN t.at END, CASE n.status WHEN 'PROCESSING' THEN $2::text END,
           CASE n.status WHEN 'PROCESSING' THEN t.at + $3::interval END, t.at, t.at, CASE n.status WHEN 'DEAD' THEN t.at END,
           CASE n.status WHEN 'DEAD' THEN 'unknown_type' END, CASE n.status WHEN 'DEAD' THEN 'no handler of the group takes this event type' END,
           o.event_id, o.event_type, o.source, o.aggregate_type, o.aggregate_id, o.payload, o.payload_bytes, o.content_type, o.partition_key,
           o.headers, greatest(o.size, pg_column_size(o.payload), pg_column_size(o.payload_bytes)), o.occurred_at, o.created_at
      FROM (SELECT p.*, CASE WHEN p.planned <> 'DEAD' AND p.key IN (SELECT key FROM busy) THEN 'PARKED' ELSE p.planned END AS status
              FROM unnest($4::bigint[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::int[]) AS p (id, action, stream, key, planned, most) OFFSET 0) AS n
     CROSS JOIN (SELECT clock_timestamp() AS at OFFSET 0) AS t
     CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id = n.id OFFSET 0) AS o
 RETURNING *
)
SELECT ` + columnsWithin("$13") + `
  FROM (SELECT i.*, CASE i.status WHEN 'PROCESSING' THEN sum(i.size) FILTER (WHERE i.status = 'PROCESSING') OVER (ORDER BY i.id) END AS until
          FROM inserted AS i WHERE i.status IN ('PROCESSING', 'PENDING')) AS d
 ORDER BY d.id`

// Queue adds the insertion of rows to a batch, which is to be in a transaction of its own with
// what moves the cursor of the group. Claimed gets those of them that are with this worker then,
// in the order in which they were inserted.
//
// What does not fit into a budget of bytes with what is before it comes bare: without payload and headers, which
// Store.Print reads. If PostgreSQL cannot print those of a row, that is an error of the whole statement. With a
// budget of 0 it does not try.
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
		found, err := scan(rows)
		if err != nil {
			return err
		}
		s.floors.learn(onFloors(found), on)
		return claimed(slices.DeleteFunc(found, func(d Delivery) bool { return d.Attempt == 0 })) // PENDING
	})
}

const (
	sqlLock = `SELECT {schema}.outbox_lock_keys($1, $2), clock_timestamp(), pg_postmaster_start_time(),
       (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid()))`
	sqlPromote = `SELECT {schema}.outbox_promote($1, $2, $3)`
)

// The ids of the rows to be changed are an array in the statements below, because each of its
// elements is looked up in the index of the primary key. In a join, a plan that was made for an
// empty table reads all of it.

// sqlClaim takes due rows of the actions and streams, and of those that are tried for the first
// time also what is parked behind them, up to a row that was tried. They are found one pair of
// action and stream after the other, so that none of them, paused or failing, hides the rest.
var sqlClaim = `
WITH due AS MATERIALIZED (
    SELECT p.id, p.order_key, p.attempt_count FROM unnest($4::text[], $5::text[], $9::timestamptz[]) AS w (action, stream, since)
     CROSS JOIN LATERAL (
           SELECT d.id, d.order_key, d.attempt_count FROM {schema}.event_delivery AS d
            WHERE d.consumer_group = $1::text AND d.action = w.action AND d.stream = w.stream AND d.status = 'PENDING'
              AND d.next_retry_at >= w.since AND d.next_retry_at <= clock_timestamp() AND ` + suspect + ` = $8::bool
            ORDER BY d.consumer_group, d.action, d.stream, ` + suspect + `, d.next_retry_at, d.id LIMIT $6 FOR UPDATE SKIP LOCKED) AS p
     LIMIT $6
), behind AS MATERIALIZED (
    SELECT b.id FROM due
     CROSS JOIN LATERAL (
           SELECT f.id, bool_and(f.untried) OVER (ORDER BY f.id) AS untried
             FROM (SELECT d.id, d.attempt_count = 0 AND NOT ` + suspect + ` AS untried FROM {schema}.event_delivery AS d
                    WHERE d.order_key = due.order_key AND d.status = 'PARKED' AND d.consumer_group = $1::text
                      AND due.attempt_count = 0 AND d.id > due.id
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
	began := time.Now()
	claim := func(ctx context.Context, budget int64) error {
		return s.transact(ctx, func(b *pgx.Batch) {
			b.Queue(sqlNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
			b.Queue(s.sqlClaim, s.group, s.newHolder(), s.lease, actions, streams, limit, follow, suspects, since, budget).Query(func(rows pgx.Rows) (err error) {
				claimed, err = scan(rows)
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
	last, heads := lastDue(onFloors(claimed))
	for i, p := range pairs {
		if until, some := last[p]; heads < limit {
			s.due.looked(looking{p, suspects}, since[i], now, took)
		} else if some {
			s.due.looked(looking{p, suspects}, since[i], until, took)
		}
	}
	return claimed, nil
}

// lastDue returns when the last row of each pair was due, and how many were: the others were
// behind the first of their keys.
func lastDue(claimed []Delivery) (last map[Pair]time.Time, heads int) {
	last = map[Pair]time.Time{}
	for _, d := range claimed {
		if d.Key.Ordered && d.ID > d.floor {
			continue
		}
		heads++
		if p := (Pair{d.Action, d.Stream}); d.due.After(last[p]) {
			last[p] = d.due
		}
	}
	return last, heads
}

const sqlFinish = `SELECT {schema}.outbox_finish_deliveries($1, $2, $3, $4, $5)`

// FinishIn ends rows in the transaction that has handled them, and promotes what waits behind
// them. It reports how many rows it has promoted, -1 if that is still to be done with Promote,
// because of the isolation level of the transaction. The error is [ErrLost] if one of the rows is
// not with this worker any more.
func (s *Store) FinishIn(ctx context.Context, tx pgx.Tx, rows []Delivery) (promoted int64, err error) {
	keys, floors := digests(rows)
	if err := tx.QueryRow(ctx, s.sqlFinish, s.group, holderOf(rows), idsOf(rows), keys, floors).Scan(&promoted); err != nil {
		return 0, lost(fmt.Errorf("finish deliveries: %w", err))
	}
	return promoted, nil
}

const sqlLockRows = `
SELECT d.id FROM {schema}.event_delivery AS d
 WHERE d.id = ANY ($1) AND d.consumer_group = $2::text AND d.status = 'PROCESSING' AND d.locked_by = $3::text
 ORDER BY d.id FOR UPDATE`

// LockIn locks rows until the end of a transaction, so that nobody renews or takes them. The error
// is [ErrLost] if one of them is not with this worker any more.
func (s *Store) LockIn(ctx context.Context, tx pgx.Tx, rows []Delivery) error {
	tag, err := tx.Exec(ctx, s.sqlLockRows, idsOf(rows), s.group, holderOf(rows))
	switch {
	case err != nil:
		return fmt.Errorf("lock deliveries: %w", err)
	case tag.RowsAffected() < int64(len(rows)):
		return ErrLost
	}
	return nil
}

// Finish is FinishIn in a transaction of its own.
func (s *Store) Finish(ctx context.Context, rows []Delivery) (promoted int64, err error) {
	keys, floors := digests(rows)
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlFinish, s.group, holderOf(rows), idsOf(rows), keys, floors).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
	})
	if err != nil {
		return 0, lost(fmt.Errorf("finish deliveries: %w", err))
	}
	return promoted, nil
}

// lost turns the error of outbox_finish_deliveries about missing rows into ErrLost.
func lost(err error) error {
	const objectNotInPrerequisiteState = "55000"
	if pg.Code(err) == objectNotInPrerequisiteState {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}

// Promote promotes what waits behind rows.
func (s *Store) Promote(ctx context.Context, rows []Delivery) (promoted int64, err error) {
	keys, floors := digests(rows)
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlPromote, s.group, keys, floors).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
	})
	if err != nil {
		return 0, fmt.Errorf("promote deliveries: %w", err)
	}
	return promoted, nil
}

// holderOf returns that of rows which were claimed together.
func holderOf(rows []Delivery) string {
	if len(rows) == 0 {
		return ""
	}
	return rows[0].Holder
}

func idsOf(rows []Delivery) []int64 {
	ids := make([]int64, len(rows))
	for i := range rows {
		ids[i] = rows[i].ID
	}
	return ids
}

// digests returns the keys of rows, NULL for those without order, and their floors.
func digests(rows []Delivery) (keys []pgtype.Int8, floors []int64) {
	keys, floors = make([]pgtype.Int8, len(rows)), make([]int64, len(rows))
	for i := range rows {
		keys[i], floors[i] = rows[i].Key.value(), rows[i].floor
	}
	return keys, floors
}

// Failure is an attempt that has failed.
type Failure struct {
	Of   Delivery
	Code string
	// Message is the error, bounded.
	Message string
	// Wait is how long to wait before the next attempt.
	Wait time.Duration
	// MaxAttempts is how many the delivery has from now on, unless it had more.
	MaxAttempts int
	// Uncounted is set if it is to be no attempt.
	Uncounted bool
	// Dead is set if there is none. Then its key goes on, unless Held.
	Dead, Held bool
}

const sqlFail = `
UPDATE {schema}.event_delivery AS d
   SET status = CASE WHEN $6::bool THEN 'DEAD' ELSE 'PENDING' END, held = $7::bool, locked_by = NULL, locked_until = NULL,
       next_retry_at = clock_timestamp() + $5::interval, processed_at = CASE WHEN $6::bool THEN clock_timestamp() END,
       updated_at = clock_timestamp(), last_error_code = $3::text, last_error_message = $4::text, max_attempts = greatest(d.max_attempts, $9::int),
       attempt_count = d.attempt_count - CASE WHEN $10::bool THEN 1 ELSE 0 END
 WHERE d.id = $1 AND d.locked_by = $2::text AND d.consumer_group = $8::text
RETURNING d.id`

// Fail writes down that an attempt has failed. Rest are the rows of the same key behind it,
// which this worker has not tried: they wait behind it again. The error is [ErrLost] if the row is not
// with this worker any more.
func (s *Store) Fail(ctx context.Context, f Failure, rest []Delivery) (promoted int64, err error) {
	found := false
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlFail, f.Of.ID, f.Of.Holder, f.Code, f.Message, f.Wait, f.Dead, f.Held, s.group, f.MaxAttempts, f.Uncounted).Query(func(rows pgx.Rows) error {
			ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			found = len(ids) > 0
			return err
		})
		if len(rest) > 0 {
			b.Queue(s.sqlReturn, idsOf(rest), f.Of.Holder, s.group, true)
		}
		// A row that is lost may be parked behind rest.
		if f.Of.Key.Ordered && (len(rest) > 0 || f.Dead && !f.Held) {
			b.Queue(s.sqlPromote, s.group, []int64{f.Of.Key.Digest}, []int64{f.Of.floor}).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
		}
	})
	if err != nil {
		return 0, fmt.Errorf("write down failed delivery: %w", err)
	}
	if !found {
		return 0, ErrLost
	}
	return promoted, nil
}

// sqlReturn gives rows back that were not tried.
const sqlReturn = `
UPDATE {schema}.event_delivery AS d
   SET status = CASE WHEN $4::bool AND d.order_key IS NOT NULL THEN 'PARKED' ELSE 'PENDING' END, locked_by = NULL, locked_until = NULL,
       attempt_count = d.attempt_count - 1, next_retry_at = clock_timestamp(), updated_at = clock_timestamp()
 WHERE d.id = ANY ($1) AND d.locked_by = $2::text AND d.consumer_group = $3::text`

// Return gives rows back that were not tried: they can be claimed at once, and were not
// attempted. They are parked, and the first of each key is promoted.
func (s *Store) Return(ctx context.Context, rows []Delivery) error {
	keys, floors := digests(rows)
	err := s.transact(ctx, func(b *pgx.Batch) {
		for holder, ids := range byHolder(refsOf(rows)) {
			b.Queue(s.sqlReturn, ids, holder, s.group, true)
		}
		b.Queue(s.sqlPromote, s.group, keys, floors)
	})
	if err != nil {
		return fmt.Errorf("give deliveries back: %w", err)
	}
	return nil
}

// sqlMine reads the rows that this worker has.
const sqlMine = `
SELECT d.id, d.locked_by, d.order_key FROM {schema}.event_delivery AS d
 WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND starts_with(d.locked_by, $2::text || '/')
 ORDER BY d.consumer_group, d.locked_until`

// Mine returns the rows that this worker has, without their events. There may be others than it knows of,
// where the answer to a claim was lost.
func (s *Store) Mine(ctx context.Context) (rows []Delivery, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlMine, s.group, s.worker).Query(func(r pgx.Rows) (err error) {
			rows, err = pgx.CollectRows(r, func(row pgx.CollectableRow) (d Delivery, err error) {
				var key pgtype.Int8
				err = row.Scan(&d.ID, &d.Holder, &key)
				d.Key = Key{key.Int64, key.Valid}
				return d, err
			})
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("look for deliveries of this worker: %w", err)
	}
	return rows, nil
}

// sqlRenew passes over rows that are being written: these end in a moment, or their worker finds out
// that they are lost.
const sqlRenew = `
UPDATE {schema}.event_delivery AS d
   SET locked_until = (SELECT clock_timestamp()) + $3::interval
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM {schema}.event_delivery AS r
                          WHERE r.id = ANY ($1) AND r.locked_by = $2::text AND r.consumer_group = $4::text FOR UPDATE SKIP LOCKED))
RETURNING d.id`

// Renew extends the lease of rows. It returns those that it has found; others have ended, are
// lost, or are being written at the moment.
func (s *Store) Renew(ctx context.Context, rows []Ref) (renewed []Ref, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		for holder, ids := range byHolder(rows) {
			b.Queue(s.sqlRenew, ids, holder, s.lease, s.group).Query(func(rows pgx.Rows) error {
				found, err := pgx.CollectRows(rows, pgx.RowTo[int64])
				for _, id := range found {
					renewed = append(renewed, Ref{id, holder})
				}
				return err
			})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("renew deliveries: %w", err)
	}
	return renewed, nil
}

func byHolder(rows []Ref) map[string][]int64 {
	ids := map[string][]int64{}
	for _, r := range rows {
		ids[r.Holder] = append(ids[r.Holder], r.ID)
	}
	return ids
}

func refsOf(rows []Delivery) []Ref {
	refs := make([]Ref, len(rows))
	for i := range rows {
		refs[i] = rows[i].Ref
	}
	return refs
}

// sqlExpire takes rows from workers that are gone, and with each of them the others of its key that
// the worker has: it must not finish one of them without those before. While PostgreSQL has just
// been started, workers may not have had the time to renew what they have. Of the rest of its run,
// some may stay with the worker that are being renewed: so rows are put back.
const sqlExpire = `
WITH stale AS MATERIALIZED (
    SELECT d.id, d.order_key, d.locked_by FROM {schema}.event_delivery AS d
     WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND d.locked_until >= $5::timestamptz AND d.locked_until < clock_timestamp()
       AND pg_postmaster_start_time() < clock_timestamp() - $3::interval
     ORDER BY d.consumer_group, d.locked_until LIMIT $2 FOR UPDATE SKIP LOCKED
), run AS MATERIALIZED (
    SELECT r.id FROM (SELECT DISTINCT order_key, locked_by FROM stale) AS s
     CROSS JOIN LATERAL (
           SELECT d.id FROM {schema}.event_delivery AS d
            WHERE d.order_key = s.order_key AND ` + head + ` AND d.consumer_group = $1::text AND d.locked_by = s.locked_by
              FOR UPDATE SKIP LOCKED) AS r
)
UPDATE {schema}.event_delivery AS d
   SET status = CASE WHEN d.attempt_count >= d.max_attempts THEN 'DEAD' WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END,
       held = $4::bool AND d.attempt_count >= d.max_attempts, processed_at = CASE WHEN d.attempt_count >= d.max_attempts THEN clock_timestamp() END,
       put_back = true, locked_by = NULL, locked_until = NULL, next_retry_at = clock_timestamp(), updated_at = clock_timestamp(),
       last_error_code = '` + CodeStale + `', last_error_message = 'worker ' || d.locked_by || ' was gone before it was done'
 WHERE d.id = ANY (ARRAY(SELECT id FROM stale UNION SELECT id FROM run))
RETURNING ` + expiredColumns

const expiredColumns = `d.id, d.order_key, d.status, d.event_id::text, d.event_type, d.action, d.stream, d.attempt_count`

// Expired is a row whose worker is gone.
type Expired struct {
	ID                            int64
	Key                           Key
	Dead                          bool
	EventID, Type, Action, Stream string
	Attempt                       int
}

// Expire takes rows, at most limit and the others of their keys, from workers whose lease has expired. Those that have used up
// their attempts become dead, and hold their key if hold is set.
func (s *Store) Expire(ctx context.Context, limit int, hold bool) (expired []Expired, err error) {
	tx, err := s.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(ctx) }() // nothing, once it is committed
	var b pgx.Batch
	var now time.Time
	began, since := time.Now(), s.expiring.of(struct{}{})
	b.Queue(settings)
	b.Queue(sqlNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
	b.Queue(s.sqlExpire, s.group, limit, s.lease/2, hold, since).Query(func(rows pgx.Rows) (err error) {
		expired, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Expired, err error) {
			var key pgtype.Int8
			var status string
			err = row.Scan(&e.ID, &key, &status, &e.EventID, &e.Type, &e.Action, &e.Stream, &e.Attempt)
			e.Key, e.Dead = Key{key.Int64, key.Valid}, Status(status) == Dead
			return e, err
		})
		return err
	})
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return nil, fmt.Errorf("take over deliveries: %w", err)
	}
	if len(expired) < limit {
		s.expiring.looked(struct{}{}, since, now, time.Since(began))
	}
	if len(expired) == 0 {
		return nil, nil
	}
	var keys []int64
	for _, e := range expired {
		if e.Key.Ordered {
			keys = append(keys, e.Key.Digest)
		}
	}
	if _, err := tx.Exec(ctx, s.sqlPromote, s.group, keys, nil); err != nil {
		return nil, fmt.Errorf("take over deliveries: %w", err)
	}
	return expired, tx.Commit(ctx)
}

// sqlHeadless looks at up to $2 keys with parked rows behind $1. A key is a step in the index,
// however many rows it has.
const sqlHeadless = `
WITH RECURSIVE waiting AS (
    SELECT $1::bigint AS order_key, NULL::text AS consumer_group, 0 AS n
     UNION ALL
    SELECT next.order_key, next.consumer_group, waiting.n + 1 FROM waiting
     CROSS JOIN LATERAL (
           SELECT d.order_key, d.consumer_group FROM {schema}.event_delivery AS d
            WHERE d.order_key > waiting.order_key AND d.status = 'PARKED'
            ORDER BY d.order_key, d.id LIMIT 1) AS next
     WHERE waiting.n < $2
)
SELECT (SELECT array_agg(w.order_key) FROM waiting AS w
         WHERE w.consumer_group = $3::text
           AND (SELECT d.id FROM {schema}.event_delivery AS d WHERE d.order_key = w.order_key AND ` + head + ` AND d.consumer_group = $3::text
                 ORDER BY d.order_key DESC, d.id DESC LIMIT 1) IS NULL),
       (SELECT order_key FROM waiting WHERE n = $2)`

// RepairHeads promotes the first row of keys whose rows are all parked. There is none, unless
// a worker was gone between FinishIn and Promote, or somebody else has written to the table. It looks at up to limit keys behind one, and returns
// the last of them, or the least of all if there are no more.
func (s *Store) RepairHeads(ctx context.Context, behind int64, limit int) (last int64, repaired int64, err error) {
	var headless []int64
	var end pgtype.Int8
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlHeadless, behind, limit, s.group).QueryRow(func(row pgx.Row) error { return row.Scan(&headless, &end) })
	})
	last = math.MinInt64
	if end.Valid {
		last = end.Int64
	}
	if err == nil && len(headless) > 0 {
		err = s.transact(ctx, func(b *pgx.Batch) {
			b.Queue(s.sqlPromote, s.group, headless, nil).QueryRow(func(row pgx.Row) error { return row.Scan(&repaired) })
		})
	}
	if err != nil {
		return behind, 0, fmt.Errorf("look for deliveries without a head: %w", err)
	}
	return last, repaired, nil
}

// transact runs statements in a transaction, in a single round trip.
func (s *Store) transact(ctx context.Context, queue func(*pgx.Batch)) error {
	return Transact(ctx, s.db, queue)
}

// Transact runs statements in a transaction of READ COMMITTED, in a single round trip, with the settings that
// the statements on event_delivery need.
func Transact(ctx context.Context, db *pgxpool.Pool, queue func(*pgx.Batch)) error {
	var b pgx.Batch
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(settings)
	queue(&b)
	b.Queue("COMMIT")
	return db.SendBatch(ctx, &b).Close()
}
