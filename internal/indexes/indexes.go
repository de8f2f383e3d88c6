// Package indexes builds optional indexes of the table outbox while it is in use.
package indexes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// Index is an index of outbox.
type Index struct {
	name    string
	suffix  string // of its name in a partition
	unique  bool
	columns string
}

var (
	// Aggregate is for the events of an aggregate in their order.
	Aggregate = Index{name: "outbox_aggregate_idx", suffix: "_aggregate_idx", columns: "(aggregate_type, aggregate_id, id)"}
	// EventID keeps ids of events unique.
	EventID = Index{name: "outbox_event_id_key", suffix: "_event_id_key", unique: true, columns: "(event_id)"}
)

// Name returns the name of the index of outbox.
func (x Index) Name() string { return x.name }

var (
	// ErrPartitioned means that outbox has partitions, and the index must not be one of each of them.
	ErrPartitioned = errors.New("outbox is partitioned")
	// ErrOneConnection means that a pool is too small.
	ErrOneConnection = errors.New("the pool has one connection, and two are needed")
)

// errTaken means that another session has the lock of those that build indexes.
var errTaken = errors.New("another session builds an index")

const (
	look    = 200 * time.Millisecond // how often is looked whether another process has built the index
	quietly = 2 * time.Second        // how long another process may build until that is logged
)

// lockIdle is how long the lock outlives a process that does not go on.
var lockIdle = 30 * time.Second

// Build builds an index unless it is there. Readers and writers of events wait for it no longer
// than one try for a lock. An unfinished index that an ended process has left is built again. Of
// several processes that call Build, one builds and the others wait, and log which session builds.
func Build(ctx context.Context, db *pgxpool.Pool, schema string, x Index, log *slog.Logger) error {
	if db.Config().MaxConns < 2 { // one of them has the lock
		return fmt.Errorf("build index %s: %w", x.name, ErrOneConnection)
	}
	b := &builder{db: db, schema: schema, index: x, log: log}
	waiting, began := outage.NewLog(log, "index "+x.name), time.Now()
	for {
		done, err := b.try(ctx)
		switch {
		case ctx.Err() != nil:
			return errors.Join(ctx.Err(), err)
		case errors.Is(err, errTaken):
			if time.Since(began) > quietly && waiting.Current() == nil {
				if err == errTaken { //nolint:errorlint // without more
					err = fmt.Errorf("%w: %s", err, pg.AdvisoryHolder(ctx, db, lockName+schema))
				}
				waiting.Report(err)
			}
		case err != nil && !pg.IsTransient(err): // a deadlock with another process that builds an index is transient
			return fmt.Errorf("build index %s: %w", x.name, err)
		case done:
			waiting.Report(nil)
			return nil
		}
		wait.Sleep(ctx, look)
	}
}

// IsThere reports whether outbox has an index that can be used.
func IsThere(ctx context.Context, db *pgxpool.Pool, schema string, x Index) (bool, error) {
	b := &builder{db: db, schema: schema, index: x}
	s, err := b.state(ctx)
	return err == nil && s.ready, err
}

// builder builds an index. It belongs to one goroutine.
type builder struct {
	db     *pgxpool.Pool
	schema string
	index  Index
	log    *slog.Logger
}

// try builds the index if it is not there and no other process builds it.
//
// CREATE INDEX CONCURRENTLY runs in no transaction, so another connection has the lock. The
// statement waits for all older snapshots. So neither the holder of the lock nor a waiting process
// may have a snapshot: each waiting process asks for the lock again and again. Under the extended
// protocol an idle transaction keeps the snapshot of its last statement, hence the simple protocol.
// PostgreSQL ends the transaction of a process that is frozen, so try pings it.
func (b *builder) try(ctx context.Context) (done bool, err error) {
	s, err := b.state(ctx)
	if err != nil || s.ready {
		return err == nil, err
	}
	tx, err := b.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var locked bool
	err = tx.QueryRow(ctx, sqlLock, pgx.QueryExecModeSimpleProtocol, b.schema, strconv.FormatInt(lockIdle.Milliseconds(), 10)).Scan(&locked)
	switch {
	case err != nil:
		return false, err
	case !locked:
		return false, errTaken
	}
	defer keepPinging(ctx, tx.Conn())()
	if s, err = b.state(ctx); err != nil || s.ready { // by now
		return err == nil, err
	}
	switch {
	case s.partitioned && b.index.unique:
		return false, ErrPartitioned
	case !s.partitioned && s.on != "" && s.on != "outbox":
		return false, fmt.Errorf("table %s has an index of this name, rename it", s.on)
	}
	b.log.Info("outbox: an index of outbox is built, writers go on meanwhile", "index", b.index.name, "schema", b.schema)
	began := time.Now()
	if s.partitioned {
		err = b.buildInPartitions(ctx, s)
	} else {
		err = b.buildIn(ctx, "outbox", b.index.name)
	}
	if err == nil { // a partition may have come or gone
		s, err = b.state(ctx)
	}
	if err != nil || !s.ready {
		return false, err
	}
	b.log.Info("outbox: the index is built", "index", b.index.name, "schema", b.schema, "took", time.Since(began).Round(time.Millisecond))
	return true, nil
}

// keepPinging keeps a transaction from being idle for long, until stop is called. Nothing else may use its connection
// meanwhile.
func keepPinging(ctx context.Context, conn *pgx.Conn) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var pinging sync.WaitGroup
	pinging.Go(func() {
		for err := error(nil); err == nil; err = ping(ctx, conn) { // without the lock, the process builds on
			if wait.Sleep(ctx, lockIdle/6); ctx.Err() != nil {
				return
			}
		}
	})
	return func() {
		cancel()
		pinging.Wait()
	}
}

// ping is not cut off by the end of ctx, which would end the connection.
func ping(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lockIdle)
	defer cancel()
	return conn.Ping(ctx)
}

const lockName = "outbox.indexes."

const sqlLock = `
SELECT pg_try_advisory_xact_lock(hashtextextended('` + lockName + `' || $1, 0::bigint))
  FROM (SELECT set_config('idle_in_transaction_session_timeout', $2, true), set_config('statement_timeout', '0', true),
               ` + pg.NoTransactionTimeout + ` OFFSET 0) AS unbounded`

// state is what there is of an index.
type state struct {
	partitioned bool
	ready       bool
	on          string // the table that an index of the name belongs to, "" without one
}

// An index of a partitioned table is ready when each partition has its part. Whether PostgreSQL calls the
// whole valid does not matter to plans.
const sqlState = `
SELECT t.relkind = 'p', coalesce(o.relname, ''),
       coalesce(o.oid = t.oid AND CASE WHEN t.relkind = 'p' THEN NOT EXISTS (
           SELECT FROM pg_inherits AS p WHERE p.inhparent = t.oid AND NOT EXISTS (
               SELECT FROM pg_index AS part JOIN pg_inherits AS h ON h.inhrelid = part.indexrelid
                WHERE part.indrelid = p.inhrelid AND part.indisvalid AND h.inhparent = i.indexrelid)) ELSE i.indisvalid END, false)
  FROM pg_class AS t
  LEFT JOIN pg_class AS c ON c.relnamespace = t.relnamespace AND c.relname = $1 AND c.relkind IN ('i', 'I')
  LEFT JOIN pg_index AS i ON i.indexrelid = c.oid
  LEFT JOIN pg_class AS o ON o.oid = i.indrelid
 WHERE t.oid = {outbox}::regclass::oid`

func (b *builder) state(ctx context.Context) (s state, err error) {
	err = b.db.QueryRow(ctx, pg.InSchema(sqlState, b.schema), b.index.name).Scan(&s.partitioned, &s.on, &s.ready)
	return s, err
}

// sqlIsValid also reads the process that builds an index. PostgreSQL goes on building when a client has lost the lock,
// or was killed.
const sqlIsValid = `
SELECT i.indisvalid, coalesce((SELECT min(p.pid) FROM pg_stat_progress_create_index AS p
                                WHERE p.datname = current_database() AND p.index_relid = i.indexrelid), 0)
  FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relname = $2`

// buildIn builds an index of a table without partitions. Where one is invalid that PostgreSQL does not build, a process
// has ended while it was built.
func (b *builder) buildIn(ctx context.Context, table, name string) error {
	var valid bool
	var builder int
	err := b.db.QueryRow(ctx, sqlIsValid, b.schema, name).Scan(&valid, &builder)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
	case err != nil || valid:
		return err
	case builder != 0:
		return fmt.Errorf("%w: session %d", errTaken, builder)
	default:
		b.log.Warn("outbox: an index was left unfinished and is built again", "index", name, "schema", b.schema)
		if err := b.alone(ctx, b.sql(`DROP INDEX CONCURRENTLY IF EXISTS %s`, name)); err != nil {
			return err
		}
	}
	err = b.alone(ctx, b.sql(`CREATE `+b.kind()+` CONCURRENTLY `+quoted(name)+` ON %s `+b.index.columns, table))
	if err != nil && pg.IsDuplicate(err) { // it would refuse new rows all the same
		err = errors.Join(err, b.alone(ctx, b.sql(`DROP INDEX CONCURRENTLY IF EXISTS %s`, name)))
	}
	return err
}

func (b *builder) kind() string {
	if b.index.unique {
		return "UNIQUE INDEX"
	}
	return "INDEX"
}

// sql puts the name of something in the schema into a statement.
func (b *builder) sql(format, name string) string {
	return fmt.Sprintf(format, pgx.Identifier{b.schema, name}.Sanitize())
}

func quoted(name string) string { return pgx.Identifier{name}.Sanitize() }

const (
	// sqlUnbound lets the statements of a session last for as long as they take. It changes nothing where the process
	// $1 that the client knows is another one: a pooler gives the session to other clients, too.
	sqlUnbound = `
SELECT s.own, CASE WHEN s.own THEN set_config('statement_timeout', '0', false) END, CASE WHEN s.own THEN set_config('lock_timeout', '0', false) END,
       CASE WHEN s.own AND current_setting('transaction_timeout', true) <> '0' THEN set_config('transaction_timeout', '0', false) END
  FROM (SELECT pg_backend_pid() = $1::int AS own OFFSET 0) AS s`
	resetBounds = `RESET statement_timeout; RESET lock_timeout; SELECT set_config(name, reset_val, false) FROM pg_settings WHERE name = 'transaction_timeout'`
)

// alone runs a statement that takes no transaction, for as long as it takes, whatever a role is configured to. Behind a
// pooler the timeouts of the role hold.
func (b *builder) alone(ctx context.Context, sql string) error {
	conn, err := b.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	own := false
	if err := conn.QueryRow(ctx, sqlUnbound, int32(conn.Conn().PgConn().PID())).Scan(&own, nil, nil, nil); err != nil {
		return err
	}
	if own {
		defer func() { // also after a statement that was cancelled
			if _, err := conn.Conn().PgConn().Exec(context.WithoutCancel(ctx), resetBounds).ReadAll(); err != nil {
				_ = conn.Conn().Close(context.WithoutCancel(ctx))
			}
		}()
	}
	_, err = conn.Conn().PgConn().Exec(ctx, sql).ReadAll()
	if !own && (pg.IsCancelled(err) || pg.IsLocked(err)) {
		return fmt.Errorf("%w: a timeout of the role holds behind a pooler, connect to PostgreSQL directly", err)
	}
	return err
}

// quickly runs statements together under a lock of a table that writers need, and tries again until
// it gets it: each try lasts 50 ms at most.
func (b *builder) quickly(ctx context.Context, sql string) error {
	for {
		err := pgx.BeginTxFunc(ctx, b.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			_, err := tx.Conn().PgConn().Exec(ctx, "SET LOCAL lock_timeout = '50ms'; "+sql).ReadAll()
			return err
		})
		if !pg.IsLocked(err) || ctx.Err() != nil {
			return err
		}
		wait.Sleep(ctx, look)
	}
}

// part is a partition, and whether it has its part of the index.
type part struct {
	name string
	has  bool
}

const sqlParts = `
SELECT t.relname::text, EXISTS (
       SELECT FROM pg_index AS part JOIN pg_inherits AS h ON h.inhrelid = part.indexrelid JOIN pg_class AS whole ON whole.oid = h.inhparent
        WHERE part.indrelid = t.oid AND part.indisvalid AND whole.relname = $1 AND whole.relnamespace = t.relnamespace)
  FROM pg_inherits AS p JOIN pg_class AS t ON t.oid = p.inhrelid
 WHERE p.inhparent = {outbox}::regclass::oid
 ORDER BY t.relname`

// buildInPartitions makes the index of the whole table first, which new partitions get by
// themselves, and then the part of each partition. A partition that is dropped meanwhile needs none.
func (b *builder) buildInPartitions(ctx context.Context, s state) error {
	if s.on != "outbox" {
		if err := b.makeWhole(ctx, s.on); err != nil {
			return err
		}
	}
	rows, err := b.db.Query(ctx, pg.InSchema(sqlParts, b.schema), b.index.name)
	if err != nil {
		return err
	}
	parts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p part, err error) { return p, row.Scan(&p.name, &p.has) })
	if err != nil {
		return err
	}
	for _, p := range parts {
		if p.has {
			continue
		}
		name := p.name + b.index.suffix
		err := b.buildIn(ctx, p.name, name)
		if err == nil {
			err = b.quickly(ctx, b.sql(`ALTER INDEX %s ATTACH PARTITION `, b.index.name)+pgx.Identifier{b.schema, name}.Sanitize())
		}
		if err != nil && !pg.IsUndefined(err) {
			return err
		}
	}
	return nil
}

// makeWhole makes the index of the partitioned table, without its parts. The table that was
// outbox before it was partitioned may have an index of this name.
func (b *builder) makeWhole(ctx context.Context, former string) error {
	if former != "" {
		if err := b.quickly(ctx, b.sql(`ALTER INDEX %s RENAME TO `, b.index.name)+quoted(former+b.index.suffix)); err != nil {
			return err
		}
	}
	return b.quickly(ctx, b.sql(`CREATE INDEX `+quoted(b.index.name)+` ON ONLY %s `+b.index.columns, "outbox"))
}
