package outbox

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

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/indexes"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/privileges"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/migrations"
)

// MigrateConfig tunes [Migrate].
type MigrateConfig struct {
	// Schema is where the tables are. It is created if it is missing. Empty means
	// public.
	Schema string
	// PartitionRows makes outbox a partitioned table, whose partitions are ranges of
	// this many ids, at most a billion. Retention then drops a whole partition when
	// all its events are published and old. The relay creates partitions in advance:
	// one should hold more events than are recorded in RetentionConfig.Interval. An
	// existing plain table becomes the first partition, with ten times as many ids as
	// the others; no row is rewritten, and writers wait no longer than 50 ms at a
	// time. A table that is partitioned already is not changed. Zero means a plain
	// table.
	PartitionRows int64
	// Publication is the name of a publication for Debezium, or another reader of
	// PostgreSQL's logical replication, that sends the events in place of a relay: lower-case
	// letters, digits and underscores, as Debezium wants it. It is made with outbox in it, unless a relay sends the events already, publishes rows that are
	// inserted and nothing else, and is not changed again: outboxops.Cuts moves between
	// Debezium and a relay. From then on a trigger completes each row, whoever inserts it:
	// topic and partition_key are set. A row from whose type no topic can be derived is
	// refused, as is a topic whose name Kafka does not allow. A table that is published
	// cannot be partitioned any more: set PartitionRows before. The role needs CREATE on
	// the database. Empty means none, and no trigger; what is there stays.
	Publication string
	// AggregateIndex adds an index on the type and id of the aggregate, by which the events
	// of one are found: see outboxops.Inspector. It is built without blocking writers, in
	// every partition, and again if a process has ended while it built it; Migrate waits
	// for the transactions that were open when it began. It makes a record
	// dearer: 67 bytes for each event, and about a quarter of the time of many in one transaction. Without it an index that is there stays. It needs two
	// connections of the pool. False means that none is added.
	AggregateIndex bool
	// UniqueEventIDs adds a unique index on the id of events, likewise, of 31 bytes for each event
	// and less than a tenth of the time: recording an event with
	// the id of one that is in outbox then fails with [ErrDuplicateEvent]. Ids of events
	// that retention has removed may be used again. An outbox with partitions cannot have it,
	// because a unique index would have to contain what the partitions go by: then Migrate
	// returns [ErrPartitioned]. False means that none is added.
	UniqueEventIDs bool
	// LockTimeout is how long a migration waits for the lock of a table before it lets go
	// and tries again, and so how long a writer waits behind it at most; each partition of
	// outbox adds some 2 ms. An autovacuum of the table is only cancelled if this is longer
	// than PostgreSQL's deadlock_timeout.
	// Zero means 100 ms.
	LockTimeout time.Duration
	// Logger receives WARN when a migration does not get a lock, with who has it, and when
	// it got it. Nil means slog.Default().
	Logger *slog.Logger
}

const (
	maxPartitionRows   = 1_000_000_000
	defaultLockTimeout = 100 * time.Millisecond
)

// publicationName is what Debezium can name in its list of publications, where it uses no quotes.
var publicationName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

func (c MigrateConfig) withDefaults() MigrateConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.LockTimeout = cmp.Or(c.LockTimeout, defaultLockTimeout)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

func (c MigrateConfig) validate() error {
	err := errors.Join(check.Schema(c.Schema), check.NotNegative("PartitionRows", c.PartitionRows), check.NotNegative("LockTimeout", c.LockTimeout))
	if c.Publication != "" && !publicationName.MatchString(c.Publication) {
		err = errors.Join(err, fmt.Errorf("field Publication is %.100q: %w, at most 63 of a-z 0-9 _", c.Publication, ErrMalformed))
	}
	if c.PartitionRows > maxPartitionRows {
		err = errors.Join(err, fmt.Errorf("field PartitionRows is %d: at most %d", c.PartitionRows, maxPartitionRows))
	}
	if c.PartitionRows > 0 && c.UniqueEventIDs {
		err = errors.Join(err, fmt.Errorf("fields PartitionRows and UniqueEventIDs: %w", ErrPartitioned))
	}
	return err
}

// Migrate brings the tables of outbox up to date. It may be called at every start and
// by many processes at once: one of them migrates, the others wait for it and find
// nothing to do. If there is nothing to do, it asks PostgreSQL three times and locks nothing.
//
// Each file of the package migrations is a transaction. If one fails, those before it
// stay, and the error names it. Writers, relays and consumers may be at work: a file that
// does not get its locks within LockTimeout lets go, and is tried again until ctx ends,
// with waits that grow to 5 s. So a transaction that stays open keeps Migrate waiting, and
// nobody else. The steps that partition a table follow in transactions of their own; if
// Migrate is stopped between them, call it again, since until then the table rejects ids
// that are far ahead.
//
// It returns [ErrDatabaseAhead], and changes nothing, if a newer release has migrated
// the database. It revokes CREATE on the schema from PUBLIC where the role may do that, and
// logs it as WARN. It returns [ErrForeignObjects] where a role that is not trusted with the
// schema has made functions or operators in it that the files would run, or tables of the
// names that outbox uses: drop them, or migrate as that role. Trusted are the role itself,
// superusers, the owner of the schema, and who was granted CREATE on it by name.
//
// The role needs CREATE on the schema, or on the database if the schema does not exist. A project that uses a migration tool can apply the files of the
// package migrations with that instead.
func Migrate(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("outbox: migrate config: %w", err)
	}
	steps, err := migrationSteps()
	if err != nil {
		return fmt.Errorf("outbox: migrate: %w", err)
	}
	m := &migrator{db: db, cfg: cfg, steps: steps}
	err = m.run(ctx)
	if err == nil && cfg.PartitionRows > 0 {
		err = makePartitioned(ctx, db, cfg)
	}
	if err == nil && cfg.Publication != "" {
		err = publish(ctx, db, cfg)
	}
	if err == nil {
		err = makeIndexes(ctx, db, cfg)
	}
	if err != nil {
		return fmt.Errorf("outbox: migrate schema %s: %w", cfg.Schema, err)
	}
	return nil
}

// makeIndexes adds the indexes that are asked for.
func makeIndexes(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	if cfg.AggregateIndex {
		if err := indexes.Build(ctx, db, cfg.Schema, indexes.Aggregate, cfg.Logger); err != nil {
			return err
		}
	}
	if !cfg.UniqueEventIDs {
		return nil
	}
	err := indexes.Build(ctx, db, cfg.Schema, indexes.EventID, cfg.Logger)
	switch {
	case errors.Is(err, indexes.ErrPartitioned):
		return fmt.Errorf("%w: %w", ErrPartitioned, err)
	case pg.IsDuplicate(err):
		return fmt.Errorf("%w: %w", ErrDuplicateEvent, pg.WithDetail(err))
	}
	return err
}

// Each try to partition the table waits 50 ms at most for a lock.
const (
	lockTries = 300
	lockPause = 200 * time.Millisecond
)

// makePartitioned makes outbox a partitioned table. It tries again if it does not get a
// lock, or if another process is doing the same.
func makePartitioned(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	for try := 1; ; try++ {
		err := tryPartitioned(ctx, db, cfg)
		var pg *pgconn.PgError
		retry := errors.As(err, &pg) && (pg.Code == "55P03" || pg.Code == "55000" || pg.Code == "42704") // locked, not ready, constraint gone
		if !retry || try == lockTries {
			return err
		}
		wait.Sleep(ctx, lockPause)
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
}

// The steps of [makePartitioned]. Each is a transaction of its own, so that no lock is
// held while rows are read. A step that was done before does nothing.
const (
	sqlPreparePartitions = `SELECT {schema}.outbox_prepare_partitions($1)`
	sqlCheckPartitions   = `ALTER TABLE {schema}.outbox VALIDATE CONSTRAINT outbox_before_partitions`
	sqlPartition         = `SELECT {schema}.outbox_partition()`
)

// tryPartitioned runs the steps, unless the table is partitioned already.
func tryPartitioned(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	var partitioned bool
	if err := db.QueryRow(ctx, pg.InSchema(sqlPartitioned, cfg.Schema)).Scan(&partitioned); err != nil || partitioned {
		return err
	}
	if unique, err := indexes.IsThere(ctx, db, cfg.Schema, indexes.EventID); err != nil || unique {
		if unique {
			err = fmt.Errorf("%w: drop index %s first", ErrPartitioned, indexes.EventID.Name())
		}
		return err
	}
	ignoreResult := func(row pgx.Row) error { return row.Scan(nil) }
	if err := atOnce(ctx, db, ignoreResult, pg.InSchema(sqlPreparePartitions, cfg.Schema), cfg.PartitionRows); err != nil {
		return fmt.Errorf("prepare partitions: %w", err)
	}
	if _, err := db.Exec(ctx, pg.InSchema(sqlCheckPartitions, cfg.Schema)); err != nil {
		return fmt.Errorf("check partitions: %w", err)
	}
	for _, sql := range []string{sqlPartition, sqlMakePartitions} {
		if err := atOnce(ctx, db, ignoreResult, pg.InSchema(sql, cfg.Schema)); err != nil {
			return fmt.Errorf("make partitions: %w", err)
		}
	}
	return nil
}

// sqlIsPublished reports whether outbox_publish has nothing to do.
const sqlIsPublished = `
SELECT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = {outbox}::regclass::oid AND tgname = 'outbox_complete_row')
   AND EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = $1 AND pubinsert AND pubviaroot AND NOT (puballtables OR pubupdate OR pubdelete OR pubtruncate))`

const sqlPublish = `SELECT {schema}.outbox_publish($1)`

// publish makes the publication and the trigger. It tries again if it does not get a lock.
func publish(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	var is bool
	err := db.QueryRow(ctx, pg.InSchema(sqlIsPublished, cfg.Schema), cfg.Publication).Scan(&is)
	for try := 1; err == nil && !is; try++ {
		err = atOnce(ctx, db, func(row pgx.Row) error { return row.Scan(nil) }, pg.InSchema(sqlPublish, cfg.Schema), cfg.Publication)
		if !pg.IsLocked(err) || try == lockTries {
			break
		}
		if wait.Sleep(ctx, lockPause); ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
			break
		}
		err = nil
	}
	if err != nil {
		return fmt.Errorf("publish outbox: %w", err)
	}
	return nil
}

// migration is one file of the package migrations.
type migration struct {
	version int
	name    string
	sql     string
}

// migrationSteps reads the files, which are numbered from 1 without gaps.
func migrationSteps() ([]migration, error) {
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return nil, err
	}
	steps := make([]migration, 0, len(names))
	for i, name := range names {
		number, _, _ := strings.Cut(name, "_")
		version, err := strconv.Atoi(number)
		if err != nil || version != i+1 {
			return nil, fmt.Errorf("file %s: want number %d", name, i+1)
		}
		sql, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			return nil, err
		}
		steps = append(steps, migration{version, name, string(sql)})
	}
	return steps, nil
}

// migrator applies the files that a schema does not have yet. One goroutine uses it.
type migrator struct {
	db    *pgxpool.Pool
	cfg   MigrateConfig
	steps []migration

	warned bool // of a schema in which everybody may create
}

// run applies file after file.
func (m *migrator) run(ctx context.Context) error {
	for {
		version, err := appliedVersion(ctx, m.db, m.cfg.Schema)
		switch {
		case err != nil:
			return err
		case version >= len(m.steps):
			return m.nothingToDo(ctx, version)
		}
		if err := m.protect(ctx); err != nil {
			return err
		}
		if err := m.apply(ctx, m.steps[version]); err != nil {
			return fmt.Errorf("%s: %w", m.steps[version].name, err)
		}
	}
}

// nothingToDo reports whether the files that outbox_migration names can have been applied.
func (m *migrator) nothingToDo(ctx context.Context, version int) error {
	stranger := ""
	err := pg.Query(ctx, m.db, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&stranger}, func() error { return nil })
		return err
	}, privileges.SQLStranger, m.cfg.Schema, false)
	switch {
	case err != nil:
		return fmt.Errorf("look whose the tables are: %w", err)
	case stranger != "":
		return fmt.Errorf("%w: table outbox_migration of role %s", ErrForeignObjects, stranger)
	case version > len(m.steps):
		return fmt.Errorf("%w: it is at version %d, this release knows %d", ErrDatabaseAhead, version, len(m.steps))
	}
	return nil
}

// apply applies a file, and tries again for as long as it does not get its locks.
func (m *migrator) apply(ctx context.Context, step migration) error {
	log := outage.NewLog(m.cfg.Logger, "migration "+step.name)
	var blocked error
	for pause := time.Duration(0); ; pause = log.Backoff() {
		err := m.try(ctx, step, pause)
		if ctx.Err() != nil && blocked != nil {
			return fmt.Errorf("%w; until then: %w", err, blocked)
		}
		if !pg.IsLocked(err) && !pg.IsTransient(err) { // a deadlock is transient
			if err == nil {
				log.Report(nil)
			}
			return err
		}
		blocked = fmt.Errorf("no lock within %v, %s: %w", m.cfg.LockTimeout, m.lockHolder(ctx), err)
		log.Report(blocked)
	}
}

// try applies a file in a transaction, unless another process has done it meanwhile.
//
// It pauses while it holds the advisory lock, so that several processes do not try in
// turn without a pause: each try keeps writers waiting. At that time the transaction has
// neither an id nor a snapshot, so it holds up nobody else.
func (m *migrator) try(ctx context.Context, step migration, pause time.Duration) error {
	conn, err := m.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // rolls back: a connection within a transaction is closed
	// Under READ COMMITTED each statement sees what the process that had the lock
	// before has committed. The pool's default may be another level.
	for _, sql := range []string{"BEGIN ISOLATION LEVEL READ COMMITTED", privileges.SafePath, sqlMigrateSettings} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	if _, err := conn.Exec(ctx, sqlMigrateLock, m.cfg.Schema); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	wait.Sleep(ctx, pause)
	if err := m.checkForeign(ctx, conn.Conn()); err != nil {
		return err
	}
	if err := m.ensureTable(ctx, conn.Conn()); err != nil {
		return err
	}
	var version int
	err = conn.QueryRow(ctx, pg.InSchema(sqlMigrationVersion, m.cfg.Schema)).Scan(&version)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	if err != nil || version >= step.version {
		return errors.Join(err, execScript(ctx, conn.Conn(), "ROLLBACK"))
	}
	if _, err := conn.Exec(ctx, sqlStepSettings, pgx.Identifier{m.cfg.Schema}.Sanitize(), m.lockTimeout()); err != nil {
		return err
	}
	// All of it is one message: nobody waits for a process that stops in between.
	done := strings.NewReplacer("$1", strconv.Itoa(step.version), "$2", "'"+step.name+"'").Replace(sqlMigrationDone)
	err = execScript(ctx, conn.Conn(), step.sql+"\n"+pg.InSchema(done, m.cfg.Schema)+";\nCOMMIT")
	if pg.IsLocked(err) {
		return errors.Join(err, execScript(ctx, conn.Conn(), "ROLLBACK"))
	}
	return err
}

// lockTimeout returns the setting of PostgreSQL, in which 0 would mean without end.
func (m *migrator) lockTimeout() string {
	return strconv.FormatInt(max(1, m.cfg.LockTimeout.Milliseconds()), 10)
}

// sqlMigrateLock makes other processes wait until our transaction ends.
const sqlMigrateLock = `SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))`

// sqlMigrateSettings let a migration take as long as it takes, whatever a role is
// configured to.
const sqlMigrateSettings = `
SELECT set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '0', true), set_config('lock_timeout', '0', true)`

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

// lockHolder says who is likely to hold the lock that a file did not get, also when ctx has just
// ended: it is in the error of Migrate then.
func (m *migrator) lockHolder(ctx context.Context) string {
	const patience = time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	var tables, application, state string
	var pid int
	var open time.Duration
	err := m.db.QueryRow(ctx, sqlLockHolder, m.cfg.Schema).Scan(&tables, &pid, &application, &state, &open)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "and who had it has let go"
	case err != nil:
		return fmt.Sprintf("and who has it is not known (%v)", err)
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
    name       varchar(100) NOT NULL,
    applied_at timestamptz  NOT NULL DEFAULT now()
);
COMMENT ON TABLE {schema}.outbox_migration IS 'Which migrations of outbox have been applied.';
COMMENT ON COLUMN {schema}.outbox_migration.version IS 'Number of the file, from 1.';
COMMENT ON COLUMN {schema}.outbox_migration.name IS 'Name of the file.';
COMMENT ON COLUMN {schema}.outbox_migration.applied_at IS 'When it was applied.';`

const sqlMigrationVersion = `SELECT version FROM {schema}.outbox_migration ORDER BY version DESC LIMIT 1`

// sqlMigrationDone is sent with the file, in a message that takes no arguments.
const sqlMigrationDone = `INSERT INTO {schema}.outbox_migration (version, name) VALUES ($1, $2)`

// sqlIsMigrationTable reports whether outbox_migration is there, and is a table that runs
// nothing when it is read, as a view of somebody else would.
const sqlIsMigrationTable = `
SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = $1 AND c.relname = 'outbox_migration' AND c.relkind = 'r' AND NOT c.relrowsecurity)`

// appliedVersion returns the version of the last file that was applied, 0 before the first.
func appliedVersion(ctx context.Context, db *pgxpool.Pool, schema string) (version int, err error) {
	err = readApplied(ctx, db, schema, sqlMigrationVersion, []any{&version}, func() error { return nil })
	return version, err
}

// readApplied reads outbox_migration, if it is there.
func readApplied(ctx context.Context, db *pgxpool.Pool, schema, sql string, row []any, read func() error) error {
	is := false
	err := pg.Query(ctx, db, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&is}, func() error { return nil })
		return err
	}, sqlIsMigrationTable, schema)
	if err != nil || !is {
		return err
	}
	return pg.Query(ctx, db, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, row, read)
		return err
	}, pg.InSchema(sql, schema))
}

// execScript runs any number of statements.
func execScript(ctx context.Context, conn *pgx.Conn, script string) error {
	_, err := conn.PgConn().Exec(ctx, script).ReadAll()
	return err
}

// ensureTable creates the schema and the table of applied files if they are missing.
func (m *migrator) ensureTable(ctx context.Context, conn *pgx.Conn) error {
	var hasSchema, hasTable bool
	if err := conn.QueryRow(ctx, sqlMigrationState, m.cfg.Schema).Scan(&hasSchema, &hasTable); err != nil {
		return fmt.Errorf("look for schema: %w", err)
	}
	if !hasSchema {
		if err := execScript(ctx, conn, pg.InSchema(`CREATE SCHEMA {schema}`, m.cfg.Schema)); err != nil {
			return fmt.Errorf("create schema: %w", err)
		}
	}
	if !hasTable {
		if err := execScript(ctx, conn, pg.InSchema(ddlMigrationTable, m.cfg.Schema)); err != nil {
			return fmt.Errorf("create outbox_migration: %w", err)
		}
	}
	return nil
}

// protect revokes CREATE on the schema from PUBLIC, before a file is applied.
func (m *migrator) protect(ctx context.Context) error {
	return pgx.BeginFunc(ctx, m.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, privileges.SafePath); err != nil {
			return err
		}
		may, revocable, err := privileges.PublicMayCreate(ctx, tx, m.cfg.Schema)
		switch {
		case err != nil:
			return fmt.Errorf("look who may create in the schema: %w", err)
		case may && revocable:
			m.warnPublic("outbox: CREATE on the schema is revoked from PUBLIC")
			_, err = tx.Exec(ctx, pg.InSchema(`REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC`, m.cfg.Schema))
			return err
		case may:
			m.warnPublic("outbox: everybody may create in the schema, its owner should revoke CREATE from PUBLIC")
		}
		return nil
	})
}

// warnPublic logs once what is the matter with a schema in which everybody may create.
func (m *migrator) warnPublic(what string) {
	if !m.warned {
		m.cfg.Logger.Warn(what, "schema", m.cfg.Schema, "why", "who may create functions and operators there can act with the rights of all who use outbox")
	}
	m.warned = true
}

// checkForeign refuses to go on where another role has made something that a file would run,
// or take for a table of outbox.
func (m *migrator) checkForeign(ctx context.Context, conn *pgx.Conn) error {
	foreign, err := privileges.Foreign(ctx, conn, m.cfg.Schema, false)
	if err != nil {
		return fmt.Errorf("look for objects of other roles: %w", err)
	}
	if len(foreign) > 0 {
		return fmt.Errorf("%w: %s", ErrForeignObjects, strings.Join(foreign, "; "))
	}
	return nil
}

// Migration is one step of [Migrate].
type Migration struct {
	// Version is its number, from 1.
	Version int
	// Name is the name of its file in the package migrations.
	Name string
	// AppliedAt is when it was applied; zero if it is pending.
	AppliedAt time.Time
	// Unknown is set if a newer release has applied it and this one does not have it.
	Unknown bool
}

const sqlMigrations = `SELECT version, name, applied_at FROM {schema}.outbox_migration ORDER BY version`

// appliedMigrations returns what outbox_migration says.
func appliedMigrations(ctx context.Context, db *pgxpool.Pool, schema string) (applied []Migration, err error) {
	var m Migration
	err = readApplied(ctx, db, schema, sqlMigrations, []any{&m.Version, &m.Name, &m.AppliedAt}, func() error {
		applied = append(applied, m)
		return nil
	})
	return applied, err
}

// MigrationStatus returns the migrations that this release has or that have been
// applied, by version. It changes nothing; without the schema or the table, all of them
// are pending. It does not see what a tool other than [Migrate] has applied.
func MigrationStatus(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) ([]Migration, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	if err := check.Schema(cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: migrate config: %w", err)
	}
	steps, err := migrationSteps()
	if err != nil {
		return nil, fmt.Errorf("outbox: migration status: %w", err)
	}
	applied, err := appliedMigrations(ctx, db, cfg.Schema)
	if err != nil {
		return nil, fmt.Errorf("outbox: migration status of schema %s: %w", cfg.Schema, err)
	}
	for i := range applied {
		applied[i].Unknown = applied[i].Version > len(steps)
	}
	version := 0 // Migrate applies what comes after the highest
	if n := len(applied); n > 0 {
		version = applied[n-1].Version
	}
	for _, step := range steps[min(version, len(steps)):] {
		applied = append(applied, Migration{Version: step.version, Name: step.name})
	}
	return applied, nil
}
