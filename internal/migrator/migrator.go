// Package migrator applies the files of the package migrations to a schema, while others use its
// tables. One process migrates at a time. Each file is a transaction, which is rolled back if it
// does not get its locks.
package migrator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/privileges"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/migrations"
)

var (
	// ErrDatabaseAhead is described in the package outbox.
	ErrDatabaseAhead = errors.New("database is ahead of this release")
	// ErrForeignObjects is described in the package outbox.
	ErrForeignObjects = errors.New("the schema has objects of roles that are not trusted with it, drop them")
)

// Step is one file of the package migrations.
type Step struct {
	Version int // its number, from 1
	Name    string
	sql     string
}

// compatible matches the line of a file that allows older releases to run on the tables: those that have the files up
// to this version.
var compatible = regexp.MustCompile(`(?m)^-- outbox: compatible from (\d+)$`)

// compatibleFrom returns the version that the line names, or NULL without one.
func (s Step) compatibleFrom() string {
	if line := compatible.FindStringSubmatch(s.sql); line != nil {
		return line[1]
	}
	return "NULL"
}

// readSteps reads the files, which are numbered from 1 without gaps.
func readSteps(files fs.FS) ([]Step, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, err
	}
	steps := make([]Step, 0, len(names))
	for i, name := range names {
		number, _, _ := strings.Cut(name, "_")
		version, err := strconv.Atoi(number)
		if err != nil || version != i+1 {
			return nil, fmt.Errorf("file %s: want number %d", name, i+1)
		}
		sql, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		steps = append(steps, Step{version, name, string(sql)})
	}
	return steps, nil
}

// Migrator applies the files that a schema does not have yet. One goroutine uses it.
type Migrator struct {
	DB          *pgxpool.Pool
	Schema      string
	LockTimeout time.Duration // of a try to apply a file
	Logger      *slog.Logger
	Files       fs.FS // 0001_….sql, 0002_….sql and so on; nil means those of the package migrations
	Ahead       bool  // Run has found the tables of a newer release, on which this one may run

	steps  []Step
	warned bool // of a schema in which everybody may create
}

// Run applies file after file.
func (m *Migrator) Run(ctx context.Context) (err error) {
	files := m.Files
	if files == nil {
		files = migrations.FS
	}
	if m.steps, err = readSteps(files); err != nil {
		return err
	}
	if err := pg.CheckSessions(ctx, m.DB); err != nil {
		return err
	}
	for {
		version, err := appliedVersion(ctx, m.DB, m.Schema)
		switch {
		case err != nil:
			return err
		case version >= len(m.steps):
			return m.nothingToDo(ctx, version)
		}
		err = m.Insist(ctx, "migration "+m.steps[version].Name, func(time.Duration) error { return m.protect(ctx) })
		if err != nil {
			return err
		}
		if err := m.apply(ctx, m.steps[version]); err != nil {
			return fmt.Errorf("%s: %w", m.steps[version].Name, err)
		}
	}
}

// nothingToDo reports whether the files that outbox_migration names can have been applied.
func (m *Migrator) nothingToDo(ctx context.Context, version int) error {
	stranger := ""
	err := pg.Query(ctx, m.DB, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&stranger}, func() error { return nil })
		return err
	}, privileges.SQLStranger, m.Schema, false)
	switch {
	case err != nil:
		return fmt.Errorf("look whose the tables are: %w", err)
	case stranger != "":
		return fmt.Errorf("%w: table outbox_migration of role %s", ErrForeignObjects, stranger)
	case version > len(m.steps):
		return m.ahead(ctx, version)
	}
	return nil
}

// ahead returns nil if the files of a newer release that were applied say that this release may run on their tables.
func (m *Migrator) ahead(ctx context.Context, version int) error {
	from, err := compatibleFrom(ctx, m.DB, m.Schema, len(m.steps))
	switch {
	case err != nil:
		return fmt.Errorf("look which releases may run on the tables: %w", err)
	case from > len(m.steps):
		return fmt.Errorf("%w: it is at version %d, for releases from version %d on, and this release knows %d", ErrDatabaseAhead, version, from, len(m.steps))
	}
	m.Ahead = true
	m.Logger.Warn("outbox: a newer release has migrated the database, and this release may run on its tables",
		"schema", m.Schema, "version", version, "known", len(m.steps))
	return nil
}

// apply applies a file, and tries again for as long as it does not get its locks.
func (m *Migrator) apply(ctx context.Context, step Step) error {
	return m.Insist(ctx, "migration "+step.Name, func(pause time.Duration) error { return m.try(ctx, step, pause) })
}

// errMigrating means that another session has the lock of those that migrate.
var errMigrating = errors.New("another session migrates")

// Insist calls try until it gets its locks, or ctx ends. The log and the error then say who has them. Try pauses before
// it begins, unless another process migrates: then it has tried nothing.
func (m *Migrator) Insist(ctx context.Context, what string, try func(pause time.Duration) error) error {
	log := outage.NewLog(m.Logger, what)
	var blocked error
	for pause := time.Duration(0); ; {
		err := try(pause)
		if err != nil && ctx.Err() != nil && blocked != nil {
			return fmt.Errorf("%w; until then: %w", err, blocked)
		}
		if !pg.IsLocked(err) && !pg.IsTransient(err) { // a deadlock is transient
			if err == nil {
				log.Report(nil)
			}
			return err
		}
		if errors.Is(err, errMigrating) {
			blocked = fmt.Errorf("%s holds the lock of those that migrate: %w", pg.AdvisoryHolder(ctx, m.DB, migrateLock+m.Schema), err)
			pause = 0
		} else {
			blocked = fmt.Errorf("no lock within %v, %s: %w", m.LockTimeout, m.lockHolder(ctx), err)
			pause = log.Backoff()
		}
		log.Report(blocked)
	}
}

// try applies a file in a transaction, unless another process has done it meanwhile.
//
// It pauses while it holds the advisory lock, so that several processes do not try in turn without
// a pause: each try keeps writers waiting. During the pause the transaction has neither an id nor a
// snapshot, so it delays no other transaction. If the process does not go on after it, PostgreSQL ends
// the transaction.
func (m *Migrator) try(ctx context.Context, step Step, pause time.Duration) error {
	conn, err := m.DB.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // rolls back: a connection within a transaction is closed
	// Under READ COMMITTED each statement sees what the process that had the lock
	// before has committed. The pool's default may be another level.
	for _, sql := range []string{"BEGIN ISOLATION LEVEL READ COMMITTED", privileges.SafePath, pg.Unbounded} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	if err := m.lock(ctx, conn, pause); err != nil {
		return errors.Join(err, execScript(ctx, conn.Conn(), "ROLLBACK"))
	}
	wait.Sleep(ctx, pause)
	if err := m.checkForeign(ctx, conn.Conn()); err != nil {
		return err
	}
	if err := m.ensureTable(ctx, conn.Conn()); err != nil {
		return err
	}
	var version int
	err = conn.QueryRow(ctx, pg.InSchema(sqlMigrationVersion, m.Schema)).Scan(&version)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	if err != nil || version >= step.Version {
		return errors.Join(err, execScript(ctx, conn.Conn(), "ROLLBACK"))
	}
	if _, err := conn.Exec(ctx, sqlStepSettings, pgx.Identifier{m.Schema}.Sanitize(), milliseconds(m.LockTimeout)); err != nil {
		return err
	}
	// All of it is one message: no transaction waits for a process that stops in between.
	done := strings.NewReplacer("$1", strconv.Itoa(step.Version), "$2", "'"+step.Name+"'", "$3", step.compatibleFrom()).Replace(sqlMigrationDone)
	err = execScript(ctx, conn.Conn(), step.sql+"\n"+pg.InSchema(done, m.Schema)+";\nCOMMIT")
	if pg.IsLocked(err) {
		return errors.Join(err, execScript(ctx, conn.Conn(), "ROLLBACK"))
	}
	return err
}

// milliseconds returns a time for a setting of PostgreSQL, in which 0 would mean without end.
func milliseconds(d time.Duration) string { return strconv.FormatInt(max(1, d.Milliseconds()), 10) }

// Bounds of the transaction that has, or waits for, the lock of those that migrate.
const (
	migrateWait = 2 * time.Second  // for the lock, before the log says who has it
	migrateIdle = 10 * time.Second // between two statements
)

const (
	migrateLock = "outbox.migrate."
	// sqlMigrateLock makes other processes wait until our transaction ends.
	sqlMigrateLock  = `SELECT pg_advisory_xact_lock(hashtextextended('` + migrateLock + `' || $1, 0::bigint))`
	sqlMigrateBound = `SELECT set_config('lock_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $2, true)`
	sqlWaitForLocks = `SELECT set_config('lock_timeout', '0', true)`
)

// execer is a connection or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// lock takes the lock of those that migrate, until the end of the transaction. The transaction pauses then, and no
// longer: PostgreSQL ends the transaction of a process that is frozen, because all others would wait for it.
func (m *Migrator) lock(ctx context.Context, tx execer, pause time.Duration) error {
	_, err := tx.Exec(ctx, sqlMigrateBound, milliseconds(migrateWait), milliseconds(pause+migrateIdle))
	if err == nil {
		_, err = tx.Exec(ctx, sqlMigrateLock, m.Schema)
	}
	switch {
	case pg.IsLocked(err):
		return fmt.Errorf("%w: %w", errMigrating, err)
	case err == nil:
		_, err = tx.Exec(ctx, sqlWaitForLocks)
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	return nil
}

// sqlStepSettings makes the schema the default for unqualified names, which the files
// have, and bounds the wait for locks, until the end of the transaction.
const sqlStepSettings = `SELECT set_config('search_path', $1 || ', pg_temp', true), set_config('lock_timeout', $2, true)`

// sqlLockHolder finds the oldest transaction that has a lock on a table of outbox. One
// that is prepared has no process.
const sqlLockHolder = `
SELECT coalesce(string_agg(DISTINCT c.relname, ', ') FILTER (WHERE NOT c.relispartition), min(c.relname)),
       coalesce(l.pid, 0), coalesce(a.application_name, ''), coalesce(a.state, ''), coalesce(now() - a.xact_start, '0')
  FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relname LIKE 'outbox%' AND c.relkind IN ('r', 'p')
 GROUP BY l.pid, a.application_name, a.state, a.xact_start
 ORDER BY a.xact_start LIMIT 1`

// lockHolder returns the session that is likely to hold the lock that a file did not get. It works
// also when ctx has just ended, because the error of Migrate then names the session.
func (m *Migrator) lockHolder(ctx context.Context) string {
	const patience = time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	var tables, application, state string
	var pid int
	var open time.Duration
	found := false
	err := pg.Query(ctx, m.DB, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&tables, &pid, &application, &state, &open}, func() error { found = true; return nil })
		return err
	}, sqlLockHolder, m.Schema)
	switch {
	case err != nil:
		return fmt.Sprintf("and who has it is not known (%v)", err)
	case !found:
		return "and who had it has let go"
	case pid == 0:
		return "a prepared transaction has locked " + tables
	}
	return fmt.Sprintf("process %d (%s, %s, transaction open for %v) has locked %s",
		pid, cmp.Or(application, "without application_name"), cmp.Or(state, "state not visible"), open.Round(time.Millisecond), tables)
}

// sqlMigrationState tells what has to be created. CREATE … IF NOT EXISTS would not do,
// because it needs the privilege to create even if there is nothing to create.
const sqlMigrationState = `
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1),
       to_regclass(format('%I.outbox_migration', $1::text)) IS NOT NULL`

// ddlMigrationTable consists of several statements, which need the simple protocol.
const ddlMigrationTable = `
CREATE TABLE {schema}.outbox_migration (
    version    int          PRIMARY KEY,
    name       text         NOT NULL,
    applied_at timestamptz  NOT NULL DEFAULT now(),
    compatible_from int,
    CONSTRAINT outbox_migration_lengths CHECK (char_length(name) <= 100)
);
COMMENT ON TABLE {schema}.outbox_migration IS 'Which migrations of outbox have been applied.';
COMMENT ON COLUMN {schema}.outbox_migration.version IS 'Number of the file, from 1.';
COMMENT ON COLUMN {schema}.outbox_migration.name IS 'Name of the file.';
COMMENT ON COLUMN {schema}.outbox_migration.applied_at IS 'When it was applied.';
COMMENT ON COLUMN {schema}.outbox_migration.compatible_from IS
    'Releases that have the files up to this version may run on the tables. NULL: only releases that have this file.';`

// sqlMigrationDone is sent with the file, in a message that takes no arguments.
const sqlMigrationDone = `INSERT INTO {schema}.outbox_migration (version, name, compatible_from) VALUES ($1, $2, $3)`

// execScript runs any number of statements.
func execScript(ctx context.Context, conn *pgx.Conn, script string) error {
	_, err := conn.PgConn().Exec(ctx, script).ReadAll()
	return err
}

// ensureTable creates the schema and the table of applied files if they are missing.
func (m *Migrator) ensureTable(ctx context.Context, conn *pgx.Conn) error {
	var hasSchema, hasTable bool
	if err := conn.QueryRow(ctx, sqlMigrationState, m.Schema).Scan(&hasSchema, &hasTable); err != nil {
		return fmt.Errorf("look for schema: %w", err)
	}
	if !hasSchema {
		if err := execScript(ctx, conn, pg.InSchema(`CREATE SCHEMA {schema}`, m.Schema)); err != nil {
			return fmt.Errorf("create schema: %w", err)
		}
	}
	if !hasTable {
		if err := execScript(ctx, conn, pg.InSchema(ddlMigrationTable, m.Schema)); err != nil {
			return fmt.Errorf("create outbox_migration: %w", err)
		}
	}
	return nil
}

// protect revokes CREATE on the schema from PUBLIC, before a file is applied. Of processes that migrate, one does so at
// a time. PostgreSQL fails if another session has changed the rights to the schema meanwhile: then it looks again.
func (m *Migrator) protect(ctx context.Context) (err error) {
	const concurrentlyUpdated, tries = "XX000", 10
	for range tries {
		if err = m.tryProtect(ctx); pg.Code(err) != concurrentlyUpdated {
			return err
		}
	}
	return err
}

func (m *Migrator) tryProtect(ctx context.Context) error {
	// Each statement must see what the process that had the lock before has committed.
	return pgx.BeginTxFunc(ctx, m.DB, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		for _, sql := range []string{privileges.SafePath, pg.Unbounded} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		if err := m.lock(ctx, tx, 0); err != nil {
			return err
		}
		may, revocable, err := privileges.PublicMayCreate(ctx, tx, m.Schema)
		switch {
		case err != nil:
			return fmt.Errorf("look who may create in the schema: %w", err)
		case may && revocable:
			m.warnPublic("outbox: CREATE on the schema is revoked from PUBLIC")
			_, err = tx.Exec(ctx, pg.InSchema(`REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC`, m.Schema))
			return err
		case may:
			m.warnPublic("outbox: everybody may create in the schema, its owner should revoke CREATE from PUBLIC")
		}
		return nil
	})
}

// warnPublic logs once the risk of a schema in which every role may create.
func (m *Migrator) warnPublic(what string) {
	if !m.warned {
		m.Logger.Warn(what, "schema", m.Schema, "why", "who may create functions and operators there can act with the rights of all who use outbox")
	}
	m.warned = true
}

// checkForeign refuses to go on where another role has made something that a file would run,
// or take for a table of outbox.
func (m *Migrator) checkForeign(ctx context.Context, conn *pgx.Conn) error {
	foreign, err := privileges.Foreign(ctx, conn, m.Schema, false)
	if err != nil {
		return fmt.Errorf("look for objects of other roles: %w", err)
	}
	if len(foreign) > 0 {
		return fmt.Errorf("%w: %s", ErrForeignObjects, strings.Join(foreign, "; "))
	}
	return nil
}
