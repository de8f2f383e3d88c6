package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// sqlOwn reads the rows that this process has claimed, in any of its claims.
const sqlOwn = `
SELECT d.id, d.locked_by, d.order_key FROM {schema}.event_delivery AS d
 WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND pg_catalog.starts_with(d.locked_by, $2::text || '/')
 ORDER BY d.consumer_group, d.locked_until`

// Own returns the rows that this process has claimed, without their events. The process does not know of
// some of them if the answer to a claim was lost.
func (s *Store) Own(ctx context.Context) (rows []Delivery, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlOwn, s.group, s.process).Query(func(r pgx.Rows) (err error) {
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
		return nil, fmt.Errorf("read claimed deliveries: %w", err)
	}
	return rows, nil
}

// maxCounted bounds the result of countOthers, and its cost.
const maxCounted = 10_000

// sqlOthers counts rows that other processes have claimed, also with leases that have expired within the
// last lease. Older entries of the index may be many that PostgreSQL has not removed yet.
const sqlOthers = `
SELECT count(*) FILTER (WHERE o.others)::int, count(*) >= $4, coalesce(max(o.locked_until) FILTER (WHERE o.others) - clock_timestamp(), '0')
  FROM (SELECT d.locked_until, NOT pg_catalog.starts_with(d.locked_by, $2::text || '/') AS others FROM {schema}.event_delivery AS d
         WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND d.locked_until > now() - $3::interval
         ORDER BY d.consumer_group, d.locked_until LIMIT $4) AS o`

// countOthers returns the number of rows that other processes have claimed, and their longest remaining lease. It reads
// 10,000 rows, those first whose leases end first. More is set if there may be more.
func (s *Store) countOthers(ctx context.Context) (rows int, more bool, longest time.Duration, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlOthers, s.group, s.process, s.lease, maxCounted).QueryRow(func(row pgx.Row) error { return row.Scan(&rows, &more, &longest) })
	})
	if err != nil {
		return 0, false, 0, fmt.Errorf("count deliveries of other processes: %w", err)
	}
	return rows, more, longest, nil
}

// sqlRenew skips locked rows. A transaction is about to finish them, or is taking them over.
const sqlRenew = `
UPDATE {schema}.event_delivery AS d
   SET locked_until = (SELECT clock_timestamp()) + $3::interval
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM {schema}.event_delivery AS r
                          WHERE r.id = ANY ($1) AND r.locked_by = $2::text AND r.consumer_group = $4::text FOR UPDATE SKIP LOCKED))
RETURNING d.id`

// Renew renews the leases of rows. It returns the rows that it has renewed. Other rows have ended, are
// lost, or are locked at the moment.
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

// sqlTakeOver takes over rows whose leases have expired, and with each of them the other rows of its key
// from the same claim: their process must not finish a row without those before it. It does nothing until
// half a lease after a start of PostgreSQL, because processes need that time to renew their leases. A start in
// the future means that the clock was set back since. Rows of the key that are locked, because they are being
// renewed, stay with their process. Therefore the rows are marked as put back. The attempt counts only if the
// process has noted that a handler has begun.
const sqlTakeOver = `
WITH expired AS MATERIALIZED (
    SELECT d.id, d.order_key, d.locked_by, ` + begun + ` AS begun FROM {schema}.event_delivery AS d
     WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND d.locked_until >= $5::timestamptz AND d.locked_until < clock_timestamp()
       AND pg_postmaster_start_time() NOT BETWEEN clock_timestamp() - $3::interval AND clock_timestamp()
     ORDER BY d.consumer_group, d.locked_until LIMIT $2 FOR UPDATE SKIP LOCKED
), ahead AS MATERIALIZED (
    SELECT d.id, d.order_key, d.locked_by, ` + begun + ` AS begun FROM {schema}.event_delivery AS d
     WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND ` + lockedAhead + `
     ORDER BY d.consumer_group, d.locked_until LIMIT $2 FOR UPDATE SKIP LOCKED
), stale AS MATERIALIZED (
    SELECT * FROM expired UNION ALL SELECT * FROM ahead
), run AS MATERIALIZED (
    SELECT r.id, r.begun FROM (SELECT DISTINCT order_key, locked_by FROM stale) AS s
     CROSS JOIN LATERAL (
           SELECT d.id, ` + begun + ` AS begun FROM {schema}.event_delivery AS d
            WHERE d.order_key = s.order_key AND ` + head + ` AND d.consumer_group = $1::text AND d.locked_by = s.locked_by
              FOR UPDATE SKIP LOCKED) AS r
)
UPDATE {schema}.event_delivery AS d
   SET status = CASE WHEN ` + attemptsUsedUp + ` THEN 'DEAD' WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END,
       held = $4::bool AND ` + attemptsUsedUp + `, processed_at = CASE WHEN ` + attemptsUsedUp + ` THEN clock_timestamp() END,
       attempt_count = d.attempt_count - CASE WHEN ` + begun + ` THEN 0 ELSE 1 END,
       put_back = true, locked_by = NULL, locked_until = NULL, next_retry_at = clock_timestamp(), updated_at = clock_timestamp(),
       last_error_code = '` + codeStale + `', last_error_message = 'worker ' || d.locked_by::text || ' was gone before it was done'
 WHERE d.id = ANY (ARRAY(SELECT id FROM stale UNION SELECT id FROM run))
RETURNING ` + expiredColumns + `, coalesce((SELECT s.begun FROM stale AS s WHERE s.id = d.id), (SELECT r.begun FROM run AS r WHERE r.id = d.id LIMIT 1), false)`

// lockedAhead is the condition that a row d was claimed or renewed before the clock of the database was set back. Its
// lease ends far beyond a lease from now: $3 is half a lease of this process. Others may have longer leases, so the
// claim must be in the future, too, or the lease longer than any.
const lockedAhead = `d.locked_until > clock_timestamp() + greatest($3::interval * 20::float8, interval '10 minutes')
       AND (d.updated_at > clock_timestamp() OR d.locked_until > clock_timestamp() + interval '1 day')`

// attemptsUsedUp is the condition that a row becomes DEAD with its last attempt. A row of a record does not
// become DEAD: the process that claims it next must send its dead letter first.
const attemptsUsedUp = `(d.attempt_count >= d.max_attempts AND d.record IS NULL AND ` + begun + `)`

// begun is the condition that the process of a PROCESSING row has called [Store.Begin]. A claim sets both
// times, and only Begin changes one of them.
const begun = `coalesce(d.last_attempt_at > d.updated_at, false)`

// sqlBegin notes that handlers of rows begin. Clocks may be set back after the claim.
const sqlBegin = `
UPDATE {schema}.event_delivery AS d SET last_attempt_at = greatest(clock_timestamp(), d.updated_at + interval '1 microsecond')
 WHERE d.id = ANY ($1) AND d.locked_by = $2::text AND d.consumer_group = $3::text`

// Begin notes that handlers of rows of a claim have begun or are about to begin. Then the attempt counts even if this
// process does not end it. Without Begin, an attempt that is not ended does not count: most rows of a process that is
// gone were waiting. Begin costs a transaction, so it is only for rows that may end or block their process: suspects,
// and rows whose handlers do not return. It returns [ErrLost] if another process has one of the rows.
func (s *Store) Begin(ctx context.Context, rows []Delivery) error {
	found := int64(0)
	err := s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlBegin, idsOf(rows), holderOf(rows), s.group).Exec(affected(&found))
	})
	switch {
	case err != nil:
		return fmt.Errorf("note that handlers begin: %w", err)
	case found < int64(len(rows)):
		return ErrLost
	}
	return nil
}

// sqlExpired reads since when leases have expired. The next scan begins there, whether sqlTakeOver takes
// the rows over or not: it takes at most a number of rows, none that are locked, and none just after a
// start of PostgreSQL.
const sqlExpired = `
SELECT (SELECT d.locked_until FROM {schema}.event_delivery AS d
         WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND d.locked_until >= $2::timestamptz AND d.locked_until < clock_timestamp()
         ORDER BY d.consumer_group, d.locked_until LIMIT 1),
       coalesce((SELECT true FROM {schema}.event_delivery AS d
                  WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND ` + lockedAhead + `
                  ORDER BY d.consumer_group, d.locked_until LIMIT 1), false)`

// sqlDueAgain has rows that were given back before the clock of the database was set back wait no longer than they had
// to: whatever makes a row PENDING writes both times at once.
const sqlDueAgain = `
UPDATE {schema}.event_delivery AS d
   SET next_retry_at = clock_timestamp() + greatest(d.next_retry_at - d.updated_at, '0'), updated_at = clock_timestamp()
 WHERE d.id = ANY (ARRAY(SELECT p.id FROM {schema}.event_delivery AS p
                          WHERE p.id = ANY (ARRAY(SELECT d.id FROM {schema}.event_delivery AS d
                                                   WHERE d.consumer_group = $1::text AND d.status = 'PENDING' AND d.next_retry_at > (SELECT clock_timestamp()) AND d.updated_at > clock_timestamp()
                                                   ORDER BY d.consumer_group, d.action, d.stream, ` + typeOf + `, ` + suspect + `, d.next_retry_at, d.id LIMIT $2))
                            AND p.status = 'PENDING' AND p.updated_at > clock_timestamp() FOR UPDATE SKIP LOCKED))`

// dueAgain gives at most limit rows the time back that they would wait because the clock of the database was set back.
// It returns their number. It reads what the group has PENDING, so it is for the time after that.
func (s *Store) dueAgain(ctx context.Context, limit int) (rows int64, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlDueAgain, s.group, limit).Exec(affected(&rows))
	})
	if err != nil {
		return 0, fmt.Errorf("look for deliveries from before the clock was set back: %w", err)
	}
	return rows, nil
}

const expiredColumns = `d.id, d.order_key, d.status, coalesce(d.record_id, d.event_id::text), d.event_type, d.aggregate_type, d.aggregate_id, d.action, d.stream, d.attempt_count,
       d.position, d.record_partition, coalesce(d.partition_key, d.aggregate_id)`

// Expired is a row that was taken over because its lease had expired.
type Expired struct {
	ID                            int64
	Key                           Key
	Dead                          bool
	EventID, Type, Action, Stream string
	AggregateType, AggregateID    string
	Attempt                       int // the attempt that was not ended
	RecordKey                     string
	// Position, FromKafka and Partition are the same fields as in [Delivery].
	Position  int64
	FromKafka bool
	Partition int32
}

// TakeOver takes over at most limit rows whose leases have expired, and the other rows of their keys from
// the same claims. Rows that have begun their last attempt become dead, and hold their key if hold is set.
func (s *Store) TakeOver(ctx context.Context, limit int, hold bool) (expired []Expired, err error) {
	tx, err := s.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(ctx) }() // nothing, once it is committed
	var first, second pgx.Batch
	var now time.Time
	var stale pgtype.Timestamptz
	var ahead bool
	began, since := time.Now(), s.expiring.start(struct{}{})
	first.Queue(settings)
	first.Queue(pg.SQLNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
	first.Queue(s.sqlExpired, s.group, since, s.lease/2).QueryRow(func(row pgx.Row) error { return row.Scan(&stale, &ahead) })
	if err := tx.SendBatch(ctx, &first).Close(); err != nil {
		return nil, fmt.Errorf("look for expired leases of deliveries: %w", err)
	}
	s.expiring.scanned(struct{}{}, since, scannedUntil(stale, now), now, time.Since(began))
	if !stale.Valid && !ahead { // the usual case
		return nil, nil
	}
	second.Queue(s.sqlTakeOver, s.group, limit, s.lease/2, hold, since).Query(func(rows pgx.Rows) (err error) {
		expired, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Expired, err error) {
			var key pgtype.Int8
			var status string
			var partition pgtype.Int4
			var counted bool
			err = row.Scan(&e.ID, &key, &status, &e.EventID, &e.Type, &e.AggregateType, &e.AggregateID, &e.Action, &e.Stream, &e.Attempt, &e.Position, &partition, &e.RecordKey, &counted)
			if !counted {
				e.Attempt++
			}
			e.FromKafka, e.Partition = partition.Valid, partition.Int32
			e.Key, e.Dead = Key{key.Int64, key.Valid}, Status(status) == Dead
			return e, err
		})
		return err
	})
	if err := tx.SendBatch(ctx, &second).Close(); err != nil {
		return nil, fmt.Errorf("take over deliveries: %w", err)
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
	if err := tx.Commit(ctx); err != nil {
		return nil, fmt.Errorf("take over deliveries: %w", err)
	}
	return expired, nil
}
