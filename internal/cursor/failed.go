package cursor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// How outbox_failed works. An event that Kafka rejects, or that is unavailable while
// others get through, gets a row here, and the cursor passes it. Later events of its
// topic and key are parked behind it without being sent. Of each parking key at most one
// row, the head, is waiting or failed and has a time at which it is due. The other rows
// are parked and become the head one after the other.

// Failure is an event that was not sent, as it enters outbox_failed.
type Failure struct {
	Event  *envelope.Event
	Key    string // parking key
	Status string // statusWaiting, StatusFailed, StatusParked, or StatusDead: of class unreadableRow
	Class  string
	Err    error // nil when parked

	Place    string        // the topic or partition that a waiting event waits for; empty for none
	Wait     time.Duration // before the first retry
	Rejected bool          // by Kafka
	Pending  bool          // the parking counts it as pending
	Held     bool          // dead, and holds its key
}

// UnreadableRow is the error class of an event whose row in outbox or outbox_failed
// PostgreSQL cannot print, see [pg.IsUnreadable]. It is dead at once: it stays as it is
// however often it is read. Its row in outbox_failed has neither payload nor headers, and
// its row in outbox stays until an operator has resolved it or given it a payload.
const UnreadableRow = "unreadable_row"

// sqlMoveFailed is sqlMove with failures: they enter outbox_failed if and only
// if the cursor passes them. When a batch is repeated after a crash, the rows may be
// there already. They are looked up first, as in sqlFailedRowsOf: ON CONFLICT waits for a transaction that is
// changing such a row, of an operator for example.
const sqlMoveFailed = `
WITH newest AS MATERIALIZED (
    SELECT c.id FROM (SELECT id, epoch FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c
     WHERE c.id = $4 AND c.epoch = $11 AND pg_postmaster_start_time() = $10
), lease AS MATERIALIZED (
    SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE
), failed AS (
    INSERT INTO {schema}.outbox_failed
           (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes,
            content_type, topic, partition_key, headers, occurred_at, created_at, size, status, held, error_class, last_error, next_retry_at, place, expires_at)
    SELECT $1::text, o.id, f.key, o.event_id, o.event_type, o.source, o.aggregate_type, o.aggregate_id,
           CASE WHEN f.readable THEN o.payload END, CASE WHEN f.readable THEN o.payload_bytes END,
           o.content_type, o.topic, o.partition_key, CASE WHEN f.readable THEN o.headers END, o.occurred_at, o.created_at,
           CASE WHEN f.readable THEN o.size ELSE 0 END, f.status, f.held, f.class, f.error, now() + f.wait, f.place, o.expires_at
      FROM newest, lease, unnest($15::bigint[], $16::text[], $17::text[], $18::text[], $19::text[], $20::interval[], $21::bool[], $22::bool[],
                                   $23::text[]) AS f (id, key, status, class, error, wait, readable, held, place)
     CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id BETWEEN f.id AND f.id ORDER BY id OFFSET 0) AS o
     WHERE (SELECT there.id FROM {schema}.outbox_failed AS there
             WHERE there.relay = $1::text AND there.outbox_id >= o.id AND there.outbox_id <= o.id AND there.event_id = o.event_id
             ORDER BY there.relay, there.outbox_id, there.event_id LIMIT 1) IS NULL
     ORDER BY o.id
        ON CONFLICT (relay, outbox_id, event_id) DO NOTHING
)
INSERT INTO {schema}.outbox_cursor
       (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch, sent_from, sent_to, sent)
SELECT $1::text, $5::pg_snapshot, $6::pg_snapshot, $7::bigint, $8::bigint, $9::bigint, lease.epoch, $12::bigint, $13::bigint, $14::bytea
  FROM newest, lease
RETURNING id`

// failureArgs are the last parameters of sqlMoveFailed.
func failureArgs(failures []Failure) []any {
	n := len(failures)
	ids, keys, statuses := make([]int64, n), make([]string, n), make([]string, n)
	classes, errs, waits := make([]*string, n), make([]*string, n), make([]time.Duration, n)
	readable, held, places := make([]bool, n), make([]bool, n), make([]string, n)
	for i, f := range failures {
		ids[i], keys[i], statuses[i] = f.Event.ID, f.Key, f.Status
		classes[i], errs[i] = causeOf(f.Class, f.Err)
		waits[i] = f.Wait
		if f.Status == statusWaiting {
			places[i] = f.Place
		}
		readable[i], held[i] = f.Class != UnreadableRow, f.Held
	}
	return []any{ids, keys, statuses, classes, errs, waits, readable, held, places}
}

// causeOf returns error_class and last_error, both NULL without an error.
func causeOf(class string, err error) (errorClass, lastError *string) {
	if err == nil {
		return nil, nil
	}
	text := short.Storable(err.Error(), short.MaxText)
	return &class, &text
}

// sqlReadStored reads the payloads and headers of rows as a whole, without printing them.
const sqlReadStored = `
SELECT pg_catalog.count(pg_catalog.jsonb_typeof(o.payload)), pg_catalog.count(pg_catalog.sha256(o.payload_bytes)),
       pg_catalog.count(pg_catalog.jsonb_typeof(o.headers))
  FROM pg_catalog.unnest($1::bigint[]) AS f (id)
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id BETWEEN f.id AND f.id ORDER BY id OFFSET 0) AS o`

// markDamaged finds the failures whose rows PostgreSQL cannot read, and makes them such that nothing of them is copied.
// It reports whether there are any.
func (c *Store) markDamaged(ctx context.Context, failures []Failure) (found bool) {
	var ids []int64
	for _, f := range failures {
		if f.Class != UnreadableRow {
			ids = append(ids, f.Event.ID)
		}
	}
	err := c.query(ctx, func(rows pgx.Rows) error {
		rows.Close()
		return rows.Err()
	}, c.sqlReadStored, ids)
	switch {
	case !pg.IsUnreadable(err):
		return false
	case len(failures) > 1:
		half := len(failures) / 2
		first, second := c.markDamaged(ctx, failures[:half]), c.markDamaged(ctx, failures[half:])
		return first || second
	}
	f := &failures[0]
	f.Class, f.Err = UnreadableRow, fmt.Errorf("row %d of outbox cannot be copied: %w", f.Event.ID, err)
	return true
}

// Failed reads and changes the rows of one relay in outbox_failed.
type Failed struct {
	db    *pgxpool.Pool
	relay string
	hold  bool // dead events hold their keys
	Most  int  // bytes of an event that is read as a whole; see LargestEvent

	SQLKeys, sqlFreed, SQLPromote, SQLAnyParked, SQLPromoteAll, SQLDeadDue, sqlRetryDead, SQLBadPartitions, SQLDue, SQLAhead, SQLFirst, SQLParked, SQLRead, SQLSave, SQLRowsOf string
}

// NewFailed returns the store of the failed events of a relay. It does no I/O.
func NewFailed(db *pgxpool.Pool, schema, relay string, hold bool) *Failed {
	return &Failed{
		db: db, relay: relay, hold: hold, Most: maxEventBytes,
		SQLKeys:          pg.InSchema(sqlFailedKeys, schema),
		sqlFreed:         pg.InSchema(sqlFailedFreed, schema),
		SQLPromote:       pg.InSchema(sqlFailedPromote, schema),
		SQLAnyParked:     pg.InSchema(sqlFailedAnyParked, schema),
		SQLPromoteAll:    pg.InSchema(sqlFailedPromoteAll, schema),
		SQLDeadDue:       pg.InSchema(sqlFailedDeadDue, schema),
		sqlRetryDead:     pg.InSchema(sqlFailedRetryDead, schema),
		SQLBadPartitions: pg.InSchema(sqlFailedBadPartitions, schema),
		SQLDue:           pg.InSchema(sqlFailedDue, schema),
		SQLAhead:         pg.InSchema(sqlFailedAhead, schema),
		SQLFirst:         pg.InSchema(sqlFailedFirst, schema),
		SQLParked:        pg.InSchema(sqlFailedParked, schema),
		SQLRead:          pg.InSchema(sqlFailedRead, schema),
		SQLSave:          pg.InSchema(sqlFailedSave, schema),
		SQLRowsOf:        pg.InSchema(sqlFailedRowsOf, schema),
	}
}

// query runs a statement that reads rows by an index. If it locks them meanwhile, that needs no fsync.
func (f *Failed) query(ctx context.Context, read func(pgx.Rows) error, sql string, args ...any) error {
	return pg.Query(ctx, f.db, SQLSettings, read, sql, args...)
}

// changeSettings bound how long a change waits for the lease, or for a table that another session has locked. For rows
// of outbox_failed no change waits: it skips those that another transaction has locked, an operator's for example.
const changeSettings = pg.PlannerSettings + `, set_config('lock_timeout', '500ms', true)`

// change runs a statement that changes rows.
func (f *Failed) change(ctx context.Context, read func(pgx.Rows) error, sql string, args ...any) error {
	return pg.Query(ctx, f.db, changeSettings, read, sql, args...)
}

// sqlFailedKeys counts the rows that block their keys, and reads what sqlFailedPromote needs: the first row of each
// key that is not dead, and its heads. It reads a page of rows by an index, so a key may begin on a page and end on
// a later one. Two rows have the same outbox_id if ids were given out twice.
const sqlFailedKeys = `
WITH page AS MATERIALIZED (
    SELECT parking_key, outbox_id, id, status, held FROM {schema}.outbox_failed
     WHERE relay = $1::text AND status IN ('waiting', 'failed', 'parked', 'dead')
       AND (parking_key, outbox_id, id) > ($2::text, $3::bigint, $4::bigint)
     ORDER BY parking_key, outbox_id, id LIMIT $5
)
SELECT parking_key, count(*) FILTER (WHERE status <> 'dead' OR held), bool_or(status = 'dead' AND held),
       coalesce(min(outbox_id) FILTER (WHERE status <> 'dead'), 0),
       count(*) FILTER (WHERE status IN ('waiting', 'failed')),
       coalesce(min(outbox_id) FILTER (WHERE status IN ('waiting', 'failed')), 0),
       coalesce((SELECT outbox_id FROM page OFFSET $5::bigint - 1), 0), coalesce((SELECT id FROM page OFFSET $5::bigint - 1), 0)
  FROM page GROUP BY parking_key ORDER BY parking_key`

// KeyRows is how many rows of a page block a key.
type KeyRows struct {
	Key  string
	Rows int
}

// failedKey is what a page says about a key.
type failedKey struct {
	Key           string
	Rows          int   // that hold it back
	HeldDead      bool  // a dead row does
	First         int64 // outbox_id of its first row that is not dead; 0: none
	Heads         int
	Head          int64 // outbox_id of the first of them; 0: none
	EndID, EndRow int64 // outbox_id and id of the last row of the page, if the page is full
}

// join adds what a later page says.
func (k *failedKey) join(next failedKey) {
	if k.First == 0 {
		k.First = next.First
	}
	if k.Head == 0 {
		k.Head = next.Head
	}
	k.Rows, k.HeldDead, k.Heads = k.Rows+next.Rows, k.HeldDead || next.HeldDead, k.Heads+next.Heads
	k.EndID, k.EndRow = next.EndID, next.EndRow
}

// wrong reports whether a key that no dead event holds has no head, several heads, or a head that is not its first
// row.
func (k *failedKey) wrong() bool {
	return k.Rows > 0 && !k.HeldDead && (k.Heads != 1 || k.Head != k.First)
}

// Of outbox_failed rows are read, not only an index, and there may be very many keys.
const (
	MaxKeyRows = 10_000
	minKeyRows = 100
)

// Keys returns a function that returns the next page of keys, and none after the last page. It writes nothing. Keys
// with a wrong head are added to wrong, unless wrong is nil.
func (f *Failed) Keys(statement lease.StatementContext, wrong *[]string) func(after string) ([]KeyRows, error) {
	last, limit, more := failedKey{}, MaxKeyRows, true
	return func(string) (keys []KeyRows, err error) {
		var page []failedKey
		for more {
			page, err = f.keysPage(statement, last, limit)
			if !pg.IsCancelled(err) || limit <= minKeyRows {
				break
			}
			limit /= 2 // it took too long
		}
		if err != nil {
			return nil, fmt.Errorf("read parked keys: %w", err)
		}
		more = len(page) > 0 && page[0].EndRow > 0
		for _, k := range append(page, failedKey{}) {
			switch {
			case k.Key == "" && more: // the last key may go on
			case k.Key == last.Key:
				last.join(k)
			default:
				if wrong != nil && last.wrong() {
					*wrong = append(*wrong, last.Key)
				}
				last = k
			}
			if k.Key != "" {
				keys = append(keys, KeyRows{k.Key, k.Rows})
			}
		}
		return keys, nil
	}
}

// keysPage reads the page after a key.
func (f *Failed) keysPage(statement lease.StatementContext, after failedKey, limit int) (page []failedKey, err error) {
	ctx, cancel := statement()
	defer cancel()
	err = f.query(ctx, func(rows pgx.Rows) (err error) {
		page, err = pgx.CollectRows(rows, pgx.RowToStructByPos[failedKey])
		return err
	}, f.SQLKeys, f.relay, after.Key, after.EndID, after.EndRow, limit)
	return page, err
}

// sqlFailedFreed finds keys of rows that operators have resolved within the last $2, through this package or in SQL.
const sqlFailedFreed = `
SELECT DISTINCT parking_key FROM {schema}.outbox_failed
 WHERE relay = $1::text AND status = 'resolved' AND (coalesce(resolution, '') NOT IN ('sent', 'expired') OR resolved_by IS NOT NULL)
   AND (resolved_at > now() - $2::interval OR resolved_at IS NULL) AND parking_key > $3
 ORDER BY parking_key LIMIT $4`

// Freed returns a function that returns the next page of keys of which operators have resolved rows within a time,
// and none after the last page.
func (f *Failed) Freed(statement lease.StatementContext, since time.Duration) func() ([]KeyRows, error) {
	last := ""
	return func() (keys []KeyRows, err error) {
		ctx, cancel := statement()
		defer cancel()
		err = f.query(ctx, func(rows pgx.Rows) (err error) {
			_, err = pgx.ForEachRow(rows, []any{&last}, func() error {
				keys = append(keys, KeyRows{last, 1})
				return nil
			})
			return err
		}, f.sqlFreed, f.relay, since, last, MaxKeyRows)
		if err != nil {
			return nil, fmt.Errorf("read keys of resolved events: %w", err)
		}
		return keys, nil
	}
}

// sqlFailedPromote makes the first row of each key its head, if the key has no head or a wrong one.
// The old head was sent, is dead and does not hold its key, or was resolved by an operator; or an
// operator has put a dead event back in front of it. The statement changes at most $5 rows. It
// looks up rows by indexes, because a key may have a million. If ids restarted, two rows of a key
// may have the same id: a resolved or dead row stays so. If the statement asked for the statuses
// that a head may have, the planner might scan all rows of an index for these statuses. A key of
// which another transaction has locked such a row stays as it is: with a part of its rows changed,
// it could have two heads.
const sqlFailedPromote = `
WITH keys AS MATERIALIZED (
    SELECT k.key, first.id, first.outbox_id, first.status
      FROM pg_catalog.unnest($4::text[]) AS k (key)
     CROSS JOIN LATERAL (SELECT id, outbox_id, status FROM {schema}.outbox_failed
                          WHERE relay = $1::text AND parking_key >= k.key AND parking_key <= k.key AND status IN ('waiting', 'failed', 'parked')
                          ORDER BY relay, parking_key, outbox_id LIMIT 1) AS first
     WHERE (SELECT id FROM {schema}.outbox_failed
             WHERE relay = $1::text AND parking_key >= k.key AND parking_key <= k.key AND status = 'dead' AND held
             ORDER BY relay, parking_key, status LIMIT 1) IS NULL
), wrong AS MATERIALIZED (
    SELECT key, id FROM keys WHERE status = 'parked'
     UNION ALL
    SELECT keys.key, head.id FROM keys
     CROSS JOIN LATERAL (SELECT id FROM {schema}.outbox_failed
                          WHERE relay = $1::text AND parking_key >= keys.key AND parking_key <= keys.key AND status IN ('waiting', 'failed')
                            AND id <> keys.id
                          ORDER BY relay, parking_key, outbox_id LIMIT $5) AS head
     LIMIT $5
), free AS MATERIALIZED (
    SELECT f.id FROM {schema}.outbox_failed AS f
     WHERE f.id = ANY (ARRAY(SELECT id FROM wrong)) AND f.status <> ALL ('{dead,resolved}') FOR UPDATE SKIP LOCKED
), changed AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = CASE f.status WHEN 'parked' THEN 'waiting' ELSE 'parked' END, place = '', next_retry_at = now()
     WHERE f.id = ANY (ARRAY(SELECT id FROM wrong WHERE key NOT IN (SELECT key FROM wrong WHERE id NOT IN (SELECT id FROM free))))
       AND EXISTS (SELECT FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE)
 RETURNING f.id
)
SELECT (SELECT count(*) FROM wrong), (SELECT count(*) FROM changed)`

// maxPromoted bounds the keys and the rows of a statement.
const maxPromoted = 500

// Promote makes the first row of each of these keys its head. No head may be on its way to
// Kafka meanwhile. It returns how many rows it has left as they are, because another transaction has locked them.
func (f *Failed) Promote(stop context.Context, statement lease.StatementContext, l *lease.Lease, keys []string) (left int, err error) {
	for some := range slices.Chunk(keys, maxPromoted) {
		n, err := f.promoteSome(stop, statement, f.SQLPromote, f.relay, l.Holder, l.Epoch, some, maxPromoted)
		if left += n; err != nil {
			return left, err
		}
	}
	return left, nil
}

// promoteSome repeats a statement until it has changed fewer rows than it may change, or stop
// ends. It returns how many rows the last one has found and not changed.
func (f *Failed) promoteSome(stop context.Context, statement lease.StatementContext, sql string, args ...any) (left int, err error) {
	for changed := maxPromoted; changed == maxPromoted && stop.Err() == nil; {
		var found int
		ctx, cancel := statement()
		err := f.change(ctx, func(rows pgx.Rows) error {
			_, err := pgx.ForEachRow(rows, []any{&found, &changed}, func() error { return nil })
			return err
		}, sql, args...)
		cancel()
		if err != nil {
			return 0, fmt.Errorf("promote parked events: %w", err)
		}
		left = found - changed
	}
	return left, nil
}

// sqlFailedAnyParked precedes sqlFailedPromoteAll, because an idle relay must write
// nothing, and proving the lease locks a row. PostgreSQL ignores ORDER BY in EXISTS.
const sqlFailedAnyParked = `
SELECT (SELECT id FROM {schema}.outbox_failed
         WHERE relay = $1::text AND status = 'parked' ORDER BY event_type, error_class, failed_at LIMIT 1) IS NOT NULL`

// sqlFailedPromoteAll makes a head of rows that do not have to wait behind another,
// because failed events hold back no others: an operator or a dead event's class had them
// parked, or the relay ran without PassFailedKeys before.
const sqlFailedPromoteAll = `
WITH free AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE relay = $1::text AND status = 'parked' ORDER BY event_type, error_class, failed_at LIMIT $4 FOR UPDATE SKIP LOCKED
), changed AS (
    UPDATE {schema}.outbox_failed
       SET status = 'waiting', place = '', next_retry_at = now()
     WHERE id = ANY (ARRAY(SELECT id FROM free))
       AND EXISTS (SELECT FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE)
 RETURNING id
)
SELECT (SELECT count(*) FROM free), (SELECT count(*) FROM changed)`

// PromoteAll makes every parked row a head that no other transaction has locked.
func (f *Failed) PromoteAll(stop context.Context, statement lease.StatementContext, l *lease.Lease) error {
	ctx, cancel := statement()
	defer cancel()
	var parked bool
	err := f.query(ctx, func(rows pgx.Rows) (err error) {
		parked, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		return err
	}, f.SQLAnyParked, f.relay)
	if err != nil {
		return fmt.Errorf("promote parked events: %w", err)
	}
	if !parked {
		return nil
	}
	_, err = f.promoteSome(stop, statement, f.SQLPromoteAll, f.relay, l.Holder, l.Epoch, maxPromoted)
	return err
}

// sqlFailedDeadDue finds dead events whose class is tried again after a time. It is a
// statement of its own because an idle relay must write nothing, and proving the lease locks a row. Asked for
// "error_class = policy.class", the planner may scan the index that has the dead of all classes in the order of
// time. What an operator holds is left out; if each dead event holds its key, $4, that is not known.
const sqlFailedDeadDue = `
SELECT due.id, due.outbox_id, due.event_id::text
  FROM unnest($2::text[], $3::interval[]) AS policy (class, wait)
 CROSS JOIN LATERAL (SELECT id, outbox_id, event_id, next_retry_at` + deadOfClass + ` LIMIT 500) AS due
 WHERE (SELECT next_retry_at` + deadOfClass + ` LIMIT 1) <= now() - policy.wait AND due.next_retry_at <= now() - policy.wait
 LIMIT 500`

const deadOfClass = ` FROM {schema}.outbox_failed
                      WHERE relay = $1::text AND error_class >= policy.class AND error_class <= policy.class
                        AND status = 'dead' AND (NOT held OR $4::bool) AND (pg_catalog.num_nonnulls(payload, payload_bytes) > 0 OR error_class IS DISTINCT FROM 'unreadable_row')
                      ORDER BY error_class, next_retry_at`

// sqlFailedRetryDead parks dead rows that were found. A row is that of its event alone, see sqlFailedSave.
const sqlFailedRetryDead = `
WITH chosen AS MATERIALIZED (
    SELECT v.id FROM unnest($4::bigint[], $5::bigint[], $6::uuid[]) AS v (id, outbox_id, event_id)
     CROSS JOIN LATERAL (SELECT` + rowOfEvent + ` AND f.status = 'dead' AND (NOT f.held OR $7::bool) ORDER BY f.id FOR UPDATE SKIP LOCKED) AS f
), changed AS (
    UPDATE {schema}.outbox_failed AS f
       SET status = 'parked', retry_count = 0, held = false, next_retry_at = now()
     WHERE id = ANY (ARRAY(SELECT id FROM chosen))
       AND EXISTS (SELECT FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE)
 RETURNING f.*
)
INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
SELECT 'relay ' || pg_catalog.left(relay, 94), 'retry', 'revived: ' || error_class::text, relay, parking_key, id, outbox_id, event_id FROM changed`

// RetryDead parks dead events again, so that they are retried, when the time after their
// death that after holds for their class has passed.
func (f *Failed) RetryDead(ctx context.Context, l *lease.Lease, after map[string]time.Duration) error {
	if len(after) == 0 {
		return nil
	}
	var classes []string
	var waits []time.Duration
	for class, wait := range after {
		classes, waits = append(classes, class), append(waits, wait)
	}
	var rowIDs, ids []int64
	var eventIDs []string
	err := f.query(ctx, func(rows pgx.Rows) error {
		var row, id int64
		var eventID string
		_, err := pgx.ForEachRow(rows, []any{&row, &id, &eventID}, func() error {
			rowIDs, ids, eventIDs = append(rowIDs, row), append(ids, id), append(eventIDs, eventID)
			return nil
		})
		return err
	}, f.SQLDeadDue, f.relay, classes, waits, f.hold)
	if err == nil && len(rowIDs) > 0 {
		err = f.change(ctx, func(rows pgx.Rows) error {
			rows.Close()
			return rows.Err()
		}, f.sqlRetryDead, f.relay, l.Holder, l.Epoch, rowIDs, ids, eventIDs, f.hold)
	}
	if err != nil {
		return fmt.Errorf("retry dead events: %w", err)
	}
	return nil
}

const (
	statusWaiting  = "waiting"
	statusResolved = "resolved"
)
