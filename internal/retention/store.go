package retention

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

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
	// Most bounds the size of an event that the Archive gets, in bytes. The row of a larger one stays.
	Most int

	// Callback runs a transaction with the Archive of the host, which may panic or hang. Nil
	// runs it here.
	Callback func(ctx context.Context, transaction func() error) error

	// batch is how many rows of outbox the next batch reads: fewer than Rules.BatchSize after one that took too long.
	batch int

	// unreadable are rows that cannot be archived, and stay until the process ends. Never nil,
	// which would be NULL.
	unreadable []int64
	// hugeIn has, by the name of the partition, a row that is too large for the archive.
	hugeIn map[string]int64

	SQLPublished, SQLArchived, SQLCursors, SQLResolved, SQLHandled, sqlAudited, sqlDelivered, sqlRelay, SQLProof, sqlPrint, sqlNextRow, sqlSent string
	sqlNoteArchiver, sqlArchiver                                                                                                                string

	partitions
}

// NewStore returns a store of the schema. It does no I/O.
func NewStore(db *pgxpool.Pool, schema string, cfg Rules) *Store {
	cfg.BatchSize = cmp.Or(cfg.BatchSize, defaultBatchSize)
	return &Store{
		DB: db, Cfg: cfg, Most: MaxArchiveBytes, batch: cfg.BatchSize, unreadable: []int64{}, hugeIn: map[string]int64{},
		SQLPublished:    pg.InSchema(sqlCleanPublished, schema),
		SQLArchived:     pg.InSchema(sqlCleanArchived, schema),
		SQLCursors:      pg.InSchema(sqlCleanCursors, schema),
		SQLResolved:     pg.InSchema(sqlCleanResolved, schema),
		SQLHandled:      pg.InSchema(sqlCleanHandled, schema),
		sqlAudited:      pg.InSchema(sqlCleanAudited, schema),
		sqlDelivered:    pg.InSchema(sqlCleanDelivered, schema),
		sqlRelay:        pg.InSchema(sqlHasRelay, schema),
		SQLProof:        pg.InSchema(cursor.SQLRebaseProof, schema),
		sqlPrint:        pg.InSchema(sqlPrint, schema),
		sqlNextRow:      pg.InSchema(sqlNextRow, schema),
		sqlSent:         pg.InSchema(tables.SQLSent, schema),
		sqlNoteArchiver: pg.InSchema(sqlNoteArchiver, schema),
		sqlArchiver:     pg.InSchema(sqlArchiver, schema),
		partitions:      newPartitions(schema),
	}
}

// SQLCleanSettings is pg.PlannerSettings for statements that wait for locks for 100 ms
// at most: another relay of the schema may be removing the same rows. An archive may take
// longer than a transaction_timeout of the role. A process that is frozen keeps rows, and
// the row of its lease, for idleTimeout.
const SQLCleanSettings = pg.PlannerSettings + `, ` + pg.TextFormats + `, set_config('lock_timeout', '100ms', true),
       set_config('idle_in_transaction_session_timeout', '10s', true), ` + pg.NoTransactionTimeout

// idleTimeout is the idle_in_transaction_session_timeout of SQLCleanSettings.
const idleTimeout = 10 * time.Second

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

// removeOld runs a statement that removes rows of a table above an id: old is how long they are kept. It proves the
// lease if l is set.
func (r *Store) removeOld(ctx context.Context, l *Proof, table, sql string, after int64, old ...any) (s Step, err error) {
	args := append([]any{after, r.Cfg.BatchSize}, old...)
	err = r.transact(ctx, r.DB, l, func(tx pgx.Tx) (int64, error) {
		rows, err := tx.Query(ctx, sql, args...)
		if err == nil {
			s, _, err = r.readStep(rows, r.Cfg.BatchSize)
		}
		return s.Removed, err
	})
	return s, wrapClean(table, err)
}

// thinAfter is the age from which on the history of cursors has one row for each minute.
const thinAfter = time.Hour

// sqlCleanCursors removes history: all rows but the first of each relay and minute, and
// the rows that are older than $3. The newest row of a relay stays, whatever its age, and so do the row that it names
// as confirmed and those behind it, and a row that says where events of outbox are, as long as one of them is there.
const sqlCleanCursors = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, relay, created_at, sent_from, sent_to, created_at < now() - least($3::interval, $4::interval) AS old
      FROM {schema}.outbox_cursor WHERE id > $1 ORDER BY id LIMIT $2
), newest AS MATERIALIZED (
    SELECT n.relay, (SELECT coalesce(confirmed, id) FROM {schema}.outbox_cursor
                      WHERE relay >= n.relay AND relay <= n.relay ORDER BY relay DESC, id DESC LIMIT 1) AS id
      FROM (SELECT DISTINCT relay FROM scanned) AS n
), ripe AS MATERIALIZED (
    SELECT l.place
      FROM (SELECT *, row_number() OVER (PARTITION BY relay, date_trunc('minute', created_at) ORDER BY id) AS n FROM scanned) AS l
      JOIN newest ON newest.relay = l.relay
     WHERE l.old AND l.id < newest.id AND (l.n > 1 OR l.created_at < now() - $3::interval)
       AND (SELECT o.id FROM {schema}.outbox AS o WHERE o.id >= l.sent_from AND o.id <= l.sent_to ORDER BY o.id LIMIT 1) IS NULL
)
SELECT ` + scannedColumns + `, {schema}.outbox_remove_cursors(ARRAY(SELECT place FROM ripe))`

// Cursors removes rows of outbox_cursor above an id.
func (r *Store) Cursors(ctx context.Context, l *Proof, after int64) (Step, error) {
	return r.removeOld(ctx, l, "outbox_cursor", r.SQLCursors, after, r.Cfg.CursorsFor, thinAfter)
}

// sqlCleanHandled removes rows of event_handled. A consumer that updates one has made it as
// young as a new one, and one that is about to be removed it writes anew.
const sqlCleanHandled = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, handled_at < now() - $3::interval AS old
      FROM {schema}.event_handled WHERE id > $1 ORDER BY id LIMIT $2
)
SELECT ` + scannedColumns + `, {schema}.outbox_remove_handled(ARRAY(SELECT place FROM scanned WHERE old), now() - $3::interval)`

// handled removes rows of event_handled above an id. It needs no lease: only the age of
// a row decides, whichever process removes it.
func (r *Store) handled(ctx context.Context, after int64) (Step, error) {
	return r.removeOld(ctx, nil, "event_handled", r.SQLHandled, after, r.Cfg.HandledFor)
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
	return r.removeOld(ctx, nil, "outbox_audit", r.sqlAudited, after, r.Cfg.AuditedFor)
}

// sqlCleanDelivered removes rows of event_delivery that are handled or resolved. A row that an
// operator requeues meanwhile stays, because the function looks at its conditions once more.
const sqlCleanDelivered = `
WITH scanned AS MATERIALIZED (
    SELECT ctid AS place, id, greatest(processed_at, resolved_at) < now() - $3::interval AS ripe, created_at < now() - $3::interval AS old
      FROM {schema}.event_delivery WHERE id > $1 ORDER BY id LIMIT $2
)
SELECT ` + scannedColumns + `, {schema}.outbox_remove_deliveries(ARRAY(SELECT place FROM scanned WHERE ripe), now() - $3::interval)`

// delivered removes rows of event_delivery above an id. It needs no lease, as above.
func (r *Store) delivered(ctx context.Context, after int64) (Step, error) {
	return r.removeOld(ctx, nil, "event_delivery", r.sqlDelivered, after, r.Cfg.DeliveredFor)
}

// sqlHasRelay finds out whether a relay has a position: one whose name is not a group's.
const sqlHasRelay = tables.NewestCursors + `
SELECT EXISTS (SELECT FROM positions WHERE NOT pg_catalog.starts_with(relay, '` + tables.WorkerPrefix + `'))`

// HasRelay reports whether a relay publishes the events, or did and may do so again.
func (r *Store) HasRelay(ctx context.Context) (has bool, err error) {
	err = pg.Query(ctx, r.DB, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		has, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		return err
	}, r.sqlRelay)
	return has, wrapClean("tables", err)
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
