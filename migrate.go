package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/indexes"
	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// MigrateConfig tunes [Migrate].
type MigrateConfig struct {
	// Schema is where the tables are. It is created if it is missing. Empty means public.
	Schema string
	// PartitionRows makes outbox a partitioned table with this many ids in a partition, at most a billion. Retention
	// then drops partitions; each must hold more events than are recorded between two of its runs (10 minutes). A table
	// with events becomes the first partition, with room for at least ten times PartitionRows more ids; writers wait at
	// most 50 ms at a time. A partitioned table is not changed. Zero means a plain table.
	PartitionRows int64
	// Publication is the name of a publication for Debezium, or another reader of logical replication, in place of a
	// relay: lower-case letters, digits and underscores. Migrate creates it for inserts into outbox, and a trigger that
	// sets topic and partition_key of rows without them, and rejects rows without a valid topic. A published table
	// cannot be partitioned: set PartitionRows before, or in the same call. The role needs CREATE on the database.
	// docs/move.md has the steps. Empty means none.
	Publication string
	// AggregateIndex adds an index on type and id of the aggregate, for outboxops.Inspector, without blocking writers.
	// Migrate waits for the transactions that were open when it began, and needs two connections. Recording costs 67
	// more bytes for each event, and about a quarter more time for many events in one transaction. False keeps an
	// existing index.
	AggregateIndex bool
	// UniqueEventIDs adds a unique index on event ids, built like that of AggregateIndex. Recording an id that outbox
	// has then fails with [ErrDuplicateEvent]; ids of removed events may be used again. Recording costs 31 more bytes
	// for each event, and less than a tenth more time. A partitioned outbox cannot have it ([ErrPartitioned]).
	UniqueEventIDs bool
	// LockTimeout is how long a migration waits for the lock of a table before it rolls back and tries again. Writers
	// wait behind it for as long, and about 2 ms more for each partition of outbox. A migration cancels a running
	// autovacuum only if LockTimeout is longer than PostgreSQL's deadlock_timeout. Zero means 100 ms.
	LockTimeout time.Duration
	// Logger receives WARN when a migration or index gets no lock, with the session that has it, and when it got it.
	// Nil means slog.Default().
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

// Migrate brings the tables of outbox up to date. It may be called at every start and by many
// processes at once: one of them migrates, the others wait for it and find nothing to do. If there
// is nothing to do, it asks PostgreSQL three times and locks nothing.
//
// Each file of the package migrations is a transaction. If one fails, those before it stay, and the
// error names it. Writers, relays and consumers may be at work: a file that does not get its locks
// within LockTimeout releases them, and is tried again until ctx ends, with waits that grow to 5 s.
// So a transaction that stays open delays only Migrate. The steps that partition a table follow in
// transactions of their own, and are tried again alike. If Migrate is stopped between them, call it
// again, since until then the table rejects ids that are far ahead.
//
// If a newer release has migrated the database, Migrate changes nothing. It logs a WARN and returns
// nil where the newer files say that this release may run on their tables. Otherwise it returns
// [ErrDatabaseAhead].
//
// It revokes CREATE on the schema from PUBLIC where the role may do that, and logs it as WARN. It
// returns [ErrForeignObjects] where an untrusted role has made functions or operators in the schema
// that the files would run, functions named outbox_…, or relations of the names that outbox uses: drop
// them, or migrate as that role. Trusted are the role itself, superusers, the owner of the schema, and
// roles that were granted CREATE on it by name.
//
// The role needs CREATE on the schema, or on the database if the schema does not exist. A project
// that uses a migration tool can apply the files of the package migrations with that instead.
func Migrate(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("outbox: migrate config: %w", err)
	}
	m := &migrator.Migrator{DB: db, Schema: cfg.Schema, LockTimeout: cfg.LockTimeout, Logger: cfg.Logger}
	err := m.Run(ctx)
	if err == nil && !m.Ahead {
		err = makeOptions(ctx, db, cfg)
	}
	if err != nil {
		return fmt.Errorf("outbox: migrate schema %s: %w", cfg.Schema, err)
	}
	return nil
}

// makeOptions makes the partitions, the publication and the indexes that are asked for.
func makeOptions(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) (err error) {
	if cfg.PartitionRows > 0 {
		err = makePartitioned(ctx, db, cfg)
	}
	if err == nil && cfg.Publication != "" {
		err = publish(ctx, db, cfg)
	}
	if err == nil {
		err = makeIndexes(ctx, db, cfg)
	}
	return err
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

// lockTimeout is how long each try to partition or to publish the table waits for a lock.
const lockTimeout = 50 * time.Millisecond

// insist calls try until it gets its locks, or ctx ends.
func insist(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig, what string, try func() error) error {
	m := &migrator.Migrator{DB: db, Schema: cfg.Schema, LockTimeout: lockTimeout, Logger: cfg.Logger}
	return m.Insist(ctx, what, func(pause time.Duration) error {
		if wait.Sleep(ctx, pause); ctx.Err() != nil {
			return ctx.Err()
		}
		return try()
	})
}

// makePartitioned makes outbox a partitioned table. It tries again if it does not get a
// lock, or if another process is doing the same.
func makePartitioned(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	const others, pause = 300, 200 * time.Millisecond // how often to look whether another process is done
	for try := 1; ; try++ {
		err := insist(ctx, db, cfg, "partitioning of outbox", func() error { return tryPartitioned(ctx, db, cfg) })
		const notReady, constraintGone = "55000", "42704"
		if code := pg.Code(err); code != notReady && code != constraintGone || try == others || ctx.Err() != nil {
			return err
		}
		wait.Sleep(ctx, pause)
	}
}

// The steps of [makePartitioned]. Each is a transaction of its own, so that no lock is
// held while rows are read. A step that was done before does nothing.
const (
	sqlPreparePartitions = `SELECT {schema}.outbox_prepare_partitions($1::bigint)`
	sqlCheckPartitions   = `ALTER TABLE {schema}.outbox VALIDATE CONSTRAINT outbox_before_partitions`
	sqlPartition         = `SELECT {schema}.outbox_partition()`
)

// tryPartitioned runs the steps, unless the table is partitioned already.
func tryPartitioned(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	var partitioned bool
	if err := db.QueryRow(ctx, pg.InSchema(retention.SQLPartitioned, cfg.Schema)).Scan(&partitioned); err != nil || partitioned {
		return err
	}
	if unique, err := indexes.IsThere(ctx, db, cfg.Schema, indexes.EventID); err != nil || unique {
		if unique {
			err = fmt.Errorf("%w: drop index %s first", ErrPartitioned, indexes.EventID.Name())
		}
		return err
	}
	ignoreResult := func(row pgx.Row) error { return row.Scan(nil) }
	if err := retention.AtOnce(ctx, db, ignoreResult, pg.InSchema(sqlPreparePartitions, cfg.Schema), cfg.PartitionRows); err != nil {
		return fmt.Errorf("prepare partitions: %w", err)
	}
	noRows := func(rows pgx.Rows) error { rows.Close(); return rows.Err() }
	if err := pg.Query(ctx, db, pg.Unbounded, noRows, pg.InSchema(sqlCheckPartitions, cfg.Schema)); err != nil {
		return fmt.Errorf("check partitions: %w", err)
	}
	for _, sql := range []string{sqlPartition, retention.SQLMakePartitions} {
		if err := retention.AtOnce(ctx, db, ignoreResult, pg.InSchema(sql, cfg.Schema)); err != nil {
			return fmt.Errorf("make partitions: %w", err)
		}
	}
	return nil
}

// sqlIsPublished reports whether outbox_publish has nothing to do.
const sqlIsPublished = `
SELECT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = {outbox}::regclass::oid AND tgname = 'outbox_complete_row')
   AND EXISTS (SELECT FROM pg_catalog.pg_publication AS p WHERE p.pubname = $1 AND p.pubinsert AND p.pubviaroot
                  AND NOT (p.puballtables OR p.pubupdate OR p.pubdelete OR p.pubtruncate)
                  AND coalesce(starts_with(pg_catalog.obj_description(p.oid, 'pg_publication'), 'outbox: its cuts add and drop the table'), false))`

const sqlPublish = `SELECT {schema}.outbox_publish($1::text)`

// publish makes the publication and the trigger. It tries again if it does not get a lock.
func publish(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) error {
	var is bool
	err := db.QueryRow(ctx, pg.InSchema(sqlIsPublished, cfg.Schema), cfg.Publication).Scan(&is)
	if err == nil && !is {
		err = insist(ctx, db, cfg, "publication of outbox", func() error {
			return retention.AtOnce(ctx, db, func(row pgx.Row) error { return row.Scan(nil) }, pg.InSchema(sqlPublish, cfg.Schema), cfg.Publication)
		})
	}
	if err != nil {
		return fmt.Errorf("publish outbox: %w", err)
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

// MigrationStatus returns the migrations that this release has or that have been
// applied, by version. It changes nothing; without the schema or the table, all of them
// are pending. It does not see what a tool other than [Migrate] has applied.
func MigrationStatus(ctx context.Context, db *pgxpool.Pool, cfg MigrateConfig) ([]Migration, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	if err := check.Schema(cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: migrate config: %w", err)
	}
	applied, pending, err := migrator.State(ctx, db, cfg.Schema)
	if err != nil {
		return nil, fmt.Errorf("outbox: migration status of schema %s: %w", cfg.Schema, err)
	}
	var all []Migration
	for _, a := range applied {
		all = append(all, Migration{Version: a.Version, Name: a.Name, AppliedAt: a.At, Unknown: a.Unknown})
	}
	for _, step := range pending {
		all = append(all, Migration{Version: step.Version, Name: step.Name})
	}
	return all, nil
}
