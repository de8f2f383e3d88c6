package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
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
}

const maxPartitionRows = 1_000_000_000

func (c MigrateConfig) validate() error {
	err := errors.Join(check.Schema(c.Schema), check.NotNegative("PartitionRows", c.PartitionRows))
	if c.PartitionRows > maxPartitionRows {
		err = errors.Join(err, fmt.Errorf("field PartitionRows is %d: at most %d", c.PartitionRows, maxPartitionRows))
	}
	return err
}

// Migrate brings the tables of outbox up to date. It may be called at every start and
// by many processes at once: one of them migrates, the others wait for it and find
// nothing to do. All steps are one transaction. The steps that partition a table follow
// in transactions of their own; if Migrate is stopped between them, call it again, since
// until then the table rejects ids that are far ahead.
//
// It returns [ErrDatabaseAhead], and changes nothing, if a newer release has migrated
// the database. The role needs CREATE on the schema, or on the database if the schema
// does not exist. A project that uses a migration tool can apply the files of the
// package migrations with that instead.
func Migrate(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("outbox: migrate config: %w", err)
	}
	steps, err := migrationSteps()
	if err != nil {
		return fmt.Errorf("outbox: migrate: %w", err)
	}
	// Under READ COMMITTED each statement sees what the process that had the lock
	// before has committed. The pool's default may be another level.
	err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		return migrate(ctx, tx, cfg.Schema, steps)
	})
	if err == nil && cfg.PartitionRows > 0 {
		err = makePartitioned(ctx, db, cfg)
	}
	if err != nil {
		return fmt.Errorf("outbox: migrate schema %s: %w", cfg.Schema, err)
	}
	return nil
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

// sqlMigrateLock makes other processes wait until our transaction ends.
const sqlMigrateLock = `SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))`

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

const sqlMigrationVersion = `SELECT coalesce(max(version), 0) FROM {schema}.outbox_migration`

const sqlMigrationDone = `INSERT INTO {schema}.outbox_migration (version, name) VALUES ($1, $2)`

// sqlSearchPath makes the schema the default for unqualified names, which the files
// have, until the end of the transaction.
const sqlSearchPath = `SELECT set_config('search_path', $1, true)`

// migrate applies the steps that the schema does not have yet.
func migrate(ctx context.Context, tx pgx.Tx, schema string, steps []migration) error {
	if _, err := tx.Exec(ctx, sqlMigrateLock, schema); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	version, err := schemaVersion(ctx, tx, schema)
	if err != nil {
		return err
	}
	if version > len(steps) {
		return fmt.Errorf("%w: it is at version %d, this release knows %d", ErrDatabaseAhead, version, len(steps))
	}
	if version == len(steps) {
		return nil
	}
	if _, err := tx.Exec(ctx, sqlSearchPath, pgx.Identifier{schema}.Sanitize()); err != nil {
		return fmt.Errorf("search path: %w", err)
	}
	for _, step := range steps[version:] {
		if err := execScript(ctx, tx, step.sql); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		if _, err := tx.Exec(ctx, pg.InSchema(sqlMigrationDone, schema), step.version, step.name); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// execScript runs any number of statements.
func execScript(ctx context.Context, tx pgx.Tx, script string) error {
	_, err := tx.Conn().PgConn().Exec(ctx, script).ReadAll()
	return err
}

// schemaVersion returns the version of the last step that was applied. It first creates
// the schema and the table of applied steps if they are missing.
func schemaVersion(ctx context.Context, tx pgx.Tx, schema string) (version int, err error) {
	var hasSchema, hasTable bool
	if err := tx.QueryRow(ctx, sqlMigrationState, schema).Scan(&hasSchema, &hasTable); err != nil {
		return 0, fmt.Errorf("look for schema: %w", err)
	}
	if !hasSchema {
		if _, err := tx.Exec(ctx, pg.InSchema(`CREATE SCHEMA {schema}`, schema)); err != nil {
			return 0, fmt.Errorf("create schema: %w", err)
		}
	}
	if !hasTable {
		if err := execScript(ctx, tx, pg.InSchema(ddlMigrationTable, schema)); err != nil {
			return 0, fmt.Errorf("create outbox_migration: %w", err)
		}
	}
	err = tx.QueryRow(ctx, pg.InSchema(sqlMigrationVersion, schema)).Scan(&version)
	return version, err
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
	var applied []Migration
	rows, err := db.Query(ctx, pg.InSchema(sqlMigrations, cfg.Schema))
	if err == nil {
		applied, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (m Migration, err error) {
			return m, row.Scan(&m.Version, &m.Name, &m.AppliedAt)
		})
	}
	if err != nil && !pg.IsUndefined(err) {
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
