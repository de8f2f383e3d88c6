package cursor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// FailedRow is a row of outbox_failed on its way to Kafka.
type FailedRow struct {
	envelope.Event        // its id is outbox.id
	Row            int64  // outbox_failed.id
	Key            string // parking key
	Place          string // the topic or partition that it waits for; empty for none
	Retries        int
	Due            pgtype.Timestamptz // next_retry_at
	held           bool
	Size           int   // bytes of payload and headers, as the row says
	Unreadable     error // why payload and headers could not be read; they are missing then
}

// failedHead are the columns by which an event to retry is found, in the order of find.
const failedHead = `e.id, e.outbox_id, e.event_id::text, e.parking_key, e.place, e.retry_count, e.next_retry_at, e.held, e.size`

// failedParked are the same for an event behind heads that were sent. If the session has written another head since,
// that one is sent when it is due, and holds back the events behind it like an event that an operator holds.
const failedParked = `e.id, e.outbox_id, e.event_id::text, e.parking_key, e.place, e.retry_count, e.next_retry_at,
       e.held OR e.status = 'failed' OR e.place <> '', e.size`

// sqlFailedBadPartitions returns the topics and partitions that heads wait for, and the error of one head of each.
const sqlFailedBadPartitions = `
WITH RECURSIVE names AS (
   (SELECT place FROM {schema}.outbox_failed
     WHERE relay = $1::text AND status IN ('waiting', 'failed') ORDER BY relay, place LIMIT 1)
     UNION ALL
    SELECT (SELECT f.place FROM {schema}.outbox_failed AS f
             WHERE f.relay = $1::text AND f.status IN ('waiting', 'failed') AND f.place > names.place ORDER BY f.relay, f.place LIMIT 1)
      FROM names WHERE names.place IS NOT NULL
)
SELECT names.place, coalesce(head.error_class, ''), coalesce(head.last_error, '')
  FROM names
 CROSS JOIN LATERAL (SELECT f.error_class, f.last_error FROM {schema}.outbox_failed AS f
                      WHERE f.relay = $1::text AND f.place = names.place AND f.status IN ('waiting', 'failed')
                      ORDER BY f.next_retry_at, f.outbox_id LIMIT 1) AS head
 WHERE names.place IS NOT NULL`

// sqlFailedDue finds heads that wait for one topic or partition, those that are due or, if $3, all, and those that
// have been due longest first. In the order of the events' age, heads that fail again and
// again would keep out the others. It leaves out the keys $5, and heads that another transaction has locked: an
// operator may be resolving them.
const sqlFailedDue = `
SELECT ` + failedHead + `
  FROM {schema}.outbox_failed AS e
 WHERE e.relay = $1::text AND e.place = $2::text AND e.status IN ('waiting', 'failed') AND NOT e.held
   AND e.next_retry_at >= $6::timestamptz AND e.next_retry_at <= CASE WHEN $3::bool THEN 'infinity' ELSE now() END
   AND e.parking_key NOT IN (SELECT pg_catalog.unnest($5::text[]))
 ORDER BY e.next_retry_at, e.outbox_id LIMIT $4::int FOR UPDATE SKIP LOCKED`

// sqlFailedAhead finds heads that wait for nothing and are due later than after the longest wait, $2: the clock of the
// database was set back since.
const sqlFailedAhead = `
SELECT ` + failedHead + `
  FROM {schema}.outbox_failed AS e
 WHERE e.relay = $1::text AND e.place = '' AND e.status IN ('waiting', 'failed') AND NOT e.held
   AND e.next_retry_at > now() + $2::interval AND e.parking_key NOT IN (SELECT pg_catalog.unnest($4::text[]))
 ORDER BY e.next_retry_at, e.outbox_id LIMIT $3::int FOR UPDATE SKIP LOCKED`

// sqlFailedFirst finds, for each of some topics and partitions, the head that has waited longest. It leaves out the
// keys $3, and heads that another transaction has locked.
const sqlFailedFirst = `
SELECT ` + failedHead + `
  FROM pg_catalog.unnest($2::text[]) AS bad (place)
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox_failed AS f
                      WHERE f.relay = $1::text AND f.place = bad.place AND f.status IN ('waiting', 'failed') AND NOT f.held
                        AND f.parking_key NOT IN (SELECT pg_catalog.unnest($3::text[]))
                      ORDER BY f.next_retry_at, f.outbox_id LIMIT 1 FOR UPDATE SKIP LOCKED) AS e`

// sqlFailedParked finds the events that are parked behind heads that were sent, at most $3
// of each key, and $4 together. It cuts by the ids of events, so of each key the first ones
// are left. Asked for "parking_key = key", the planner may scan the unique index in the
// order of ids instead, through the rows of all keys. It looks at a key from its first row on, although beside an old
// snapshot the index still has those that were sent: meanwhile a lower id may have been parked, in front of a higher
// one of its transaction.
const sqlFailedParked = `
SELECT ` + failedParked + `
  FROM pg_catalog.unnest($2::text[]) AS sent (key)
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox_failed
                      WHERE relay = $1::text AND parking_key >= sent.key AND parking_key <= sent.key AND status IN ('waiting', 'failed', 'parked', 'dead')
                        AND (status <> 'dead' OR held)
                      ORDER BY relay, parking_key, outbox_id LIMIT $3::int) AS e
 ORDER BY e.outbox_id LIMIT $4::int`

// BadPartition is a topic or a partition that accepts nothing.
type BadPartition struct {
	Name  string // topic, or topic/number
	Class string // of the error
	Err   error
}

// BadPartitions returns the topics and partitions that heads wait for, with an empty name for heads that wait for
// none.
func (f *Failed) BadPartitions(ctx context.Context) (all []BadPartition, err error) {
	err = f.query(ctx, func(rows pgx.Rows) error {
		var name, class, cause string
		_, err := pgx.ForEachRow(rows, []any{&name, &class, &cause}, func() error {
			all = append(all, BadPartition{Name: name, Class: class, Err: errors.New(cause)})
			return nil
		})
		return err
	}, f.SQLBadPartitions, f.relay)
	if err != nil {
		return nil, fmt.Errorf("read what failed events wait for: %w", err)
	}
	return all, nil
}

// maxFound is how many events to retry are found at once.
const maxFound = 500

// Due returns heads that wait for a topic or partition, or for none: all, or those that are due. It skips the heads of
// some keys, and those that another transaction has locked. It begins with the heads that were due at a time; if that
// is NULL, with the first one.
func (f *Failed) Due(ctx context.Context, place string, all bool, from pgtype.Timestamptz, skip []string) ([]FailedRow, error) {
	if !from.Valid {
		from = pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	}
	return f.find(ctx, f.SQLDue, f.relay, place, all, maxFound, skip, from)
}

// Ahead returns heads that wait for nothing in particular, but longer than the longest wait.
func (f *Failed) Ahead(ctx context.Context, longest time.Duration, skip []string) ([]FailedRow, error) {
	return f.find(ctx, f.SQLAhead, f.relay, longest, maxFound, skip)
}

// First returns one head for each topic or partition that a head waits for. It skips the heads of some keys.
func (f *Failed) First(ctx context.Context, places, skip []string) ([]FailedRow, error) {
	return f.find(ctx, f.SQLFirst, f.relay, places, skip)
}

// Parked returns events of keys, in order, of each key up to one that an operator holds or that is retried when it is
// due.
func (f *Failed) Parked(ctx context.Context, keys []string) ([]FailedRow, error) {
	found, err := f.find(ctx, f.SQLParked, f.relay, keys, 1+maxFound/len(keys), maxFound)
	held := map[string]bool{}
	return slices.DeleteFunc(found, func(e FailedRow) bool {
		held[e.Key] = held[e.Key] || e.held
		return held[e.Key]
	}), err
}

// sqlFailedRowsOf finds the rows of some events, by the unique index. With equations, ORDER BY would not name that
// index.
const sqlFailedRowsOf = `
SELECT e.id, e.parking_key, e.place, e.outbox_id, e.event_id::text
  FROM unnest($2::bigint[], $3::uuid[]) AS event (outbox_id, id)
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox_failed AS f
                      WHERE f.relay = $1::text AND f.outbox_id >= event.outbox_id AND f.outbox_id <= event.outbox_id AND f.event_id = event.id
                        AND f.status <> 'resolved'
                      ORDER BY f.relay, f.outbox_id, f.event_id LIMIT 1) AS e`

// RowsOf returns the rows of events, by their ids in outbox and their event ids, with nothing but these, their keys and
// their places.
func (f *Failed) RowsOf(ctx context.Context, ids []int64, eventIDs []string) (found []FailedRow, err error) {
	err = f.query(ctx, func(rows pgx.Rows) (err error) {
		found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e FailedRow, err error) {
			err = row.Scan(&e.Row, &e.Key, &e.Place, &e.ID, &e.EventID)
			return e, err
		})
		return err
	}, f.SQLRowsOf, f.relay, ids, eventIDs)
	if err != nil {
		return nil, fmt.Errorf("find the rows of events: %w", err)
	}
	return found, nil
}

// find returns the events that a statement finds, of their envelopes only the ids; see ReadRows.
func (f *Failed) find(ctx context.Context, sql string, args ...any) (found []FailedRow, err error) {
	err = f.query(ctx, func(rows pgx.Rows) (err error) {
		found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e FailedRow, err error) {
			err = row.Scan(&e.Row, &e.ID, &e.EventID, &e.Key, &e.Place, &e.Retries, &e.Due, &e.held, &e.Size)
			return e, err
		})
		return err
	}, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("find events to retry: %w", err)
	}
	return found, nil
}

// MaxRetryBytes bounds the events that are read at once to be retried.
const MaxRetryBytes = 4 << 20

// Fitting returns how many events from the start have at most MaxRetryBytes together, but
// at least one.
func Fitting(events []FailedRow) int {
	left := MaxRetryBytes
	for n, e := range events {
		if left -= e.Size; left < 0 {
			return max(n, 1)
		}
	}
	return len(events)
}

// sqlFailedRead reads the events of rows in the order of $1, payload and headers only if $2
// is set. The second column says that the event could not be read, so it was not copied as a whole. A row is that of
// its event alone, see sqlFailedSave.
const sqlFailedRead = `
SELECT r.n, e.unreadable, e.id, ` + envelopeColumns + `
  FROM unnest($1::bigint[], $4::bigint[], $5::uuid[]) WITH ORDINALITY AS r (id, outbox_id, event_id, n)
 CROSS JOIN LATERAL (
       SELECT relay, outbox_id AS id, event_id, event_type, source, aggregate_type, aggregate_id,
              CASE WHEN $2::bool THEN payload END AS payload, CASE WHEN $2 THEN payload_bytes END AS payload_bytes,
              content_type, topic, partition_key, CASE WHEN $2 THEN headers END AS headers, occurred_at, created_at, expires_at,
              error_class IS NOT DISTINCT FROM '` + UnreadableRow + `' AND pg_catalog.num_nonnulls(payload, payload_bytes, headers) = 0 AS unreadable
         FROM {schema}.outbox_failed
        WHERE id BETWEEN r.id AND r.id AND status <> 'resolved' ORDER BY id OFFSET 0) AS e
 WHERE e.relay = $3::text AND e.id = r.outbox_id AND e.event_id = r.event_id`

// ErrNoPayload means that the row of an unreadable event is retried as it is.
var ErrNoPayload = errors.New("the row has neither payload nor payload_bytes")

// ReadRows reads the envelopes of events that were found, in their order, and payload and
// headers only if payload is set. With an error it returns the events in front of it. Events
// that were resolved meanwhile are left out.
func (f *Failed) ReadRows(ctx context.Context, found []FailedRow, payload bool) (events []FailedRow, err error) {
	rowIDs, ids, eventIDs := make([]int64, len(found)), make([]int64, len(found)), make([]string, len(found))
	for i := range found {
		rowIDs[i], ids[i], eventIDs[i] = found[i].Row, found[i].ID, string(found[i].EventID)
	}
	err = f.query(ctx, func(rows pgx.Rows) error {
		var r eventReader
		for rows.Next() {
			r.describe(rows, 2)
			raw := rows.RawValues()
			var n int
			var bare bool
			for i, into := range []any{&n, &bare} {
				if err := scanValue(r.types, rows.FieldDescriptions()[i], raw[i], into); err != nil {
					return err
				}
			}
			e := found[n-1]
			if e.Event, err = r.event(raw[2:]); err != nil {
				return err
			}
			if payload && (bare || e.Payload == nil && !e.IsTombstone()) {
				return ErrNoPayload
			}
			events = append(events, e)
		}
		return rows.Err()
	}, f.SQLRead, rowIDs, payload, f.relay, ids, eventIDs)
	if err != nil {
		return events, fmt.Errorf("read events to retry: %w", err)
	}
	return events, nil
}

// RetryResult is the result of a retry, as it is saved.
type RetryResult struct {
	Event  *FailedRow // with the ids of its event
	Row    int64      // outbox_failed.id
	Status string     // StatusResolved: it was sent, or has expired
	Class  string
	Err    error
	Place  string        // the topic or partition that it waits for, if its status is StatusWaiting
	Count  int           // 1 if the retry counts, behind Event.Retries
	Wait   time.Duration // until the next one

	// The partition to which it was sent, with its offset there and the time of its record. Below 0, the partition is
	// not known, and the row is removed like one that is not kept.
	Partition int32
	Offset    int64
	SentAt    time.Time
	Expired   bool // the event was not sent
}

// sqlFailedSave saves the results of retries. It returns the keys that have lost their head, because
// it was sent, or is dead and does not hold the key, and that still have a row. Rows are looked up by
// arrays of ids, and keys one by one: where the planner has no statistics of the table, or those of
// an empty one, it would read the whole table for a join. A row that an operator has
// resolved meanwhile stays as it is. The statement waits for no row that another transaction has locked. It looks for
// the rows that a key still has from its end, because beside an old snapshot the index still has those that were sent.
// A result belongs to a row of its event alone: the rows are not flushed at once, so a crash may lose some, and their
// ids are given out again.
// Without a time at which it was sent, a resolved event has expired. Its row stays, because Kafka does not have it.
// A count includes the retries before, so a retry counts once although a save of unknown outcome is repeated.
const sqlFailedSave = `
WITH lease AS MATERIALIZED (
    SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE
), v AS MATERIALIZED (
    SELECT v.* FROM lease, unnest($4::bigint[], $5::text[], $6::text[], $7::text[], $8::int[], $9::interval[], $12::text[],
                                       $13::int[], $14::bigint[], $15::timestamptz[], $16::bigint[], $17::uuid[])
                        AS v (id, status, class, error, count, wait, place, sent_partition, sent_offset, sent_at, outbox_id, event_id)
), free AS MATERIALIZED (
    SELECT v.* FROM v CROSS JOIN LATERAL (SELECT` + rowOfEvent + ` AND f.status <> 'resolved' ORDER BY f.id FOR UPDATE SKIP LOCKED) AS f
), gone AS (
    DELETE FROM {schema}.outbox_failed AS f
     WHERE f.id = ANY (ARRAY(SELECT id FROM free WHERE status = 'resolved' AND (NOT $11::bool OR sent_partition IS NULL) AND sent_at IS NOT NULL))
 RETURNING f.id, f.parking_key
), kept AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = v.status, place = v.place, held = f.held OR v.status = 'dead' AND $10::bool,
           retry_count = greatest(f.retry_count, least(f.retry_count + 1, v.count)), next_retry_at = now() + v.wait,
           last_error = coalesce(v.error, f.last_error), error_class = coalesce(v.class, f.error_class),
           resolved_at = CASE v.status WHEN 'resolved' THEN now() END,
           resolution = CASE v.status WHEN 'resolved' THEN CASE WHEN v.sent_at IS NULL THEN 'expired' ELSE 'sent' END END,
           sent_partition = v.sent_partition, sent_offset = v.sent_offset, sent_at = v.sent_at
      FROM free AS v
     WHERE f.id = v.id AND f.id = ANY (ARRAY(SELECT id FROM free WHERE status <> 'resolved' OR $11::bool AND sent_partition IS NOT NULL OR sent_at IS NULL))
 RETURNING f.id, f.parking_key, f.status, f.held
), saved AS (
    SELECT id FROM gone UNION ALL SELECT id FROM kept
), headless AS (
    SELECT lost.parking_key
      FROM (SELECT parking_key FROM gone
             UNION SELECT parking_key FROM kept WHERE status = 'resolved' OR status = 'dead' AND NOT held
            EXCEPT SELECT parking_key FROM kept WHERE status IN ('waiting', 'failed') OR status = 'dead' AND held) AS lost
     CROSS JOIN LATERAL (
           SELECT FROM {schema}.outbox_failed AS f
            WHERE f.relay = $1::text AND f.parking_key >= lost.parking_key AND f.parking_key <= lost.parking_key
              AND f.status = 'parked' AND f.id NOT IN (SELECT id FROM v)
            ORDER BY f.relay DESC, f.parking_key DESC, f.outbox_id DESC LIMIT 1) AS next_head
)
SELECT count(*), ARRAY(SELECT parking_key FROM headless), ARRAY(SELECT id FROM saved),
       ARRAY(SELECT v.id FROM v CROSS JOIN LATERAL (SELECT` + rowOfEvent + ` AND f.status <> 'resolved' ORDER BY f.id OFFSET 0) AS f
              WHERE v.id NOT IN (SELECT id FROM saved))
  FROM lease`

// rowOfEvent finds the row v of an event by its id alone: a join could compare each row with each v.
const rowOfEvent = ` FROM {schema}.outbox_failed AS f
                      WHERE f.id BETWEEN v.id AND v.id AND f.relay = $1::text AND f.outbox_id = v.outbox_id AND f.event_id = v.event_id`

// Saved is what [Failed.SaveResults] has done. Rows that are in neither list were resolved by an operator, saved by an
// earlier call whose outcome is unknown, or lost in a crash.
type Saved struct {
	Rows     []int64  // whose results are saved
	Locked   []int64  // whose results are not, because another transaction has locked the row
	Headless []string // keys that have lost their head and still have rows
}

// SaveResults saves the results of retries, except for those of locked rows. The caller holds the lock of the parking:
// otherwise an event could be parked behind a head that is just being removed, and its key would have no head until
// reconcile finds it. The caller promotes the next row of keys without a head.
func (f *Failed) SaveResults(ctx context.Context, l *lease.Lease, results []RetryResult, keep bool) (Saved, error) {
	return f.saveIn(ctx, f.db, l, results, keep)
}

func (f *Failed) saveIn(ctx context.Context, db pg.BatchSender, l *lease.Lease, results []RetryResult, keep bool) (saved Saved, err error) {
	n := len(results)
	rows, statuses, classes, errs := make([]int64, n), make([]string, n), make([]*string, n), make([]*string, n)
	counts, waits, places := make([]int, n), make([]time.Duration, n), make([]string, n)
	partitions, offsets, sentAt := make([]*int32, n), make([]*int64, n), make([]*time.Time, n)
	ids, eventIDs := make([]int64, n), make([]string, n)
	for i := range results {
		v := &results[i]
		if v.Status == statusResolved && !v.Expired {
			sentAt[i] = &v.SentAt
			if v.Partition >= 0 {
				partitions[i] = &v.Partition
			}
			if v.Offset >= 0 {
				offsets[i] = &v.Offset
			}
		}
		rows[i], ids[i], eventIDs[i] = v.Row, v.Event.ID, string(v.Event.EventID)
		statuses[i], waits[i], places[i] = v.Status, v.Wait, v.Place
		if v.Count > 0 {
			counts[i] = v.Event.Retries + v.Count
		}
		classes[i], errs[i] = causeOf(v.Class, v.Err)
	}
	var proven int
	err = pg.Query(ctx, db, changeSettings, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&proven, &saved.Headless, &saved.Rows, &saved.Locked}, func() error { return nil })
		return err
	}, f.SQLSave, f.relay, l.Holder, l.Epoch, rows, statuses, classes, errs, counts, waits, f.hold, keep, places,
		partitions, offsets, sentAt, ids, eventIDs)
	if err != nil {
		return Saved{}, fmt.Errorf("save retries: %w", err)
	}
	if proven == 0 {
		return Saved{}, lease.ErrLeaseLost
	}
	return saved, nil
}
