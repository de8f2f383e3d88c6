package retention

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// publishedRows and the constants below find and remove published rows. Whether a row is
// published follows from the newest row of each relay's cursor, as in sqlRebase, and
// never from an age or an id: a transaction that was prepared long ago may commit today,
// and then its rows are old and have low ids, but no relay has seen them. A published row
// stays published, so cursors may move meanwhile. If a crash of PostgreSQL forgets rows
// of outbox_cursor, it also forgets everything that was committed after them, our
// removals included. If a cursor belongs to another cluster, or if there is no cursor, no
// row is removed. Without an archive, none is removed either while there are archivers.
//
// No relay has published an id above its highest_id, so no row above the lowest
// highest_id is scanned at: rows that a lagging relay keeps back cost nothing. The names of
// relays and their newest rows are found one by one; with "relay = name" the planner might
// read the history of all relays. Rows are deleted by ctid, because to the planner any
// index of an empty table looks as good as any other.
//
// A row of which a failed event of class UnreadableRow tells stays until the event is
// resolved, or has a payload: its payload is nowhere else. $5 are rows that cannot be
// archived; $6 bounds the bytes of a batch. A row with more than $7 bytes stays, too, and counts as none of them.
const (
	publishedRows = ceiling + unlessArchived + scannedRows
	archivedRows  = ceiling + scannedRows
)

// ofHere is the condition that position s was written in this cluster.
const ofHere = `(s.system_identifier = here.system_identifier
                    AND pg_snapshot_xmax(coalesce(s.window_snapshot, s.snapshot)) <= pg_snapshot_xmax(pg_current_snapshot()))`

const ceiling = tables.NewestCursors + `, ceiling AS MATERIALIZED (
    SELECT min(s.highest_id) AS id
      FROM positions AS s, pg_control_system() AS here
    HAVING bool_and` + ofHere + `
       AND ` + tables.Unreached + ` IS NULL`

const scannedRows = `
), scanned AS MATERIALIZED (
    SELECT part, place, id, xid, old, huge FROM (
        SELECT tableoid AS part, ctid AS place, id, xid, created_at < now() - $3::interval AS old, size > $7::int AS huge,
               sum(CASE WHEN size <= $7::int THEN size ELSE 0 END) OVER (ORDER BY id) - CASE WHEN size <= $7::int THEN size ELSE 0 END AS bytes
          FROM {schema}.outbox WHERE id > $1 AND id < $4`

// belowCeiling is the upper bound for statements that delete.
const belowCeiling = ` AND id <= (SELECT id FROM ceiling)`

const publishedAmong = ` ORDER BY id LIMIT $2) AS o
     WHERE bytes < $6::bigint
), ripe AS MATERIALIZED (
    SELECT o.part, o.place, o.id, o.huge FROM scanned AS o
     WHERE o.old AND (SELECT id FROM ceiling) IS NOT NULL AND NOT EXISTS (
           SELECT FROM positions AS s
            WHERE NOT ` + tables.Attempted + `)
       AND o.id <> ALL ($5::bigint[])
       AND o.id NOT IN (
           SELECT outbox_id FROM {schema}.outbox_failed
            WHERE error_class = 'unreadable_row' AND status <> 'resolved' AND outbox_id > $1 AND outbox_id <= (SELECT max(id) FROM scanned))
), published AS MATERIALIZED (
    SELECT part, place, id FROM ripe WHERE NOT huge
), gone AS (`

// deletePublished finds rows by place. Each partition has the same places, and a table may become partitioned, or a
// partition be divided, while a run is under way: so a row must also be that of the table and of the id. IS TRUE makes
// PostgreSQL look that up in a hash table: no index of an empty table and no join may look better than the places.
const deletePublished = `
    DELETE FROM {schema}.outbox WHERE ctid = ANY (ARRAY(SELECT place FROM published))
       AND ((tableoid, id) IN (SELECT part, id FROM published)) IS TRUE`

// countRemoved also names a relay whose position was not written in this cluster, and a relay that keeps back rows that
// are old enough: the next event of the relay is old. Above the ceiling there may be very many uncommitted rows. So the
// next event is first looked for among the next ids, and then in the order of transactions, behind the open window.
// Only if neither has an event is the window read by ids.
const countRemoved = `
)
SELECT ` + scannedColumns + `,
       (SELECT min(s.relay) FROM positions AS s, pg_control_system() AS here WHERE NOT ` + ofHere + `),
       (SELECT min(relay) FROM positions AS s
         WHERE highest_id = (SELECT id FROM ceiling)
           AND coalesce(
               (SELECT created_at FROM {schema}.outbox WHERE id > (SELECT id FROM ceiling) AND id <= (SELECT id + 1000 FROM ceiling) ORDER BY id LIMIT 1),
               (SELECT o.created_at FROM (
                       SELECT late.created_at FROM pg_snapshot_xip(coalesce(s.window_snapshot, s.snapshot)) AS x
                        CROSS JOIN LATERAL (SELECT created_at FROM {schema}.outbox
                                             WHERE xid >= x AND xid <= x AND id > (SELECT id FROM ceiling) ORDER BY xid, id LIMIT 1) AS late
                        WHERE ` + tables.Ended + `
                        UNION ALL
                       SELECT new.created_at FROM (SELECT pg_snapshot_xmax(coalesce(s.window_snapshot, s.snapshot)) AS bound, pg_current_snapshot() AS snapshot) AS b
                        CROSS JOIN LATERAL (` + tables.Gaps + `) AS g
                        CROSS JOIN LATERAL (SELECT created_at FROM {schema}.outbox
                                             WHERE ` + tables.InGap + ` AND id > (SELECT id FROM ceiling) ORDER BY xid, id LIMIT 1) AS new) AS o
                 LIMIT 1),
               (SELECT created_at FROM {schema}.outbox WHERE id > (SELECT id FROM ceiling) AND s.window_snapshot IS NOT NULL ORDER BY id LIMIT 1)
               ) < now() - $3::interval),
       (SELECT count(*) FROM ripe WHERE huge), (SELECT min(id) FROM ripe WHERE huge), (SELECT count(*) FROM gone)`

// scannedColumns are the number of rows that a batch scanned at, the last of them, the first
// that is too young, and the number of those that are too young.
const scannedColumns = `(SELECT count(*) FROM scanned), (SELECT max(id) FROM scanned),
       (SELECT min(id) FROM scanned WHERE NOT old), (SELECT count(*) FROM scanned WHERE NOT old)`

const deleteBelowCeiling = belowCeiling + publishedAmong + deletePublished + ` RETURNING *` + countRemoved

const sqlCleanPublished = publishedRows + deleteBelowCeiling

const sqlCleanArchived = archivedRows + deleteBelowCeiling + archivedColumns

// archivedColumns returns the rows as well, in the order of ids.
const archivedColumns = `, o.id, o.event_id::text, o.event_type, o.source, o.aggregate_type, o.aggregate_id,
       coalesce(o.payload_bytes, pg_catalog.convert_to(o.payload::text, 'UTF8')), o.content_type, o.payload IS NOT NULL, coalesce(o.topic, ''), coalesce(o.partition_key, ''),
       pg_catalog.convert_to((` + tables.Headers + `)::text, 'UTF8'), o.occurred_at, o.created_at
  FROM (VALUES (1)) AS head LEFT JOIN gone AS o ON true
 ORDER BY o.id`

// MaxArchiveBytes bounds the events that an Archive gets at once; one event may be larger, up to Store.Most.
const MaxArchiveBytes = 16 << 20

// Published removes rows of outbox above an id.
func (r *Store) Published(ctx context.Context, l *Proof, after int64) (Step, error) {
	return r.publishedBy(ctx, l, r.SQLPublished, r.SQLArchived, after, math.MaxInt64)
}

// publishedBy runs one of two statements, depending on whether there is an archive, over
// the ids above after and below end.
func (r *Store) publishedBy(ctx context.Context, l *Proof, plain, archived string, after, end int64) (Step, error) {
	sql := plain
	if r.Cfg.Archive != nil {
		sql = archived
	}
	bytes, most := int64(math.MaxInt64), math.MaxInt32
	if r.Cfg.Archive != nil {
		bytes, most = MaxArchiveBytes, r.Most
	}
	remove := func(db beginner) (s Step, err error) {
		err = r.transact(ctx, db, l, func(tx pgx.Tx) (int64, error) {
			rows, err := tx.Query(ctx, sql, after, r.batch, r.Cfg.PublishedFor, end, r.unreadable, bytes, most)
			if err != nil {
				return 0, err
			}
			var foreign, lagging pgtype.Text
			var huge pgtype.Int8
			var n int64
			var events []Row
			s, events, err = r.readStep(rows, r.batch, &foreign, &lagging, &n, &huge)
			s.Foreign, s.Lagging, s.huge = foreign.String, lagging.String, hugeRows{n, huge.Int64}
			if err != nil || len(events) == 0 {
				return s.Removed, err
			}
			return s.Removed, r.archive(ctx, tx, events)
		})
		return s, err
	}
	var s Step
	var err error
	if r.Cfg.Archive == nil || r.Callback == nil {
		s, err = remove(r.DB)
	} else {
		s, err = r.removeSeparately(ctx, remove)
	}
	return s, wrapClean("outbox", err)
}

// sqlArchiveIdle bounds how long a transaction is idle from now on.
const sqlArchiveIdle = `SELECT set_config('idle_in_transaction_session_timeout', $1::text, true)`

// sqlSentPlans enables the plan of [tables.SQLSent].
const sqlSentPlans = `SELECT set_config('enable_bitmapscan', 'on', true)`

// addSent adds where events were sent, as JSON.
func (r *Store) addSent(ctx context.Context, tx pgx.Tx, events []Row) error {
	if _, err := tx.Exec(ctx, sqlSentPlans); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, r.sqlSent, events[0].OutboxID, events[len(events)-1].OutboxID, tables.MostSentBytes)
	if err != nil {
		return err
	}
	places, err := tables.ReadSent(rows, func(id int64) bool {
		_, is := slices.BinarySearchFunc(events, id, func(e Row, id int64) int { return cmp.Compare(e.OutboxID, id) })
		return is
	})
	if errors.Is(err, tables.ErrSent) { // the events are worth more than their places
		return nil
	}
	for i := range events {
		if sent := places[events[i].OutboxID]; len(sent) > 0 && err == nil {
			events[i].Sent, err = json.Marshal(sent)
		}
	}
	return err
}

// archive calls the Archive of the host. It may take until ctx ends, and the rows are locked meanwhile. If the process
// is frozen they are free a little later.
func (r *Store) archive(ctx context.Context, tx pgx.Tx, events []Row) error {
	idle := "0"
	if deadline, ok := ctx.Deadline(); ok {
		idle = fmt.Sprintf("%dms", (max(time.Until(deadline), 0) + idleTimeout).Milliseconds())
	}
	if _, err := tx.Exec(ctx, sqlArchiveIdle, idle); err != nil {
		return err
	}
	if err := r.addSent(ctx, tx, events); err != nil {
		return fmt.Errorf("find where events were sent: %w", err)
	}
	if err := r.Cfg.Archive(ctx, tx, events); err != nil {
		return fmt.Errorf("archive: %w", err)
	}
	return nil
}

// sqlPrint prints the rows of a batch in the order of their ids, and returns the ids of
// those that it could print. It leaves out rows that are too large for the archive.
const sqlPrint = `
SELECT o.id
  FROM (SELECT * FROM {schema}.outbox WHERE id > $1 AND id < $2 AND id <> ALL ($3::bigint[]) AND size <= $5::int ORDER BY id LIMIT $4) AS o
 WHERE coalesce(octet_length(payload::text), 0) + coalesce(octet_length(headers::text), 0) >= 0`

const sqlNextRow = `SELECT id FROM {schema}.outbox WHERE id > $1 AND id < $2 AND id <> ALL ($3::bigint[]) AND size <= $4::int ORDER BY id LIMIT 1`

// lastPrintable returns the last row of a batch in front of the first that cannot be printed, and why that one cannot;
// nil if all can. A lock, which is no reason to blame a row, is ErrBusy.
func (r *Store) lastPrintable(ctx context.Context, after, end int64) (last int64, err error) {
	last = after
	err = r.transact(ctx, r.DB, nil, func(tx pgx.Tx) (int64, error) {
		rows, err := tx.Query(ctx, r.sqlPrint, after, end, r.unreadable, r.batch, r.Most)
		if err == nil {
			_, err = pgx.ForEachRow(rows, []any{&last}, func() error { return nil })
		}
		return 0, err
	})
	return last, err
}

// rowAfter returns the first row above an id, but for some rows and larger ones.
func (r *Store) rowAfter(ctx context.Context, after, end int64, but []int64, most int) (id int64, err error) {
	err = r.DB.QueryRow(ctx, r.sqlNextRow, after, end, but, most).Scan(&id)
	return id, err
}

// keepNext keeps the first row above an id from the next batches.
func (r *Store) keepNext(ctx context.Context, after, end int64) (id int64, err error) {
	if id, err = r.rowAfter(ctx, after, end, r.unreadable, r.Most); err == nil {
		r.unreadable = append(r.unreadable, id)
	}
	return id, err
}

// removeSeparately calls remove through callback. An archive that does not return keeps its
// transaction, because a transaction belongs to one goroutine. Its connection is closed, so
// PostgreSQL rolls back, and is no longer the pool's, so the host can close the pool.
func (r *Store) removeSeparately(ctx context.Context, remove func(db beginner) (Step, error)) (s Step, err error) {
	conn, err := pg.Borrow(ctx, r.DB)
	if err != nil {
		return s, err
	}
	result := make(chan Step, 1)
	err = r.Callback(ctx, func() error {
		defer conn.Return()
		s, err := remove(conn.Conn)
		result <- s
		return err
	})
	switch {
	case errors.Is(err, contain.ErrAbandoned):
		conn.Cut()
	case errors.Is(err, contain.ErrOmitted):
		conn.Return()
	case err == nil:
		s = <-result
	}
	return s, err
}

// readStep reads the result of a batch of at most limit rows, and the rows that it removed, if the statement
// returns them. extra are the columns in front of the count of removed rows.
func (r *Store) readStep(rows pgx.Rows, limit int, extra ...any) (s Step, events []Row, err error) {
	defer rows.Close()
	var youngs int64
	var last, young pgtype.Int8
	head := append([]any{&s.scanned, &last, &young, &youngs}, extra...)
	head = append(head, &s.Removed)
	archive := false
	for rows.Next() {
		var e Row
		raw, dst := rows.RawValues(), slices.Clone(head)
		switch {
		case len(raw) == len(head):
		case raw[len(head)] == nil: // nothing was removed
			dst = append(dst, make([]any, len(raw)-len(head))...)
		default:
			dst = append(dst, &e.OutboxID, &e.EventID, &e.Type, &e.Source, &e.AggregateType, &e.AggregateID, &e.Payload, &e.ContentType, &e.JSON,
				&e.Topic, &e.PartitionKey, &e.Headers, pg.Time{At: &e.OccurredAt}, pg.Time{At: &e.CreatedAt})
		}
		if err := rows.Scan(dst...); err != nil {
			return s, nil, err
		}
		archive = len(dst) > len(head)
		if e.OutboxID > 0 {
			events = append(events, e)
		}
	}
	s.Last, s.Young = last.Int64, young.Int64
	s.full = s.scanned == int64(limit) || archive && s.scanned > 0 // maxArchiveBytes may have ended it
	s.More = s.full && youngs < s.scanned
	return s, events, rows.Err()
}
