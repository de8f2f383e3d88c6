package worker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/relay"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// A group of workers has a cursor as a relay has, see cursor.go. What it sends is rows of
// event_delivery, in the transaction that moves the cursor, so each event enters once. No
// process leads: whoever has free handlers locks the group for this transaction.
//
// The lock must be had before the statement that looks for events, and that statement must be
// the first that takes a transaction id: then no transaction that its snapshot calls finished
// has a higher one, and a crash cannot give such an id out again. So the lock is an advisory
// one, and the transaction records nothing else.
//
// A row of the cursor is known by its id and its epoch. Here an epoch is a random number: the
// group has no lease that would give it one.

// fanOut reads the events behind the cursor of a group, and makes deliveries of them. It belongs
// to one goroutine.
type fanOut struct {
	db      *pgxpool.Pool
	group   string
	cursors *cursor.Store
	store   *delivery.Store
	plan    func(e eventHead) []delivery.New // what is owed for an event
	own     []string                         // routes of this process
	routes  groupRoutes
	lock    int64
	bare    bool  // a row could not be printed: the next ones are read without their payload
	budget  int64 // of the round under way, in bytes

	pos     cursor.Position
	known   bool           // pos is what was read or written last
	unpaged cursor.Unpaged // of the open window
	ids     cursor.IDSet   // of the open window

	sqlSubscription, sqlSubscribe, sqlRoutes, sqlSeed, sqlOpen, sqlNext, sqlLeaveGroup, sqlForget string
}

// eventHead is what routes an event.
type eventHead struct {
	id                               int64
	eventType, topic, key, aggregate string
}

// destination returns the topic, see [stored.destination].
func (e eventHead) destination() (string, error) {
	if e.topic != "" {
		return e.topic, nil
	}
	if !check.HasTopic(e.eventType) {
		return "", &envelope.FieldError{EventType: e.eventType, Index: -1, Field: "event_type", Err: check.ErrMalformed}
	}
	return check.TopicOf(e.eventType), nil
}

func (e eventHead) recordKey() string { return cmp.Or(e.key, e.aggregate) }

func newFanOut(db *pgxpool.Pool, schema, group string, own []string, store *delivery.Store, plan func(eventHead) []delivery.New) *fanOut {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &fanOut{
		db: db, group: group, cursors: cursor.NewStore(db, schema, tables.WorkerPrefix+group), store: store, plan: plan, own: own, lock: fanOutLock(schema, group),
		sqlSubscription: in(sqlSubscription), sqlSubscribe: in(sqlSubscribe), sqlRoutes: in(sqlRoutes), sqlSeed: in(sqlSeedGroup), sqlOpen: in(sqlFanOut), sqlNext: in(sqlFanOutNext),
		sqlLeaveGroup: in(sqlLeaveGroup), sqlForget: in(sqlForget),
	}
}

// fanOutLock is the advisory lock of a group.
func fanOutLock(schema, group string) int64 {
	sum := sha256.Sum256([]byte("outbox.event_subscription." + schema + "." + group))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// A round of fan-out makes deliveries of at most so many events, of so many bytes together by
// what their rows say.
const (
	maxFanOut      = 1000
	maxFanOutBytes = 16 << 20
)

// sqlFanOutSettings end the transaction of a process that is stopped while it has the lock. The
// commit need not be on disk: what a crash forgets, it forgets with all that came after it.
const sqlFanOutSettings = cursor.SQLSettings + `, set_config('lock_timeout', '10s', true), set_config('idle_in_transaction_session_timeout', '10s', true)`

const (
	sqlFanOutLock   = `SELECT pg_advisory_xact_lock($1)`
	sqlSubscription = `
SELECT (SELECT state FROM {schema}.event_subscription WHERE consumer_group = $1::text)`
)

// sqlSeedGroup inserts the first position of a group: in front of every transaction, or behind all
// that have ended.
const sqlSeedGroup = `
INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
SELECT $1::text, 0, CASE WHEN $2::bool THEN '1:1:' ELSE pg_current_snapshot() END,
       CASE WHEN $2::bool THEN 0 ELSE coalesce((SELECT id FROM {schema}.outbox ORDER BY id DESC LIMIT 1), 0) END, s.system_identifier, $3
  FROM pg_control_system() AS s
 WHERE NOT EXISTS (SELECT FROM {schema}.outbox_cursor WHERE relay = $1::text)`

// begin makes sure that the group has a position: a new one begins behind what there is, or in front
// of it. A group whose position was lost begins in front, because no event may be skipped: what it
// has handled is noted.
func (f *fanOut) begin(ctx context.Context, fromStart bool) error {
	return f.transact(ctx, func(conn *pgx.Conn) error {
		var state pgtype.Text
		if err := conn.QueryRow(ctx, f.sqlSubscription, f.group).Scan(&state); err != nil {
			return err
		}
		if state.Valid && !getsEvents(state.String) {
			return errMoved
		}
		if _, err := conn.Exec(ctx, f.sqlSeed, f.cursors.Relay, fromStart || state.Valid, newEpoch()); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, f.sqlSubscribe, f.group, f.own, routeLife)
		return err
	})
}

// confirm says that this process still takes what it took.
func (f *fanOut) confirm(ctx context.Context) error {
	_, err := f.db.Exec(ctx, f.sqlSubscribe, f.group, f.own, routeLife)
	return err
}

func newEpoch() int64 { return rand.Int64N(1<<62) + 1 }

// errMoved means that the group gets its events from Kafka.
var errMoved = errors.New("consumer group gets its events from Kafka")

// What stands in event_subscription.state of groups that get events here: all, or those up to the cut
// behind which they get them from Kafka.
const (
	stateActive  = "active"
	stateLeaving = "leaving"
)

func getsEvents(state string) bool { return state == stateActive || state == stateLeaving }

// transact runs f in a transaction that has the lock of the group, and commits.
func (f *fanOut) transact(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := f.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // closes the connection within a transaction
	var b pgx.Batch
	f.queueBegin(&b)
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	if err := do(conn.Conn()); err != nil {
		_, _ = conn.Exec(ctx, "ROLLBACK") // or else its connection is closed
		return err
	}
	_, err = conn.Exec(ctx, "COMMIT")
	return err
}

func (f *fanOut) queueBegin(b *pgx.Batch) {
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(sqlFanOutSettings)
	b.Queue(sqlFanOutLock, f.lock)
}

// load reads the position of the group. The error may be ErrOtherCluster.
func (f *fanOut) load(ctx context.Context, db pg.RowQuerier) error {
	pos, err := f.cursors.Newest(ctx, db)
	if err != nil {
		return err
	}
	f.moveTo(pos)
	return nil
}

// moveTo takes over a position. What was paged of its window stays, if another process has gone on
// in the same one.
func (f *fanOut) moveTo(pos cursor.Position) {
	same := pos.Window != "" && pos.Window == f.pos.Window && pos.Base == f.pos.Base && pos.Last >= f.pos.Last
	f.pos, f.known = pos, true
	if same {
		f.ids.RemoveThrough(pos.Last)
		return
	}
	f.unpaged, f.ids = cursor.Unpaged{}, cursor.IDSet{}
	if pos.Window != "" {
		var err error
		if f.unpaged, err = cursor.UnpagedOf(pos); err != nil {
			f.known = false
		}
	}
}

// round makes deliveries of the next events, about as many as limit. Claimed gets those that
// are with this worker, with as many payloads as fit into a budget. It reports how many events there were, and
// whether there are more.
//
// That another process has moved the cursor is found out under the lock. The round goes on from the
// new position then, unless its window is still to be paged: if processes take turns, each would
// find a position of the others every time, and wait for the lock in vain.
func (f *fanOut) round(ctx context.Context, limit int, budget int64, claimed func([]delivery.Delivery) error) (events int, more bool, err error) {
	if !f.known {
		if err := f.load(ctx, f.db); err != nil {
			return 0, false, err
		}
	}
	if f.budget = budget; f.bare {
		f.budget = 0
	}
	tx := &fanOutTx{}
	defer tx.end(ctx)
	events, more, err = f.roundIn(ctx, tx, limit, claimed)
	if errors.Is(err, cursor.ErrStale) && tx.conn != nil {
		if err := f.load(ctx, tx.conn); err != nil {
			f.known = false
			return 0, false, err
		}
		if len(f.unpaged.Ranges) > 0 {
			return 0, true, nil
		}
		events, more, err = f.roundIn(ctx, tx, limit, claimed)
	}
	if err != nil {
		f.known = false
	}
	if errors.Is(err, cursor.ErrStale) {
		return 0, true, nil
	}
	return events, more, err
}

// roundIn is a round from the position that is known. The error is ErrStale if that is not the
// newest one.
func (f *fanOut) roundIn(ctx context.Context, tx *fanOutTx, limit int, claimed func([]delivery.Delivery) error) (events int, more bool, err error) {
	if f.pos.Window == "" || f.drained() {
		return f.open(ctx, tx, claimed)
	}
	return f.next(ctx, tx, limit, claimed)
}

// fanOutTx is the transaction of a round. It has a connection while it has the lock of the group.
type fanOutTx struct{ conn *pgxpool.Conn }

// end rolls the transaction back, unless it has ended.
func (tx *fanOutTx) end(ctx context.Context) {
	if tx.conn == nil {
		return
	}
	_, _ = tx.conn.Exec(ctx, "ROLLBACK") // or else its connection is closed
	tx.release()
}

// release closes the connection within a transaction.
func (tx *fanOutTx) release() {
	tx.conn.Release()
	tx.conn = nil
}

func (f *fanOut) drained() bool { return len(f.unpaged.Ranges) == 0 && f.ids.Len() == 0 }

// sqlFanOut is SQLOpen without a lease, and without the events themselves. A window of few events
// is attempted when the transaction commits, so it need not be announced: its end becomes
// the base of the next one. A group that is leaving goes as far as its cut, which is the position of
// the relay that waits for it.
const sqlFanOut = `
WITH subscription AS MATERIALIZED (
    SELECT s.state, (SELECT snapshot FROM {schema}.outbox_cursor WHERE relay = s.relay ORDER BY id DESC LIMIT 1) AS cut
      FROM {schema}.event_subscription AS s WHERE s.consumer_group = $9::text
), until AS MATERIALIZED (
    SELECT CASE state WHEN 'leaving' THEN cut ELSE pg_current_snapshot() END AS snapshot
      FROM subscription WHERE state IN ('active', 'leaving')
), ids AS MATERIALIZED (
    SELECT w.id, w.xid FROM (
       (SELECT id, xid FROM {schema}.outbox
         WHERE xid >= $3::xid8 AND xid < pg_snapshot_xmax((SELECT snapshot FROM until))
           AND pg_visible_in_snapshot(xid, (SELECT snapshot FROM until)) ORDER BY xid, id LIMIT $4)
         UNION ALL
        SELECT late.id, late.xid FROM pg_snapshot_xip($2::text::pg_snapshot) AS x
         CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox
                              WHERE xid >= x AND xid <= x AND pg_visible_in_snapshot(xid, (SELECT snapshot FROM until))
                              ORDER BY xid, id LIMIT $4) AS late
    ) AS w LIMIT $4
), found AS MATERIALIZED (
    SELECT count(*) AS n, max(id) AS highest FROM ids
), few AS MATERIALIZED (
    SELECT coalesce(sum(o.size) <= $5::bigint, true) AND (SELECT n FROM found) < $4 AS enough
      FROM ids CROSS JOIN LATERAL (SELECT size FROM {schema}.outbox WHERE xid = ids.xid AND id = ids.id OFFSET 0) AS o
     WHERE (SELECT n FROM found) < $4
), newest AS MATERIALIZED (
    SELECT c.id, s.state = 'leaving' AND $2::text <> s.cut::text AS cut
      FROM (SELECT id, epoch FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c, subscription AS s, until
     WHERE c.id = $6 AND c.epoch = $7 AND pg_postmaster_start_time() = $8
), moved AS (
    INSERT INTO {schema}.outbox_cursor
           (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch)
    SELECT $1::text, CASE WHEN few.enough THEN until.snapshot ELSE $2::text::pg_snapshot END,
           CASE WHEN NOT few.enough THEN until.snapshot END,
           CASE WHEN few.enough THEN coalesce(found.highest, $10::bigint) ELSE 0 END,
           CASE WHEN few.enough THEN greatest(found.highest, $11::bigint) ELSE $11::bigint END, $12::bigint, $13::bigint
      FROM newest, found, few, until
     WHERE $14::bool OR found.n > 0 OR newest.cut
 RETURNING id
)
SELECT (SELECT state FROM subscription), newest.id, moved.id, (SELECT snapshot FROM until)::text, found.n, few.enough,
       e.id, e.event_type, e.topic, e.partition_key, e.aggregate_id
  FROM found CROSS JOIN few
  LEFT JOIN newest ON true
  LEFT JOIN moved ON true
  LEFT JOIN LATERAL (
       SELECT o.* FROM (SELECT id, xid FROM ids WHERE few.enough AND newest.id IS NOT NULL ORDER BY id) AS i
        CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE xid = i.xid AND id = i.id OFFSET 0) AS o) AS e ON true`

// open makes deliveries of all events behind the position if they are few, or else announces them
// as a window.
func (f *fanOut) open(ctx context.Context, tx *fanOutTx, claimed func([]delivery.Delivery) error) (events int, more bool, err error) {
	next, drained := f.pos, f.pos.Window != ""
	if drained {
		next.Base = f.pos.Window
	}
	next.Window, next.Epoch = "", newEpoch()
	var heads []eventHead
	var moved pgtype.Int8
	var state, now pgtype.Text
	var found int64
	var few bool
	err = f.inRound(ctx, tx, func(b *pgx.Batch) {
		b.Queue(f.sqlOpen, f.cursors.Relay, next.Base, tables.SnapshotMax(next.Base), maxFanOut+1, maxFanOutBytes, f.pos.CursorID, f.pos.Epoch, f.pos.Server,
			f.group, f.pos.Last, f.pos.Highest, f.pos.SystemID, next.Epoch, drained).Query(func(rows pgx.Rows) error {
			var newest pgtype.Int8
			heads, err = readHeads(rows, &state, &newest, &moved, &now, &found, &few)
			switch {
			case err != nil:
			case !getsEvents(state.String):
				err = errMoved
			case !newest.Valid:
				err = cursor.ErrStale
			}
			return err
		})
	}, func() []eventHead { return heads }, claimed)
	if err != nil {
		return 0, false, err
	}
	if !moved.Valid {
		if state.String == stateLeaving {
			return 0, false, f.leaveGroup(ctx)
		}
		return 0, false, nil
	}
	next.CursorID = moved.Int64
	if few {
		next.Base = now.String
	} else {
		next.Window, next.Last = now.String, 0
	}
	for _, e := range heads {
		next.Last, next.Highest = e.id, max(next.Highest, e.id)
	}
	f.moveTo(next)
	return len(heads), next.Window != "", nil
}

// What a group does that has come to its cut: it leaves, and keeps no rows of outbox from being
// removed.
const (
	sqlLeaveGroup = `
UPDATE {schema}.event_subscription AS s SET state = 'left', changed_at = now()
  FROM (SELECT snapshot, window_snapshot FROM {schema}.outbox_cursor WHERE relay = $2::text ORDER BY id DESC LIMIT 1) AS c
 WHERE s.consumer_group = $1::text AND s.state = 'leaving' AND c.window_snapshot IS NULL
   AND c.snapshot::text = (SELECT snapshot::text FROM {schema}.outbox_cursor WHERE relay = s.relay ORDER BY id DESC LIMIT 1)`
	sqlForget = `DELETE FROM {schema}.outbox_cursor WHERE relay = $1::text`
)

// leaveGroup ends the subscription of a group that has come to its cut. The error is errMoved then.
func (f *fanOut) leaveGroup(ctx context.Context) error {
	left := false
	err := f.transact(ctx, func(conn *pgx.Conn) error {
		tag, err := conn.Exec(ctx, f.sqlLeaveGroup, f.group, f.cursors.Relay)
		if left = tag.RowsAffected() > 0; !left || err != nil {
			return err
		}
		_, err = conn.Exec(ctx, f.sqlForget, f.cursors.Relay)
		return err
	})
	if err == nil && left {
		return errMoved
	}
	return err
}

// sqlFanOutNext goes on in an open window: it reads events by ranges of ids up to the first that
// does not fit into $9 bytes with those before it, and moves the cursor behind them.
const sqlFanOutNext = `
WITH newest AS MATERIALIZED (
    SELECT c.* FROM (SELECT * FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c
     WHERE c.id = $2 AND c.epoch = $3 AND pg_postmaster_start_time() = $4
       AND EXISTS (SELECT FROM {schema}.event_subscription WHERE consumer_group = $5::text AND state IN ('active', 'leaving'))
), sizes AS MATERIALIZED (
    SELECT o.id, sum(o.size) OVER (ORDER BY o.id) - o.size AS before
      FROM unnest($6::bigint[], $7::bigint[]) AS r (first, last)
     CROSS JOIN LATERAL (SELECT id, greatest(size, 0) AS size FROM {schema}.outbox WHERE id BETWEEN r.first AND r.last ORDER BY id OFFSET 0) AS o
     WHERE EXISTS (SELECT FROM newest)
), through AS MATERIALIZED (
    SELECT coalesce((SELECT min(id) - 1 FROM sizes WHERE before >= $9::bigint), $8::bigint) AS id
), moved AS (
    INSERT INTO {schema}.outbox_cursor
           (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch)
    SELECT relay, snapshot, window_snapshot, through.id, greatest(highest_id, through.id), system_identifier, $10::bigint FROM newest, through
 RETURNING id
)
SELECT newest.id, moved.id, through.id, e.id, e.event_type, e.topic, e.partition_key, e.aggregate_id
  FROM newest CROSS JOIN through
  LEFT JOIN moved ON true
  LEFT JOIN LATERAL (
       SELECT o.* FROM unnest($6::bigint[], $7::bigint[]) AS r (first, last)
        CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox
                             WHERE id BETWEEN r.first AND least(r.last, through.id) ORDER BY id OFFSET 0) AS o) AS e ON true`

// next makes deliveries of the next events of the open window.
func (f *fanOut) next(ctx context.Context, tx *fanOutTx, limit int, claimed func([]delivery.Delivery) error) (events int, more bool, err error) {
	for len(f.unpaged.Ranges) > 0 {
		bounded, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
		ids, rest, err := f.cursors.Page(bounded, f.pos, f.unpaged, relay.MaxPageIDs)
		cancel()
		if err != nil {
			return 0, false, err
		}
		for _, id := range ids {
			f.ids.Add(id)
		}
		f.unpaged = rest
	}
	if f.ids.Len() == 0 {
		return 0, true, nil
	}
	ids := f.ids.First(min(limit, maxFanOut))
	first, last := cursor.Ranges(ids)
	next := f.pos
	next.Epoch = newEpoch()
	var heads []eventHead
	var moved pgtype.Int8
	err = f.inRound(ctx, tx, func(b *pgx.Batch) {
		b.Queue(f.sqlNext, f.cursors.Relay, f.pos.CursorID, f.pos.Epoch, f.pos.Server, f.group, first, last, ids[len(ids)-1], maxFanOutBytes, next.Epoch).
			Query(func(rows pgx.Rows) error {
				var newest pgtype.Int8
				heads, err = readHeads(rows, &newest, &moved, &next.Last)
				if err == nil && !newest.Valid {
					err = cursor.ErrStale
				}
				return err
			})
	}, func() []eventHead { return heads }, claimed)
	if err != nil {
		return 0, false, err
	}
	next.CursorID, next.Highest = moved.Int64, max(next.Highest, next.Last)
	f.moveTo(next)
	return len(heads), true, nil
}

// inRound runs the statement that moves the cursor, and inserts the deliveries of the events that
// it has read, in a transaction of two round trips. It stays open if the position is stale.
func (f *fanOut) inRound(ctx context.Context, tx *fanOutTx, move func(*pgx.Batch), heads func() []eventHead, claimed func([]delivery.Delivery) error) error {
	ctx, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
	defer cancel()
	var b pgx.Batch
	if tx.conn == nil {
		conn, err := f.db.Acquire(ctx)
		if err != nil {
			return err
		}
		tx.conn = conn
		f.queueBegin(&b)
	}
	move(&b)
	b.Queue(f.sqlRoutes, f.group, f.routes.version).QueryRow(func(row pgx.Row) error {
		var version int64
		var routes pgtype.Text
		if err := row.Scan(&version, &routes); err != nil || !routes.Valid {
			return err
		}
		return f.routes.read(version, routes.String)
	})
	if err := tx.conn.SendBatch(ctx, &b).Close(); err != nil {
		return fmt.Errorf("look for events: %w", err)
	}
	var rows []delivery.New
	for _, e := range heads() {
		rows = append(rows, f.plan(e)...)
	}
	var got []delivery.Delivery
	var end pgx.Batch
	if len(rows) > 0 {
		f.store.Queue(&end, rows, f.budget, func(d []delivery.Delivery) error { got = d; return nil })
	}
	end.Queue("COMMIT")
	err := tx.conn.SendBatch(ctx, &end).Close()
	tx.release()
	if unprintable := delivery.MayBeUnreadable(err); unprintable || err == nil {
		f.bare = unprintable && !f.bare
	}
	if err != nil {
		return fmt.Errorf("make deliveries: %w", err)
	}
	return claimed(got)
}

// readHeads reads rows whose first columns go into head, once, and the last five are an event, or
// NULL.
func readHeads(rows pgx.Rows, head ...any) (heads []eventHead, err error) {
	var id pgtype.Int8
	var eventType, topic, key, aggregate pgtype.Text
	columns := slices.Concat(head, []any{&id, &eventType, &topic, &key, &aggregate})
	_, err = pgx.ForEachRow(rows, columns, func() error {
		if id.Valid {
			heads = append(heads, eventHead{id.Int64, eventType.String, topic.String, key.String, aggregate.String})
		}
		return nil
	})
	slices.SortFunc(heads, func(a, b eventHead) int { return cmp.Compare(a.id, b.id) })
	return heads, err
}
