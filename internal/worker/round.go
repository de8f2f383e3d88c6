package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// claimedFunc gets the deliveries of a round that this worker has claimed.
type claimedFunc func([]delivery.Delivery) error

// round inserts the deliveries of the next events, about as many as limit. It passes the deliveries that
// this worker has claimed to claimed, with as many payloads as fit into budget bytes. It returns the number
// of events, and whether more events wait.
//
// Under the lock a round may find that another process has moved the cursor. Then it goes on from the new
// position in the same transaction, unless the ids of its window must be read first. Without that,
// processes that take turns would find a new position each time, and would wait for the lock in vain.
func (f *fanOut) round(
	ctx context.Context, limit int, budget int64, claimed claimedFunc,
) (events int, more bool, err error) {
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

// roundIn is one try of a round, from the position that is known. The error is [cursor.ErrStale] if there
// is a newer position.
func (f *fanOut) roundIn(
	ctx context.Context, tx *fanOutTx, limit int, claimed claimedFunc,
) (events int, more bool, err error) {
	if f.pos.Window == "" || f.drained() {
		return f.open(ctx, tx, claimed)
	}
	return f.next(ctx, tx, limit, claimed)
}

// fanOutTx is the transaction of a round. Conn is nil unless it has the lock of the group.
type fanOutTx struct{ conn *pgxpool.Conn }

// end rolls the transaction back, if it is open.
func (tx *fanOutTx) end(ctx context.Context) {
	if tx.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, delivery.WriteTimeout)
	defer cancel()
	_, _ = tx.conn.Exec(ctx, "ROLLBACK") // without it, Release closes the connection
	tx.release()
}

// release gives the connection back to the pool, which closes it if its transaction is open.
func (tx *fanOutTx) release() {
	tx.conn.Release()
	tx.conn = nil
}

func (f *fanOut) drained() bool { return len(f.unpaged.Ranges) == 0 && f.ids.Len() == 0 }

// sqlFanOut opens the next window of the group. It is the statement of a relay (sqlOpen of package cursor)
// without a lease and without payloads. If the window has few events, all of them get their deliveries in
// this transaction, so the window is not announced: its end becomes the base of the next one. A group that
// is leaving reads up to its cutover, which is the position of the relay that waits for it.
const sqlFanOut = `
WITH subscription AS MATERIALIZED (
    SELECT s.state,
           (SELECT snapshot FROM {schema}.outbox_cursor WHERE relay = s.relay ORDER BY id DESC LIMIT 1) AS cutover
      FROM {schema}.event_subscription AS s WHERE s.consumer_group = $9::text
), until AS MATERIALIZED (
    SELECT CASE state WHEN 'leaving' THEN cutover ELSE pg_current_snapshot() END AS snapshot
      FROM subscription WHERE state IN ('active', 'leaving')
), ids AS MATERIALIZED (
    SELECT w.id, w.xid FROM (
        SELECT new.id, new.xid FROM (SELECT $3::xid8 AS bound, snapshot FROM until) AS b
         CROSS JOIN LATERAL (` + tables.Gaps + `) AS g
         CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox
                              WHERE ` + tables.InGap + ` ORDER BY xid, id LIMIT $4) AS new
         UNION ALL
        SELECT late.id, late.xid FROM pg_snapshot_xip($2::text::pg_snapshot) AS x
         CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox
                              WHERE xid >= x AND xid <= x ORDER BY xid, id LIMIT $4) AS late
         WHERE CASE WHEN pg_visible_in_snapshot(x, (SELECT snapshot FROM until)) THEN ` + tables.NotRolledBack + ` END
    ) AS w LIMIT $4
), found AS MATERIALIZED (
    SELECT count(*) AS n, max(id) AS highest FROM ids
), few AS MATERIALIZED (
    SELECT coalesce(sum(o.size) <= $5::bigint, true) AND (SELECT n FROM found) < $4 AS enough
      FROM ids CROSS JOIN LATERAL (SELECT size FROM {schema}.outbox WHERE xid = ids.xid AND id = ids.id OFFSET 0) AS o
     WHERE (SELECT n FROM found) < $4
), newest AS MATERIALIZED (
    SELECT c.id, s.state = 'leaving' AND $2::text <> s.cutover::text AS cutover
      FROM (SELECT id, epoch FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c,
           subscription AS s, until
     WHERE c.id = $6 AND c.epoch = $7 AND pg_postmaster_start_time() = $8
), moved AS (
    INSERT INTO {schema}.outbox_cursor
           (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch)
    SELECT $1::text, CASE WHEN few.enough THEN until.snapshot ELSE $2::text::pg_snapshot END,
           CASE WHEN NOT few.enough THEN until.snapshot END,
           CASE WHEN few.enough THEN coalesce(found.highest, $10::bigint) ELSE 0 END,
           CASE WHEN few.enough THEN greatest(found.highest, $11::bigint) ELSE $11::bigint END, $12::bigint, $13::bigint
      FROM newest, found, few, until
     WHERE $14::bool OR found.n > 0 OR newest.cutover
 RETURNING id
)
SELECT (SELECT state FROM subscription), newest.id, moved.id, (SELECT snapshot FROM until)::text, found.n, few.enough,
       e.id, e.event_type, e.topic, e.partition_key, e.aggregate_id,
       e.event_id::text, e.aggregate_type
  FROM found CROSS JOIN few
  LEFT JOIN newest ON true
  LEFT JOIN moved ON true
  LEFT JOIN LATERAL (
       SELECT o.* FROM (SELECT id, xid FROM ids WHERE few.enough AND newest.id IS NOT NULL ORDER BY id) AS i
        CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE xid = i.xid AND id = i.id OFFSET 0) AS o) AS e ON true`

// open inserts the deliveries of all events behind the position if they are few. Otherwise it announces a
// window.
func (f *fanOut) open(ctx context.Context, tx *fanOutTx, claimed claimedFunc) (events int, more bool, err error) {
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
		b.Queue(f.sqlOpen, f.cursors.Relay, next.Base, tables.SnapshotMax(next.Base), maxFanOut+1, maxFanOutBytes,
			f.pos.CursorID, f.pos.Epoch, f.pos.Server, f.group, f.pos.Last, f.pos.Highest, f.pos.SystemID,
			next.Epoch, drained).Query(func(rows pgx.Rows) error {
			var newest pgtype.Int8
			heads, err = readHeads(rows, &state, &newest, &moved, &now, &found, &few)
			switch {
			case err != nil:
			case !getsEvents(state.String):
				err = &noEventsError{state.String}
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

// A group that has reached its cutover leaves. Its position is deleted, so that retention can remove the
// rows behind it.
const (
	sqlLeaveGroup = `
UPDATE {schema}.event_subscription AS s SET state = 'left', changed_at = now()
  FROM (SELECT snapshot, window_snapshot FROM {schema}.outbox_cursor
         WHERE relay = $2::text ORDER BY id DESC LIMIT 1) AS c
 WHERE s.consumer_group = $1::text AND s.state = 'leaving' AND c.window_snapshot IS NULL
   AND c.snapshot::text = (SELECT snapshot::text FROM {schema}.outbox_cursor
                            WHERE relay = s.relay ORDER BY id DESC LIMIT 1)`
	sqlForget = `SELECT {schema}.outbox_remove_cursors(ARRAY(SELECT ctid FROM {schema}.outbox_cursor WHERE relay = $1::text))`
)

// leaveGroup ends the subscription of a group that has reached its cutover, and returns a noEventsError then.
func (f *fanOut) leaveGroup(ctx context.Context) error {
	left := false
	err := f.transact(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		tag, err := conn.Exec(ctx, f.sqlLeaveGroup, f.group, f.cursors.Relay)
		if left = tag.RowsAffected() > 0; !left || err != nil {
			return err
		}
		_, err = conn.Exec(ctx, f.sqlForget, f.cursors.Relay)
		return err
	})
	if err == nil && left {
		return &noEventsError{stateLeft}
	}
	return err
}

// sqlFanOutNext goes on in an open window. It reads events by ranges of ids, until $9 bytes are reached,
// and moves the cursor behind them.
const sqlFanOutNext = `
WITH newest AS MATERIALIZED (
    SELECT c.* FROM (SELECT * FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c
     WHERE c.id = $2 AND c.epoch = $3 AND pg_postmaster_start_time() = $4
       AND EXISTS (SELECT FROM {schema}.event_subscription
                    WHERE consumer_group = $5::text AND state IN ('active', 'leaving'))
), sizes AS MATERIALIZED (
    SELECT o.id, sum(o.size) OVER (ORDER BY o.id) - o.size AS before
      FROM unnest($6::bigint[], $7::bigint[]) AS r (first, last)
     CROSS JOIN LATERAL (SELECT id, size FROM {schema}.outbox
                          WHERE id BETWEEN r.first AND r.last ORDER BY id OFFSET 0) AS o
     WHERE EXISTS (SELECT FROM newest)
), through AS MATERIALIZED (
    SELECT coalesce((SELECT min(id) - 1 FROM sizes WHERE before >= $9::bigint), $8::bigint) AS id
), moved AS (
    INSERT INTO {schema}.outbox_cursor
           (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch)
    SELECT relay, snapshot, window_snapshot, through.id, greatest(highest_id, through.id), system_identifier,
           $10::bigint
      FROM newest, through
 RETURNING id
)
SELECT newest.id, moved.id, through.id, e.id, e.event_type, e.topic, e.partition_key, e.aggregate_id,
       e.event_id::text, e.aggregate_type
  FROM newest CROSS JOIN through
  LEFT JOIN moved ON true
  LEFT JOIN LATERAL (
       SELECT o.* FROM unnest($6::bigint[], $7::bigint[]) AS r (first, last)
        CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox
                             WHERE id BETWEEN r.first AND least(r.last, through.id)
                             ORDER BY id OFFSET 0) AS o) AS e ON true`

// next inserts the deliveries of the next events of the open window.
func (f *fanOut) next(
	ctx context.Context, tx *fanOutTx, limit int, claimed claimedFunc,
) (events int, more bool, err error) {
	if err := f.page(ctx); err != nil {
		return 0, false, err
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
		b.Queue(f.sqlNext, f.cursors.Relay, f.pos.CursorID, f.pos.Epoch, f.pos.Server, f.group,
			first, last, ids[len(ids)-1], maxFanOutBytes, next.Epoch).Query(func(rows pgx.Rows) error {
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

// page reads the ids of the open window that have not been read yet.
func (f *fanOut) page(ctx context.Context) error {
	for len(f.unpaged.Ranges) > 0 {
		bounded, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
		ids, rest, err := f.cursors.Page(bounded, f.pos, f.unpaged, cursor.MaxPageIDs)
		cancel()
		if err != nil {
			return err
		}
		for _, id := range ids {
			f.ids.Add(id)
		}
		f.unpaged = rest
	}
	return nil
}

// inRound runs the statement that moves the cursor, and inserts the deliveries of the events that it has
// read. The transaction takes two round trips. It stays open if the position is stale. A stop waits for its end: if the
// answer to the commit is lost, this worker has claimed deliveries that it does not know.
func (f *fanOut) inRound(
	ctx context.Context, tx *fanOutTx, move func(*pgx.Batch), heads func() []eventHead, claimed claimedFunc,
) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, endGrace := wait.Grace(ctx, f.grace)
	defer endGrace()
	ctx, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
	defer cancel()
	var b pgx.Batch
	if tx.conn == nil {
		conn, err := pg.Acquire(ctx, f.db)
		if err != nil {
			return err
		}
		tx.conn = conn
		f.queueBegin(&b)
	}
	move(&b)
	f.queueRoutes(&b)
	waited := pg.WaitsOf(f.db).Begin()
	if err := waited(tx.conn.SendBatch(ctx, &b).Close()); err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	found := heads()
	rows := make([]delivery.New, 0, len(found))
	for _, e := range found {
		rows = f.plan(rows, e)
	}
	var got []delivery.Delivery
	var end pgx.Batch
	if len(rows) > 0 {
		f.store.Queue(&end, rows, f.budget, func(d []delivery.Delivery) error { got = d; return nil })
	}
	end.Queue("COMMIT")
	waited = pg.WaitsOf(f.db).Begin()
	err := waited(tx.conn.SendBatch(ctx, &end).Close())
	tx.release()
	if unprintable := delivery.MayBeUnreadable(err); unprintable || err == nil {
		f.bare = unprintable && !f.bare
	}
	if err != nil {
		return fmt.Errorf("insert deliveries: %w", f.store.PassTakenIDs(ctx, err))
	}
	return claimed(got)
}

// queueRoutes queues the statement that reads the routes of the group, if they have changed. The error of the batch is
// errRoutesLost if routes are missing that this worker knows: then the events of the round must not be taken.
func (f *fanOut) queueRoutes(b *pgx.Batch) {
	b.Queue(f.sqlRoutes, f.group, f.routes.version).QueryRow(func(row pgx.Row) error {
		var version int64
		var routes pgtype.Text
		if err := row.Scan(&version, &routes); err != nil || !routes.Valid {
			return err
		}
		stored, err := readRoutes(routes.String)
		if err != nil {
			return err
		}
		if f.seen.lacks(stored) {
			return errRoutesLost
		}
		f.seen.set(stored)
		return f.routes.set(version, stored)
	})
}

// readHeads reads rows of events. The first columns are the same in each row and go into head. The last
// seven columns are an event, or NULL.
func readHeads(rows pgx.Rows, head ...any) (heads []eventHead, err error) {
	var id pgtype.Int8
	var e eventHead
	var key, aggregate, eventID pgtype.Text
	columns := slices.Concat(head, []any{&id, (*pg.Repeated)(&e.eventType), (*pg.Repeated)(&e.topic), &key, &aggregate, &eventID, (*pg.Repeated)(&e.aggregateType)})
	_, err = pgx.ForEachRow(rows, columns, func() error {
		if id.Valid {
			e.id, e.key, e.aggregate, e.eventID = id.Int64, key.String, aggregate.String, eventID.String
			heads = append(heads, e)
		}
		return nil
	})
	slices.SortFunc(heads, func(a, b eventHead) int { return cmp.Compare(a.id, b.id) })
	return heads, err
}
