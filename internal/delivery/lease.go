package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

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

// mostOthers is up to which number the rows of other workers are counted.
const mostOthers = 10_000

// sqlOthers counts what other workers have, up to a number, and what they had until a lease ago. Older
// entries of the index may be many that nobody has removed yet.
const sqlOthers = `
SELECT count(*)::int, coalesce(max(o.locked_until) - clock_timestamp(), '0')
  FROM (SELECT d.locked_until, d.locked_by FROM {schema}.event_delivery AS d
         WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND d.locked_until > now() - $3::interval
         ORDER BY d.consumer_group, d.locked_until LIMIT $4) AS o
 WHERE NOT starts_with(o.locked_by, $2::text || '/')`

// Others returns how many rows other workers have, counted up to 10,000, and for how long at most if they
// do not renew them.
func (s *Store) Others(ctx context.Context) (rows int, longest time.Duration, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlOthers, s.group, s.worker, s.lease, mostOthers).QueryRow(func(row pgx.Row) error { return row.Scan(&rows, &longest) })
	})
	if err != nil {
		return 0, 0, fmt.Errorf("look for deliveries of other workers: %w", err)
	}
	return rows, longest, nil
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
   SET status = CASE WHEN ` + usedUp + ` THEN 'DEAD' WHEN d.order_key IS NULL THEN 'PENDING' ELSE 'PARKED' END,
       held = $4::bool AND ` + usedUp + `, processed_at = CASE WHEN ` + usedUp + ` THEN clock_timestamp() END,
       put_back = true, locked_by = NULL, locked_until = NULL, next_retry_at = clock_timestamp(), updated_at = clock_timestamp(),
       last_error_code = '` + CodeStale + `', last_error_message = 'worker ' || d.locked_by || ' was gone before it was done'
 WHERE d.id = ANY (ARRAY(SELECT id FROM stale UNION SELECT id FROM run))
RETURNING ` + expiredColumns

// usedUp is the condition that a row becomes DEAD with its last attempt. What came from Kafka has to be sent to a
// dead-letter topic before: whoever claims it next does that.
const usedUp = `(d.attempt_count >= d.max_attempts AND d.record IS NULL)`

// sqlStale reads from when on leases have expired. The next look begins there, whether sqlExpire takes them or not: it
// takes some of many, none that somebody has locked, and while PostgreSQL has just been started, none at all.
const sqlStale = `
SELECT (SELECT d.locked_until FROM {schema}.event_delivery AS d
         WHERE d.consumer_group = $1::text AND d.status = 'PROCESSING' AND d.locked_until >= $2::timestamptz AND d.locked_until < clock_timestamp()
         ORDER BY d.consumer_group, d.locked_until LIMIT 1)`

const expiredColumns = `d.id, d.order_key, d.status, coalesce(d.record_id, d.event_id::text), d.event_type, d.aggregate_type, d.aggregate_id, d.action, d.stream, d.attempt_count,
       d.position, d.record_partition, coalesce(d.partition_key, d.aggregate_id)`

// Expired is a row whose worker is gone.
type Expired struct {
	ID                            int64
	Key                           Key
	Dead                          bool
	EventID, Type, Action, Stream string
	AggregateType, AggregateID    string
	Attempt                       int
	RecordKey                     string
	// Position, FromKafka and Partition are those of a [Delivery].
	Position  int64
	FromKafka bool
	Partition int32
}

// Expire takes rows, at most limit and the others of their keys, from workers whose lease has expired. Those that have used up
// their attempts become dead, and hold their key if hold is set.
func (s *Store) Expire(ctx context.Context, limit int, hold bool) (expired []Expired, err error) {
	tx, err := s.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(ctx) }() // nothing, once it is committed
	var first, second pgx.Batch
	var now time.Time
	var stale pgtype.Timestamptz
	began, since := time.Now(), s.expiring.of(struct{}{})
	first.Queue(settings)
	first.Queue(sqlNow).QueryRow(func(row pgx.Row) error { return row.Scan(&now) })
	first.Queue(s.sqlStale, s.group, since).QueryRow(func(row pgx.Row) error { return row.Scan(&stale) })
	if err := tx.SendBatch(ctx, &first).Close(); err != nil {
		return nil, fmt.Errorf("look for deliveries of workers that are gone: %w", err)
	}
	s.expiring.looked(struct{}{}, since, seenUntil(stale, now), time.Since(began))
	if !stale.Valid { // mostly
		return nil, nil
	}
	second.Queue(s.sqlExpire, s.group, limit, s.lease/2, hold, since).Query(func(rows pgx.Rows) (err error) {
		expired, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Expired, err error) {
			var key pgtype.Int8
			var status string
			var partition pgtype.Int4
			err = row.Scan(&e.ID, &key, &status, &e.EventID, &e.Type, &e.AggregateType, &e.AggregateID, &e.Action, &e.Stream, &e.Attempt, &e.Position, &partition, &e.RecordKey)
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
