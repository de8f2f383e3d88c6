package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// forever keeps rows.
const forever time.Duration = math.MaxInt64

// Rules say how long rows are kept. RetentionConfig of the package outbox describes them.
type Rules struct {
	PublishedFor time.Duration
	CursorsFor   time.Duration
	ResolvedFor  time.Duration
	HandledFor   time.Duration
	AuditedFor   time.Duration
	DeliveredFor time.Duration

	BatchSize int // rows that a transaction reads

	Archive func(ctx context.Context, tx pgx.Tx, rows []Row) error
}

// Row is a row of outbox.
type Row struct {
	OutboxID                                          int64
	EventID, Type, Source, AggregateType, AggregateID string
	Payload                                           []byte
	ContentType                                       string
	JSON                                              bool
	Topic, PartitionKey                               string
	Headers                                           []byte
	OccurredAt, CreatedAt                             time.Time
}

// Envelope returns the event as a relay reads it.
func (r Row) Envelope() *envelope.Event {
	return &envelope.Event{
		ID:            r.OutboxID,
		EventID:       []byte(r.EventID),
		EventType:     []byte(r.Type),
		Source:        []byte(r.Source),
		AggregateType: []byte(r.AggregateType),
		AggregateID:   []byte(r.AggregateID),
		Payload:       r.Payload,
		IsJSON:        r.JSON,
		ContentType:   []byte(r.ContentType),
		Topic:         bytesOrNil(r.Topic),
		PartitionKey:  bytesOrNil(r.PartitionKey),
		Headers:       r.Headers,
		OccurredAt:    envelope.AppendTime(nil, r.OccurredAt),
	}
}

// bytesOrNil returns the bytes of a text, nil for an empty one.
func bytesOrNil(text string) []byte {
	if text == "" {
		return nil
	}
	return []byte(text)
}

// Result is how many rows a run removed.
type Result struct {
	Published, Cursors, Resolved, Handled, Audited, Delivered int64
}

func (c Result) total() int64 {
	return c.Published + c.Cursors + c.Resolved + c.Handled + c.Audited + c.Delivered
}

const (
	longestInterval  = 10 * time.Minute
	shortestInterval = 5 * time.Millisecond
	shortestPause    = 50 * time.Millisecond
	pauseInBatches   = 4 // how many times as long as a batch the pause after it is
)

// Interval returns the time between two runs, and before the first: a tenth of the shortest duration for which rows
// are kept, at most 10 minutes.
func (r Rules) Interval() time.Duration {
	interval := longestInterval
	for _, keep := range []time.Duration{r.PublishedFor, r.CursorsFor, r.ResolvedFor, r.HandledFor, r.AuditedFor, r.DeliveredFor} {
		if keep > 0 {
			interval = min(interval, keep/10)
		}
	}
	return max(interval, shortestInterval)
}

// PauseAfter returns how long to wait after a batch that took some time.
func (r Rules) PauseAfter(took time.Duration) time.Duration {
	return max(min(shortestPause, r.Interval()), pauseInBatches*took)
}

// CleanHandled removes old rows of event_handled and event_delivery.
func CleanHandled(ctx context.Context, db *pgxpool.Pool, schema string, cfg Rules) (int64, error) {
	store, removed := NewStore(db, schema, cfg), int64(0)
	for _, table := range []struct {
		keep  time.Duration
		batch func(context.Context, int64) (Step, error)
	}{{cfg.HandledFor, store.handled}, {cfg.DeliveredFor, store.delivered}} {
		if table.keep == forever {
			continue
		}
		w := Scan{Batch: table.batch, Pause: func(took time.Duration) bool {
			wait.Sleep(ctx, cfg.PauseAfter(took))
			return ctx.Err() == nil
		}}
		n, err := w.Run(ctx)
		removed += n
		if err == nil {
			err = ctx.Err()
		}
		if err != nil && !errors.Is(err, ErrBusy) {
			return removed, err
		}
	}
	return removed, nil
}

// Store removes rows that are not kept any longer.
type Store struct {
	DB  *pgxpool.Pool
	Cfg Rules

	// Callback runs a transaction with the Archive of the host, which may panic or hang. Nil
	// runs it here.
	Callback func(ctx context.Context, transaction func() error) error

	// unreadable are rows that cannot be archived, and stay until the process ends. Never nil,
	// which would be NULL.
	unreadable []int64

	SQLPublished, SQLArchived, SQLCursors, SQLResolved, SQLHandled, sqlAudited, sqlDelivered, sqlRelay, SQLProof, sqlPrint, sqlNextRow string

	partitions
}

// NewStore returns a store of the schema. It does no I/O.
func NewStore(db *pgxpool.Pool, schema string, cfg Rules) *Store {
	return &Store{
		DB: db, Cfg: cfg, unreadable: []int64{},
		SQLPublished: pg.InSchema(sqlCleanPublished, schema),
		SQLArchived:  pg.InSchema(sqlCleanArchived, schema),
		SQLCursors:   pg.InSchema(sqlCleanCursors, schema),
		SQLResolved:  pg.InSchema(sqlCleanResolved, schema),
		SQLHandled:   pg.InSchema(sqlCleanHandled, schema),
		sqlAudited:   pg.InSchema(sqlCleanAudited, schema),
		sqlDelivered: pg.InSchema(sqlCleanDelivered, schema),
		sqlRelay:     pg.InSchema(sqlHasRelay, schema),
		SQLProof:     pg.InSchema(cursor.SQLRebaseProof, schema),
		sqlPrint:     pg.InSchema(sqlPrint, schema),
		sqlNextRow:   pg.InSchema(sqlNextRow, schema),
		partitions:   newPartitions(schema),
	}
}

// SQLCleanSettings is pg.PlannerSettings for statements that wait for locks for 100 ms
// at most: another relay of the schema may be removing the same rows.
const SQLCleanSettings = pg.PlannerSettings + `, set_config('lock_timeout', '100ms', true)`

// ErrBusy means that another transaction has locked rows that this one would remove. It
// is rolled back, and the next run tries again.
var ErrBusy = errors.New("rows are locked")

// beginner begins transactions: a pool, or a connection.
type beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// transact calls remove in a transaction, and proves the lease if l is set. The proof
// locks the row of the lease, so it comes last: renewing the lease must not have to wait
// for an archive.
func (r *Store) transact(ctx context.Context, db beginner, l *Proof, remove func(pgx.Tx) (removed int64, err error)) error {
	err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, SQLCleanSettings); err != nil {
			return err
		}
		removed, err := remove(tx)
		if err != nil || removed == 0 || l == nil {
			return err
		}
		tag, err := tx.Exec(ctx, r.SQLProof, l.Relay, l.Holder, l.Epoch)
		if err == nil && tag.RowsAffected() == 0 {
			err = lease.ErrLeaseLost
		}
		return err
	})
	if pg.IsLocked(err) {
		return ErrBusy
	}
	return err
}

// Proof is a lease and the name of its relay.
type Proof struct {
	*lease.Lease
	Relay string
}

// publishedRows and the constants below find and remove published rows. Whether a row is
// published follows from the newest row of each relay's cursor, as in sqlRebase, and
// never from an age or an id: a transaction that was prepared long ago may commit today,
// and then its rows are old and have low ids, but no relay has seen them. A published row
// stays published, so cursors may move meanwhile. If a crash of PostgreSQL forgets rows
// of outbox_cursor, it also forgets everything that was committed after them, our
// removals included. If a cursor belongs to another cluster, or if there is no cursor, no
// row is removed.
//
// No relay has published an id above its highest_id, so no row above the lowest
// highest_id is scanned at: rows that a lagging relay keeps back cost nothing. The names of
// relays and their newest rows are found one by one; with "relay = name" the planner might
// read the history of all relays. Rows are deleted by ctid, because to the planner any
// index of an empty table looks as good as any other.
//
// A row of which a failed event of class UnreadableRow tells stays until the event is
// resolved, or has a payload: its payload is nowhere else. $5 are rows that cannot be
// archived; $6 bounds the bytes of a batch.
const publishedRows = tables.NewestCursors + `, ceiling AS MATERIALIZED (
    SELECT min(s.highest_id) AS id
      FROM positions AS s, pg_control_system() AS here
    HAVING bool_and(s.system_identifier = here.system_identifier
                    AND pg_snapshot_xmax(coalesce(s.window_snapshot, s.snapshot)) <= pg_snapshot_xmax(pg_current_snapshot()))
       AND coalesce((SELECT xid FROM {schema}.outbox ORDER BY xid DESC, id DESC LIMIT 1) < pg_snapshot_xmax(pg_current_snapshot()), true)
), scanned AS MATERIALIZED (
    SELECT part, place, id, xid, old FROM (
        SELECT tableoid AS part, ctid AS place, id, xid, created_at < now() - $3::interval AS old, sum(size) OVER (ORDER BY id) - size AS bytes
          FROM {schema}.outbox WHERE id > $1 AND id < $4`

// belowCeiling is the upper bound for statements that delete.
const belowCeiling = ` AND id <= (SELECT id FROM ceiling)`

const publishedAmong = ` ORDER BY id LIMIT $2) AS o
     WHERE bytes < $6::bigint
), published AS MATERIALIZED (
    SELECT o.part, o.place, o.id FROM scanned AS o
     WHERE o.old AND (SELECT id FROM ceiling) IS NOT NULL AND NOT EXISTS (
           SELECT FROM positions AS s
            WHERE NOT ` + tables.Attempted + `)
       AND o.id <> ALL ($5::bigint[])
       AND o.id NOT IN (
           SELECT outbox_id FROM {schema}.outbox_failed
            WHERE error_class = 'unreadable_row' AND status <> 'resolved' AND outbox_id > $1 AND outbox_id <= (SELECT max(id) FROM scanned))
), gone AS (`

const deletePublished = `
    DELETE FROM {schema}.outbox WHERE ctid = ANY (ARRAY(SELECT place FROM published))`

const countRemoved = `
)
SELECT ` + scannedColumns + `,
       (SELECT min(relay) FROM positions
         WHERE highest_id = (SELECT id FROM ceiling)
           AND (SELECT created_at FROM {schema}.outbox WHERE id > (SELECT id FROM ceiling) ORDER BY id LIMIT 1) < now() - $3::interval),
       (SELECT count(*) FROM gone)`

// scannedColumns are the number of rows that a batch scanned at, the last of them, the first
// that is too young, and the number of those that are too young.
const scannedColumns = `(SELECT count(*) FROM scanned), (SELECT max(id) FROM scanned),
       (SELECT min(id) FROM scanned WHERE NOT old), (SELECT count(*) FROM scanned WHERE NOT old)`

const sqlCleanPublished = publishedRows + belowCeiling + publishedAmong + deletePublished + ` RETURNING *` + countRemoved

const sqlCleanArchived = sqlCleanPublished + archivedColumns

// archivedColumns returns the rows as well, in the order of ids.
const archivedColumns = `, g.id, g.event_id::text, g.event_type, g.source, g.aggregate_type, g.aggregate_id,
       coalesce(g.payload_bytes, convert_to(g.payload::text, 'UTF8')), g.content_type, g.payload IS NOT NULL, coalesce(g.topic, ''), coalesce(g.partition_key, ''),
       convert_to(g.headers::text, 'UTF8'), g.occurred_at, g.created_at
  FROM (VALUES (1)) AS head LEFT JOIN gone AS g ON true
 ORDER BY g.id`

// MaxArchiveBytes bounds the events that an Archive gets at once, as their rows say; one
// event may be larger.
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
	limit, bytes := r.Cfg.BatchSize, int64(math.MaxInt64)
	if r.Cfg.Archive != nil {
		bytes = MaxArchiveBytes
	}
	remove := func(db beginner) (s Step, err error) {
		err = r.transact(ctx, db, l, func(tx pgx.Tx) (int64, error) {
			rows, err := tx.Query(ctx, sql, after, limit, r.Cfg.PublishedFor, end, r.unreadable, bytes)
			if err != nil {
				return 0, err
			}
			var lagging pgtype.Text
			var events []Row
			s, events, err = r.readStep(rows, &lagging)
			s.Lagging = lagging.String
			if err != nil || len(events) == 0 {
				return s.Removed, err
			}
			if err := r.Cfg.Archive(ctx, tx, events); err != nil {
				return 0, fmt.Errorf("archive: %w", err)
			}
			return s.Removed, nil
		})
		return s, err
	}
	for {
		var s Step
		var err error
		if r.Cfg.Archive == nil || r.Callback == nil {
			s, err = remove(r.DB)
		} else {
			s, err = r.removeSeparately(ctx, remove)
		}
		if !errors.Is(err, cursor.ErrTooMuch) {
			return s, wrapClean("outbox", err)
		}
		limit = max(1, limit/8)
	}
}

// sqlPrint prints the rows of a batch in the order of their ids, and returns the ids of
// those that it could print.
const sqlPrint = `
SELECT o.id
  FROM (SELECT * FROM {schema}.outbox WHERE id > $1 AND id < $2 AND id <> ALL ($3::bigint[]) ORDER BY id LIMIT $4) AS o
 WHERE coalesce(octet_length(payload::text), 0) + coalesce(octet_length(headers::text), 0) >= 0`

const sqlNextRow = `SELECT id FROM {schema}.outbox WHERE id > $1 AND id < $2 AND id <> ALL ($3::bigint[]) ORDER BY id LIMIT 1`

// lastPrintable returns the last row of a batch in front of the first that cannot be
// printed, and why that one cannot; nil if all can.
func (r *Store) lastPrintable(ctx context.Context, after, end int64) (last int64, err error) {
	last = after
	err = pg.Query(ctx, r.DB, SQLCleanSettings, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&last}, func() error { return nil })
		return err
	}, r.sqlPrint, after, end, r.unreadable, r.Cfg.BatchSize)
	return last, err
}

// keepNext keeps the first row above an id from the next batches.
func (r *Store) keepNext(ctx context.Context, after, end int64) (id int64, err error) {
	if err := r.DB.QueryRow(ctx, r.sqlNextRow, after, end, r.unreadable).Scan(&id); err != nil {
		return 0, err
	}
	r.unreadable = append(r.unreadable, id)
	return id, nil
}

// cannotPrint reports whether PostgreSQL could not print rows, or not in time.
func cannotPrint(err error) bool {
	return pg.IsUnreadable(err) || pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
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

// readStep reads the result of a batch, and the rows that it removed, if the statement
// returns them. extra are the columns in front of the count of removed rows.
func (r *Store) readStep(rows pgx.Rows, extra ...any) (s Step, events []Row, err error) {
	defer rows.Close()
	var youngs int64
	var last, young pgtype.Int8
	head := append([]any{&s.scanned, &last, &young, &youngs}, extra...)
	head = append(head, &s.Removed)
	archive, bytes := false, 0
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
		if bytes += len(e.Payload) + len(e.Headers); bytes > 2*MaxArchiveBytes && len(events) > 0 {
			return s, events, cursor.ErrTooMuch
		}
		if e.OutboxID > 0 {
			events = append(events, e)
		}
	}
	s.Last, s.Young = last.Int64, young.Int64
	s.full = s.scanned == int64(r.Cfg.BatchSize) || archive && s.scanned > 0 // maxArchiveBytes may have ended it
	s.More = s.full && youngs < s.scanned
	return s, events, rows.Err()
}

// thinAfter is the age from which on the history of cursors has one row for each minute.
const thinAfter = time.Hour

// sqlCleanCursors removes history: all rows but the first of each relay and minute, and
// the rows that are older than $3. The newest row of a relay stays, whatever its age; no
// statement reads any other. Each scan begins at the start of the table, which is short
// after the first scan.
const sqlCleanCursors = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, relay, created_at, created_at < now() - least($3::interval, $4::interval) AS old
      FROM {schema}.outbox_cursor WHERE id > $1 ORDER BY id LIMIT $2
), newest AS MATERIALIZED (
    SELECT n.relay, (SELECT id FROM {schema}.outbox_cursor
                      WHERE relay >= n.relay AND relay <= n.relay ORDER BY relay DESC, id DESC LIMIT 1) AS id
      FROM (SELECT DISTINCT relay FROM scanned) AS n
), ripe AS MATERIALIZED (
    SELECT l.place
      FROM (SELECT *, row_number() OVER (PARTITION BY relay, date_trunc('minute', created_at) ORDER BY id) AS n FROM scanned) AS l
      JOIN newest ON newest.relay = l.relay
     WHERE l.old AND l.id < newest.id AND (l.n > 1 OR l.created_at < now() - $3::interval)
), gone AS (
    DELETE FROM {schema}.outbox_cursor WHERE ctid = ANY (ARRAY(SELECT place FROM ripe)) RETURNING id
)
SELECT ` + scannedColumns + `, (SELECT count(*) FROM gone)`

// Cursors removes rows of outbox_cursor above an id.
func (r *Store) Cursors(ctx context.Context, l *Proof, after int64) (Step, error) {
	s, err := r.step(ctx, l, r.SQLCursors, after, r.Cfg.BatchSize, r.Cfg.CursorsFor, thinAfter)
	return s, wrapClean("outbox_cursor", err)
}

// sqlCleanHandled removes rows of event_handled. A consumer that updates one has made it as
// young as a new one, and one that is about to be removed it writes anew.
const sqlCleanHandled = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, handled_at < now() - $3::interval AS old
      FROM {schema}.event_handled WHERE id > $1 ORDER BY id LIMIT $2
), gone AS (
    DELETE FROM {schema}.event_handled WHERE ctid = ANY (ARRAY(SELECT place FROM scanned WHERE old)) RETURNING id
)
SELECT ` + scannedColumns + `, (SELECT count(*) FROM gone)`

// handled removes rows of event_handled above an id. It needs no lease: only the age of
// a row decides, whichever process removes it.
func (r *Store) handled(ctx context.Context, after int64) (Step, error) {
	s, err := r.step(ctx, nil, r.SQLHandled, after, r.Cfg.BatchSize, r.Cfg.HandledFor)
	return s, wrapClean("event_handled", err)
}

// sqlCleanAudited removes rows of outbox_audit. Nothing updates them.
const sqlCleanAudited = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, created_at < now() - $3::interval AS old
      FROM {schema}.outbox_audit WHERE id > $1 ORDER BY id LIMIT $2
), gone AS (
    DELETE FROM {schema}.outbox_audit WHERE ctid = ANY (ARRAY(SELECT place FROM scanned WHERE old)) RETURNING id
)
SELECT ` + scannedColumns + `, (SELECT count(*) FROM gone)`

// Audited removes rows of outbox_audit above an id. It needs no lease, as above.
func (r *Store) Audited(ctx context.Context, after int64) (Step, error) {
	s, err := r.step(ctx, nil, r.sqlAudited, after, r.Cfg.BatchSize, r.Cfg.AuditedFor)
	return s, wrapClean("outbox_audit", err)
}

// sqlCleanDelivered removes rows of event_delivery that are handled or resolved. A row that an
// operator requeues meanwhile stays, because its conditions are scanned at once more.
const sqlCleanDelivered = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, greatest(processed_at, resolved_at) < now() - $3::interval AS ripe, created_at < now() - $3::interval AS old
      FROM {schema}.event_delivery WHERE id > $1 ORDER BY id LIMIT $2
), gone AS (
    DELETE FROM {schema}.event_delivery
     WHERE ctid = ANY (ARRAY(SELECT place FROM scanned WHERE ripe)) AND (status = 'DONE' OR status = 'DEAD' AND resolved_at IS NOT NULL)
 RETURNING id
)
SELECT ` + scannedColumns + `, (SELECT count(*) FROM gone)`

// delivered removes rows of event_delivery above an id. It needs no lease, as above.
func (r *Store) delivered(ctx context.Context, after int64) (Step, error) {
	s, err := r.step(ctx, nil, r.sqlDelivered, after, r.Cfg.BatchSize, r.Cfg.DeliveredFor)
	return s, wrapClean("event_delivery", err)
}

// sqlHasRelay finds out whether a relay has a position: one whose name is not a group's.
const sqlHasRelay = tables.NewestCursors + `
SELECT EXISTS (SELECT FROM positions WHERE NOT starts_with(relay, '` + tables.WorkerPrefix + `'))`

// HasRelay reports whether a relay publishes the events, or did and may do so again.
func (r *Store) HasRelay(ctx context.Context) (has bool, err error) {
	err = pg.Query(ctx, r.DB, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		has, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		return err
	}, r.sqlRelay)
	return has, wrapClean("tables", err)
}

// Step runs a statement that returns one row.
func (r *Store) step(ctx context.Context, l *Proof, sql string, args ...any) (s Step, err error) {
	err = r.transact(ctx, r.DB, l, func(tx pgx.Tx) (int64, error) {
		rows, err := tx.Query(ctx, sql, args...)
		if err == nil {
			s, _, err = r.readStep(rows)
		}
		return s.Removed, err
	})
	return s, err
}

// sqlCleanResolved removes resolved rows of outbox_failed, and sets the time of those that
// an operator resolved without a time. Rows are locked first, because a row that is
// changed back meanwhile must stay. Rows locked by another transaction are skipped.
const sqlCleanResolved = `
WITH timeless AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE status = 'resolved' AND resolved_at IS NULL ORDER BY resolved_at LIMIT $1 FOR UPDATE SKIP LOCKED
), timed AS (
    UPDATE {schema}.outbox_failed SET resolved_at = now() WHERE id = ANY (ARRAY(SELECT id FROM timeless)) RETURNING id
), ripe AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_failed
     WHERE status = 'resolved' AND resolved_at < now() - $2::interval ORDER BY resolved_at LIMIT $1 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.outbox_failed WHERE id = ANY (ARRAY(SELECT id FROM ripe)) RETURNING id
)
SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM timed)`

// Resolved removes rows of outbox_failed.
func (r *Store) Resolved(ctx context.Context, l *Proof) (s Step, err error) {
	var timed int64
	err = r.transact(ctx, r.DB, l, func(tx pgx.Tx) (int64, error) {
		err := tx.QueryRow(ctx, r.SQLResolved, r.Cfg.BatchSize, r.Cfg.ResolvedFor).Scan(&s.Removed, &timed)
		return s.Removed + timed, err
	})
	s.More = max(s.Removed, timed) == int64(r.Cfg.BatchSize)
	return s, wrapClean("outbox_failed", err)
}

func wrapClean(table string, err error) error {
	if err != nil {
		return fmt.Errorf("clean %s: %w", table, err)
	}
	return nil
}
