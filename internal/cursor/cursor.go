// Package cursor stores the position of a relay in outbox_cursor, and the events that failed in outbox_failed.
//
// A position is a snapshot of PostgreSQL: every event that is visible in it has been attempted. The next window has
// the events that are visible now and were not visible then, whatever their ids are. Ids are drawn at INSERT and
// seen at COMMIT, so "id > last" would skip the rows of a slow transaction, and waiting for the oldest transaction
// would stall behind any open one.
//
//   - The row needs no fsync. If PostgreSQL forgets rows in a crash or a failover, their events are sent again. A
//     move of unknown outcome is repeated: if the first try did commit, the newest row is another one than
//     expected ([ErrStale]), and the relay loads it.
//   - Each statement proves the lease and the row that the session knows, by its id, its epoch and the start of
//     the server.
//   - No statement takes longer because more events wait. [Store.Open] holds the lock of the lease, so it reads at
//     most a batch and 1 MiB. A larger window is read afterwards: its ids in pages into an [IDSet], then its
//     events by ranges of ids, at most 16 MiB at once. A row that is larger than any record stays in PostgreSQL.
//   - A row that PostgreSQL cannot print fails its statement after the rows in front of it have come. It is then
//     read alone, without its payload.
//   - The shape of the queries keeps a poll at a few dozen buffers over a million published rows, with and without
//     statistics. Connections keep plans that were made over empty tables, so settings of the planner go in front
//     of every statement, in the same round trip.
//   - Snapshots of another cluster mean nothing, so a row carries the system identifier. [Store.Rebase] moves all
//     cursors of a schema to this cluster, also after a pg_upgrade. A physical copy keeps its identifier, and its
//     ids stay valid. Rows that are copied between two such copies that have both gone on are not detected.
//   - An idle poll writes nothing and uses no transaction id.
//
// # Order
//
// Between windows the order of events is that of commits. Inside a window it is that of ids. For two transactions that
// changed the same aggregate one after the other the ids ascend, because the sequence has CACHE 1.
//
// # Crashes and failovers
//
// A crash of PostgreSQL gives out again the ids of transactions whose WAL was not flushed. A snapshot from before the
// crash would call the new events visible, and skip them. A row of outbox_cursor that survived is safe: the id of its
// own transaction is not below any id that its snapshots call finished, so none of these is given out again. From
// that follow three rules: a window is used only after the row that announces it is committed, by the same statement
// that reads it; no position is kept in memory alone; each statement proves that the row is there. After a failover to
// a server that lagged, rows of the cursor are lost in the same way. The relay that lived through it finds an older
// row than its own, and logs that.
package cursor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// How the cursor works. Ids are drawn at INSERT and become visible at COMMIT. A reader at "id >
// last" passes the id of a transaction that has not committed yet, and never returns to it. So the
// relay reads the difference of two snapshots: a window has the events that are visible in the
// present snapshot (window) and were not visible in the one before (base). Later commits do not
// change a window, so it can be drained in batches in the order of ids. Then its end becomes the
// base of the next window.
//
// A crash of PostgreSQL can forget transactions whose ids we have seen, and give the same ids to
// others. A row of outbox_cursor is safe from that: the transaction that wrote it has an id of its
// own, not below any id that the snapshot calls finished. If the row survived the crash, so did
// that id. Hence the rule of this file: a window is used only after the row that announces it is
// committed. Each statement that reads or moves checks that the row that we know is still there:
// its id, its relay and the epoch of the lease under which it was written. The id alone is not
// enough, because a crash also gives the ids of lost rows to others. The row must also be on the
// server that we know: a connection may have come back to a copy that has the same rows. (A server
// is identified by the time of its start, because asking for the cluster's identifier reads a file.
// When one process of a server is killed, the server starts all others anew and forgets rows, but
// keeps this time.)
//
// No statement of this file takes longer because more events wait. The statement that announces a
// window locks the row of the lease, so it reads few events; larger windows are read afterwards,
// see window.go.

// ErrStale means that the newest row is not the one that the session knows: it vanished in a crash, or another
// process moved the cursor. Load it again.
var ErrStale = errors.New("cursor has changed")

// Position is a row of outbox_cursor: how far a relay has come.
type Position struct {
	CursorID int64
	Base     string // every event visible in this snapshot has been attempted
	Window   string // end of the open window; "" when none is open
	Last     int64  // highest outbox.id attempted of the open window
	Highest  int64  // highest outbox.id ever attempted
	SystemID int64  // the cluster whose transaction ids these are
	Epoch    int64  // of the lease under which the row was written

	// Sent is where the events are that were attempted since the row was written. The next row gets it.
	Sent tables.SentRow

	Server time.Time // start of the server that returned the row; another server may be a copy
	Topic  string    // of the cursor, if the relay sends exactly once
}

// Store reads and moves the position of one relay.
type Store struct {
	db     *pgxpool.Pool
	schema string
	Relay  string

	Most    int                    // bytes of an event that is read as a whole; see LargestEvent
	InOrder func([]envelope.Event) // puts events that were read together in the order of ids

	LastPoll struct{ Snapshot, own string } // of the last Open: its snapshot, and its transaction if it wrote
	unseen   unseenIDs
	Probes   *wakeup.Probes
	sequence string // of ids

	SQLLoad, SQLSeed, SQLOpen, SQLMove, SQLMoveFailed, SQLPage, SQLFetch, SQLFetchBare string
	SQLSequence, sqlCursorSequence, SQLRebase, SQLRebaseProof, sqlCount, sqlReadStored string
	sqlMode, sqlAgree, sqlContinue, sqlLockedBy                                        string

	exactly *exactly // nil unless the mode is on
}

// maxEventBytes is the most bytes that an event of outbox has: the constraint outbox_size.
const maxEventBytes = 200 << 20

// LargestEvent returns the most bytes, as PostgreSQL prints them, of an event whose record fits into a batch of so many
// bytes: JSON escapes a byte of a header with at most 6. An event of up to maxBatchBytes is always read.
func LargestEvent(batch int) int {
	return max(maxBatchBytes, min(6*min(batch, maxEventBytes), maxEventBytes))
}

// NewStore returns the store of a relay in a schema. It does no I/O.
func NewStore(db *pgxpool.Pool, schema, relay string) *Store {
	return &Store{
		db: db, schema: schema, Relay: relay, Most: maxEventBytes, InOrder: SortByID,
		Probes: wakeup.ProbesOf(db), sequence: pg.InSchema("{schema}.outbox_id_seq", schema),
		SQLLoad:           pg.InSchema(sqlLoad, schema),
		SQLSeed:           pg.InSchema(sqlSeed, schema),
		SQLOpen:           pg.InSchema(SQLOpen, schema),
		SQLMove:           pg.InSchema(sqlMove, schema),
		SQLMoveFailed:     pg.InSchema(sqlMoveFailed, schema),
		SQLPage:           pg.InSchema(sqlPage, schema),
		SQLFetch:          pg.InSchema(sqlFetch, schema),
		SQLFetchBare:      pg.InSchema(sqlFetchBare, schema),
		SQLSequence:       pg.InSchema(tables.SQLSequence, schema),
		sqlCursorSequence: pg.InSchema(sqlCursorSequence, schema),
		SQLRebase:         pg.InSchema(sqlRebase, schema),
		SQLRebaseProof:    pg.InSchema(SQLRebaseProof, schema),
		sqlCount:          pg.InSchema(sqlCount, schema),
		sqlReadStored:     pg.InSchema(sqlReadStored, schema),
		sqlMode:           pg.InSchema(sqlMode, schema),
		sqlAgree:          pg.InSchema(sqlAgree, schema),
		sqlContinue:       pg.InSchema(sqlContinue, schema),
		sqlLockedBy:       pg.InSchema(sqlLockedBy, schema),
	}
}

// sqlLoad reads the newest position, and whether its transaction ids and those of the
// events are of this cluster. Rows that were restored from a dump may have ids that this
// cluster has not drawn yet.
const sqlLoad = `
SELECT c.id, c.snapshot::text, coalesce(c.window_snapshot::text, ''), c.last_processed_id, c.highest_id,
       c.system_identifier, c.epoch, s.system_identifier, pg_postmaster_start_time(),
       pg_snapshot_xmax(coalesce(c.window_snapshot, c.snapshot)) <= pg_snapshot_xmax(pg_current_snapshot())
       AND ` + tables.Unreached + ` IS NULL, coalesce(c.cursor_topic, '')
  FROM pg_control_system() AS s
  LEFT JOIN LATERAL (SELECT * FROM {schema}.outbox_cursor
                      WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c ON true`

// sqlSeed inserts the first row of a relay: a position before every transaction.
const sqlSeed = `
INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
SELECT $1::text, 0, '1:1:', 0, s.system_identifier, l.epoch
  FROM (SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE) AS l,
       pg_control_system() AS s
 WHERE NOT EXISTS (SELECT FROM {schema}.outbox_cursor WHERE relay = $1::text)`

// SQLSettings is pg.PlannerSettings for statements that may write rows of outbox_cursor.
// These rows need no fsync: if PostgreSQL crashes and forgets them, the events since then
// are sent again, as at-least-once delivery allows.
const SQLSettings = pg.PlannerSettings + `, set_config('synchronous_commit', 'off', true)`

// Schema returns the schema of the tables.
func (c *Store) Schema() string { return c.schema }

func (c *Store) query(ctx context.Context, read func(pgx.Rows) error, sql string, args ...any) error {
	return pg.Query(ctx, c.db, SQLSettings, read, sql, args...)
}

// Load returns the newest position, or ErrOtherCluster: then call [Store.Rebase]. A relay without a position starts
// before the first event. The lease must have been taken in an earlier statement: a statement that waits for a lock
// reads what was committed before it began to wait. The error may be [ErrSequenceBehind].
func (c *Store) Load(ctx context.Context, l *lease.Lease) (Position, error) {
	p, err := c.Newest(ctx, c.db)
	if errors.Is(err, pgx.ErrNoRows) {
		p, err = c.seed(ctx, l)
	}
	if err == nil || errors.Is(err, ErrOtherCluster) {
		err = cmp.Or(c.CheckSequence(ctx), c.checkMode(p), err)
	}
	return p, err
}

// seed makes the first position of the relay.
func (c *Store) seed(ctx context.Context, l *lease.Lease) (p Position, err error) {
	tag, err := pg.Exec(ctx, c.db, c.SQLSeed, c.Relay, l.Holder, l.Epoch)
	if err != nil {
		return p, fmt.Errorf("seed cursor: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return p, lease.ErrLeaseLost
	}
	return c.Newest(ctx, c.db)
}

// Newest returns pgx.ErrNoRows when the relay has no position yet, and ErrOtherCluster when its position is one in
// another cluster.
func (c *Store) Newest(ctx context.Context, db pg.BatchSender) (p Position, err error) {
	var id, last, highest, written, epoch pgtype.Int8
	var base pgtype.Text
	var here int64
	var known pgtype.Bool
	err = pg.QueryRow(ctx, db, c.SQLLoad, c.Relay).Scan(&id, &base, &p.Window, &last, &highest, &written, &epoch, &here, &p.Server, &known, &p.Topic)
	if err != nil {
		return p, fmt.Errorf("load cursor: %w", err)
	}
	if !id.Valid {
		return p, pgx.ErrNoRows
	}
	p.CursorID, p.Base, p.Last, p.Highest = id.Int64, base.String, last.Int64, highest.Int64
	p.SystemID, p.Epoch = written.Int64, epoch.Int64
	if written.Int64 != here || !known.Bool {
		return p, ErrOtherCluster
	}
	return p, nil
}

// SQLOpen ends the window that was drained, if any, opens the next window and reads its events if
// they are few, all under one snapshot. It announces the new window in the transaction that found
// it. When there is nothing to announce it writes nothing, takes no lock and uses up no transaction
// id. Of a window with $7 events or more, or with more than $13 bytes, it reads no event, because
// it holds the lock of the lease as long as it reads.
//
// A row whose transaction id PostgreSQL has not reached was copied here. It must not announce a
// window: the window would not contain the row, so the row would announce windows without end.
//
// The shape of ids keeps the poll at a few dozen buffers over a million published rows, under
// custom and generic plans, with statistics and without. The few transactions that base saw in
// progress are looked up one by one. Without statistics the planner estimates a range at half a
// per cent of the table, and "xid >= $6" alone at a third. It estimates "xid = x" at the whole
// table if a bulk load left a single value in the statistics. With ORDER BY xid, id LIMIT the index
// is the cheapest way even then. MATERIALIZED keeps the planner from reversing the join and reading
// the whole primary key.
//
// The index has the uncommitted rows of open transactions, too. A range that includes such a
// transaction would read all of them. So the rows of a transaction that is in progress are in no
// range: the bound xmax(base) and the present snapshot make the ranges (see [tables.Gaps]), and of
// the transactions that base saw in progress only those that have ended are looked up, and of these
// only those that were not rolled back.
//
// Rows are looked up in the order of their sorted ids instead of being sorted themselves: a sort
// would hold all payloads at once.
const SQLOpen = `
WITH ids AS MATERIALIZED (
    SELECT w.id, w.xid FROM (
        SELECT new.id, new.xid FROM (SELECT $6::xid8 AS bound, pg_current_snapshot() AS snapshot) AS b
         CROSS JOIN LATERAL (` + tables.Gaps + `) AS g
         CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox
                              WHERE ` + tables.InGap + ` ORDER BY xid, id LIMIT $7) AS new
         UNION ALL
        SELECT late.id, late.xid FROM pg_snapshot_xip($5::pg_snapshot) AS x
         CROSS JOIN LATERAL (SELECT id, xid FROM {schema}.outbox
                              WHERE xid >= x AND xid <= x ORDER BY xid, id LIMIT $7) AS late
         WHERE ` + tables.Ended + `
    ) AS w LIMIT $7
), found AS MATERIALIZED (
    SELECT count(*) AS n FROM ids
), few AS MATERIALIZED (
    SELECT sum(o.size) <= $13::bigint AS enough
      FROM ids CROSS JOIN LATERAL (SELECT size FROM {schema}.outbox WHERE xid = ids.xid AND id = ids.id OFFSET 0) AS o
     WHERE (SELECT n FROM found) < $7
), newest AS MATERIALIZED (
    SELECT c.id FROM (SELECT id, epoch FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS c
     WHERE c.id = $4 AND c.epoch = $14 AND pg_postmaster_start_time() = $12
), lease AS MATERIALIZED (
    SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE
), moved AS (
    INSERT INTO {schema}.outbox_cursor
           (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch, sent_from, sent_to, sent)
    SELECT $1::text, $5::pg_snapshot,
           CASE WHEN EXISTS (SELECT FROM ids) THEN pg_current_snapshot() END,
           CASE WHEN EXISTS (SELECT FROM ids) THEN 0 ELSE $9::bigint END,
           $10::bigint, $11::bigint, lease.epoch, $15::bigint, $16::bigint, $17::bytea
      FROM newest, lease
     WHERE $8::bool OR EXISTS (SELECT FROM ids)
 RETURNING id, pg_current_xact_id()::text AS xid
)
SELECT newest.id, moved.id, moved.xid, pg_current_snapshot()::text, found.n, ` + eventColumns + `
  FROM newest CROSS JOIN found
  LEFT JOIN moved ON true
  LEFT JOIN LATERAL (
       SELECT o.* FROM (SELECT id, xid FROM ids WHERE found.n < $7 AND (SELECT enough FROM few) ORDER BY id) AS i
        CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE xid = i.xid AND id = i.id OFFSET 0) AS o) AS e ON true`

// Open returns the position in the window that follows p, and its events if they are at most limit and maxOpenBytes.
// Otherwise large is true, and Page returns their ids. With a limit of 0 it reads no event. The window of p must be
// drained. Without new events the position has no window, and equals p if p had none. After an error the window may be
// announced or not; if it is, the next statement returns ErrStale.
func (c *Store) Open(ctx context.Context, l *lease.Lease, p Position, limit int) (next Position, events []envelope.Event, large bool, err error) {
	next = p
	next.Window = ""
	drained := p.Window != ""
	if drained {
		next.Base = p.Window
	}
	var newest, moved pgtype.Int8
	var own pgtype.Text
	var now string
	var found int
	args := []any{c.Relay, l.Holder, l.Epoch, p.CursorID, next.Base, tables.SnapshotMax(next.Base), limit + 1, drained,
		p.Last, p.Highest, p.SystemID, p.Server, maxOpenBytes, p.Epoch}
	err = c.write(ctx, c.db, func(rows pgx.Rows) (err error) {
		events, err = readEvents(nil, rows, &newest, &moved, &own, &now, &found)
		return err
	}, c.SQLOpen, append(args, sentArgs(p.Sent)...)...)
	switch {
	case err != nil:
		return p, nil, false, fmt.Errorf("open window: %w", err)
	case !newest.Valid:
		return p, nil, false, ErrStale
	case !moved.Valid && (drained || found > 0):
		return p, nil, false, lease.ErrLeaseLost
	case moved.Valid:
		next.CursorID, next.Epoch, next.Sent = moved.Int64, l.Epoch, tables.SentRow{}
	}
	if found > 0 {
		next.Window, next.Last = now, 0
	}
	c.LastPoll.Snapshot, c.LastPoll.own = now, own.String
	c.unseen.find(events)
	c.InOrder(events)
	return next, events, len(events) < found, nil
}

// unseenIDs tells which ids may belong to events that no poll has found, as far as polls and probes have shown. Ids
// are drawn from the sequence before their rows can be seen.
type unseenIDs struct {
	last int64  // id
	by   string // xmax of a snapshot after the last id was drawn: only transactions below it can have drawn it

	known int64          // no open transaction has drawn an id up to this one
	found map[int64]bool // higher ids that polls have found
}

// maxFoundIDs bounds the ids that are remembered. Where more come, polls find something all the time.
const maxFoundIDs = 64

// find records the events of a poll.
func (d *unseenIDs) find(events []envelope.Event) {
	if len(d.found)+len(events) > maxFoundIDs {
		d.found = nil
		return
	}
	if d.found == nil {
		d.found = map[int64]bool{}
	}
	for _, e := range events {
		if e.ID > d.known {
			d.found[e.ID] = true
		}
	}
	for d.found[d.known+1] {
		d.known++
		delete(d.found, d.known)
	}
}

// draw records a probe: its snapshot, and the last id of the sequence after it.
func (d *unseenIDs) draw(snapshot string, last int64) {
	switch {
	case last < d.last: // another server, or a sequence that was set back
		*d = unseenIDs{last: last}
	case last > d.last: // perhaps after the snapshot was taken
		d.last, d.by = last, ""
	case d.by == "":
		d.by = tables.SnapshotMax(snapshot)
	}
}

// ended records that all transactions below an id had ended when a poll was made.
func (d *unseenIDs) ended(below string) {
	least, err := strconv.ParseUint(below, 10, 64)
	by, berr := strconv.ParseUint(d.by, 10, 64)
	if err == nil && berr == nil && least >= by {
		d.known, d.found = d.last, nil
	}
}

// Probe reports whether Open may find something that it did not find the last time: whether a transaction has ended
// since then that may have drawn an unseen id.
func (c *Store) Probe(ctx context.Context) (bool, error) {
	now, last, err := c.Probes.Probe(ctx, c.sequence)
	if err != nil {
		return false, err
	}
	c.unseen.draw(now, last)
	if c.LastPoll.Snapshot == "" {
		return true, nil
	}
	c.unseen.ended(tables.SnapshotMin(c.LastPoll.Snapshot))
	return c.unseen.known < last && tables.SnapshotAdds(c.LastPoll.Snapshot, now, c.LastPoll.own, c.unseen.by), nil
}

// sqlMove writes how far the open window has been drained.
const sqlMove = `
INSERT INTO {schema}.outbox_cursor
       (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch, sent_from, sent_to, sent)
SELECT $1::text, $5::pg_snapshot, $6::pg_snapshot, $7::bigint, $8::bigint, $9::bigint, lease.epoch, $12::bigint, $13::bigint, $14::bytea
  FROM (SELECT id, epoch FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS newest,
       (SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE) AS lease
 WHERE newest.id = $4 AND newest.epoch = $11 AND pg_postmaster_start_time() = $10
RETURNING id`

// sentArgs are the parameters sent_from, sent_to and sent of a row: NULL if no event was sent.
func sentArgs(r tables.SentRow) []any {
	if r.Bytes == nil {
		return []any{nil, nil, nil}
	}
	return []any{r.From, r.To, r.Bytes}
}

// Move records that the events of the open window up to p.Last have been attempted, where they are, and which failed,
// in one statement. It returns the id of the new row, or ErrStale if the cursor has changed or the lease is lost.
// Failures whose rows PostgreSQL cannot copy get the class [UnreadableRow]: an event that is too large was not read
// before.
func (c *Store) Move(ctx context.Context, l *lease.Lease, p Position, failures []Failure) (int64, error) {
	id, err := c.moveIn(ctx, c.db, l, p, failures)
	if pg.IsUnreadable(err) && c.markDamaged(ctx, failures) {
		return c.moveIn(ctx, c.db, l, p, failures)
	}
	return id, err
}

func (c *Store) moveIn(ctx context.Context, db pg.BatchSender, l *lease.Lease, p Position, failures []Failure) (int64, error) {
	sql := c.SQLMove
	var window *string // NULL: none is open
	if p.Window != "" {
		window = &p.Window
	}
	args := []any{c.Relay, l.Holder, l.Epoch, p.CursorID, p.Base, window, p.Last, p.Highest, p.SystemID, p.Server, p.Epoch}
	args = append(args, sentArgs(p.Sent)...)
	if len(failures) > 0 {
		sql = c.SQLMoveFailed
		args = append(args, failureArgs(failures)...)
	}
	var id int64
	err := c.write(ctx, db, func(rows pgx.Rows) (err error) {
		id, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
		return err
	}, sql, args...)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, ErrStale
	}
	if err != nil {
		return 0, fmt.Errorf("move cursor: %w", err)
	}
	return id, nil
}

// sqlCount counts the rows of some events that are there, as they were.
const sqlCount = `
SELECT count(*) FROM unnest($1::bigint[], $2::timestamptz[]) AS e (id, created_at)
 CROSS JOIN LATERAL (SELECT created_at FROM {schema}.outbox WHERE id BETWEEN e.id AND e.id ORDER BY id OFFSET 0) AS o
 WHERE o.created_at = e.created_at`

// Count returns how many of some events are there, by their ids and the times of their transactions: after a failover
// an id may be given to another event.
func (c *Store) Count(ctx context.Context, ids []int64, created []time.Time) (there int, err error) {
	err = c.query(ctx, func(rows pgx.Rows) (err error) {
		there, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		return err
	}, c.sqlCount, ids, created)
	if err != nil {
		return 0, fmt.Errorf("count events: %w", err)
	}
	return there, nil
}
