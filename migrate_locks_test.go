package outbox_test

import (
	"context"
	"io/fs"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
)

// oldFixture is a schema that is as an earlier release has left it.
type oldFixture struct {
	db     *pgxpool.Pool
	schema string
}

// migratedTo applies the first files, as [outbox.Migrate] does.
func migratedTo(t *testing.T, version int) *oldFixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	f := &oldFixture{db: db, schema: schema}
	f.exec(t, `CREATE TABLE {s}.outbox_migration (version int PRIMARY KEY, name varchar(100) NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())`)
	for i, name := range files(t)[:version] {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		f.script(t, string(sql))
		_, err = db.Exec(background, f.sql(`INSERT INTO {s}.outbox_migration (version, name) VALUES ($1, $2)`), i+1, name)
		require.NoError(t, err)
	}
	return f
}

func (f *oldFixture) sql(sql string) string {
	return strings.ReplaceAll(sql, "{s}", pgx.Identifier{f.schema}.Sanitize())
}

func (f *oldFixture) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := f.db.Exec(background, f.sql(sql))
	require.NoError(t, err, sql)
}

// script runs statements whose names are unqualified, as a transaction.
func (f *oldFixture) script(t *testing.T, sql string) {
	t.Helper()
	require.NoError(t, f.tryScript(sql))
}

func (f *oldFixture) tryScript(sql string) error {
	return pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		_, err := tx.Conn().PgConn().Exec(background, f.sql("SET LOCAL search_path TO {s};")+sql).ReadAll()
		return err
	})
}

func (f *oldFixture) count(t *testing.T, from string) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT count(*) FROM {s}.`+from)).Scan(&n))
	return n
}

// oldInsert records an event as an earlier release does.
const oldInsert = `
INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT gen_random_uuid(), 'acme.order.created.v1', 'test', 'Order', n::text, '{"n": 1}', 'application/json', now()
  FROM generate_series(1, $1) AS n`

const oldFailures = `
INSERT INTO {s}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
                               occurred_at, created_at, status)
SELECT id, 'order-events/' || id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, 'waiting'
  FROM {s}.outbox WHERE id % 3 = 0`

// written is what one writer has done: how many rows, and how long the slowest took.
type written struct {
	rows    int
	slowest time.Duration
	err     error
}

// write executes sql in a loop until ctx ends, each time in a transaction of its own.
func (f *oldFixture) write(ctx context.Context, db *pgxpool.Pool, sql string) (w written) {
	for sql = f.sql(sql); ctx.Err() == nil; w.rows++ {
		start := time.Now()
		if _, w.err = db.Exec(background, sql, 1); w.err != nil {
			return w
		}
		w.slowest = max(w.slowest, time.Since(start))
	}
	return w
}

// livingDatabases say what somebody has open while Migrate runs.
var livingDatabases = []struct {
	name    string
	rows    int
	prepare string // once, by its owner
	open    string // in a transaction that takes longOpen
}{
	{name: "a writer", rows: 300_000, open: strings.Replace(oldInsert, "$1", "1", 1)},
	{name: "an operator who reads failed events", rows: 30, open: `SELECT count(*) FROM {s}.outbox_failed`},
	{name: "a relay that proves its lease", rows: 30, open: `SELECT count(*) FROM {s}.outbox_lease`},
	{name: "a dump", rows: 30, open: `SELECT count(*) FROM {s}.outbox, {s}.outbox_failed, {s}.outbox_lease`},
	{name: "a writer, and outbox has partitions", rows: 30, open: strings.Replace(oldInsert, "$1", "1", 1), prepare: `
		SELECT outbox_prepare_partitions(10); ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions; SELECT outbox_partition();
		SELECT outbox_make_partitions()`},
	{name: "a reader of one partition", rows: 30, open: `SELECT count(*) FROM {s}.outbox_default`, prepare: `
		SELECT outbox_prepare_partitions(10); ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions; SELECT outbox_partition();
		SELECT outbox_make_partitions()`},
}

// longOpen is how long a transaction stays open in front of Migrate. A writer of outbox may
// wait for longestLock longer than one of a table that no migration knows: the lock timeout
// is a tenth of it. What the machine keeps both waiting for is not Migrate's.
const (
	longOpen    = 2 * time.Second
	longestLock = time.Second
)

// While Migrate brings a database up to date that is in use, no writer waits for longer
// than the lock timeout: not behind somebody who has a transaction open, nor while
// indexes of outbox_failed are built.
func TestMigrateLivingDatabase(t *testing.T) {
	// Not parallel: it measures how long writers wait.
	for _, tt := range livingDatabases {
		t.Run(tt.name, func(t *testing.T) {
			f := migratedTo(t, 2)
			_, err := f.db.Exec(background, f.sql(oldInsert), tt.rows)
			require.NoError(t, err)
			f.exec(t, oldFailures)
			f.exec(t, `CREATE TABLE {s}.beside (id int)`)
			if tt.prepare != "" {
				for sql := range strings.SplitSeq(tt.prepare, ";") {
					f.script(t, sql)
				}
			}
			open, err := f.db.Begin(background)
			require.NoError(t, err)
			_, err = open.Exec(background, f.sql(tt.open))
			require.NoError(t, err)

			ctx, stop := context.WithCancel(background)
			defer stop()
			var writing sync.WaitGroup
			var beside written
			events := make([]written, 3)
			writers := testenv.Pool(t, nil)
			for i := range events {
				writing.Go(func() { events[i] = f.write(ctx, writers, oldInsert) })
			}
			writing.Go(func() { beside = f.write(ctx, writers, `INSERT INTO {s}.beside VALUES ($1)`) })
			closing := time.AfterFunc(longOpen, func() { _ = open.Commit(background) })
			defer closing.Stop()
			start := time.Now()
			err = outbox.Migrate(background, f.db, outbox.MigrateConfig{Schema: f.schema})
			took := time.Since(start)
			stop()
			writing.Wait()
			require.NoError(t, err)
			rows := tt.rows + strings.Count(tt.open, "INSERT")
			t.Logf("migrated in %v; meanwhile %+v, and beside outbox %+v", took, events, beside)
			require.NoError(t, beside.err)
			for _, w := range events {
				require.NoError(t, w.err)
				require.Less(t, w.slowest, longestLock+beside.slowest)
				rows += w.rows
			}
			require.GreaterOrEqual(t, took, longOpen)
			require.Equal(t, rows, f.count(t, "outbox"))
			require.Equal(t, tt.rows/3, f.count(t, "outbox_failed"))
			require.Len(t, applied(t, f.db, f.schema), len(files(t)))
		})
	}
}

// Who stops to wait is told who has the lock, as the log was.
func TestMigrateSaysWhoHasTheLock(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, 2)
	holder := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "nightly report" })
	open, err := holder.Begin(background)
	require.NoError(t, err)
	defer open.Rollback(background)
	_, err = open.Exec(background, f.sql(`SELECT count(*) FROM {s}.outbox`))
	require.NoError(t, err)
	var log testenv.Buffer
	ctx, cancel := context.WithTimeout(background, 2*time.Second)
	defer cancel()
	err = outbox.Migrate(ctx, f.db, outbox.MigrateConfig{Schema: f.schema, Logger: slog.New(slog.NewTextHandler(&log, nil)), LockTimeout: time.Millisecond})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	for _, part := range []string{"0004_loud_states.sql", "nightly report", "idle in transaction", "outbox"} {
		require.ErrorContains(t, err, part)
		require.Contains(t, log.String(), part)
	}
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
	require.Len(t, applied(t, f.db, f.schema), 3, "what needs no lock on outbox is done")

	require.NoError(t, open.Rollback(background))
	require.NoError(t, outbox.Migrate(background, f.db, outbox.MigrateConfig{Schema: f.schema}))
}

// A file that fails leaves those before it, and is named. What it did itself is undone.
func TestMigrateFileFails(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, 2)
	f.exec(t, `CREATE TABLE {s}.mine (id int); CREATE INDEX idx_outbox_failed_unreadable ON {s}.mine (id)`)
	err := outbox.Migrate(background, f.db, outbox.MigrateConfig{Schema: f.schema})
	require.ErrorContains(t, err, "0005_unreadable_rows.sql: ")
	require.Len(t, applied(t, f.db, f.schema), 4)
	require.Equal(t, 1, f.notValidated(t))
	f.exec(t, `DROP TABLE {s}.mine`)
	require.NoError(t, outbox.Migrate(background, f.db, outbox.MigrateConfig{Schema: f.schema}))
	require.Zero(t, f.notValidated(t))
}

// notValidated counts the constraints that look at no row which was there before.
func (f *oldFixture) notValidated(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(background, `
		SELECT count(*) FROM pg_constraint AS c JOIN pg_namespace AS n ON n.oid = c.connamespace
		 WHERE n.nspname = $1 AND NOT c.convalidated AND c.conname <> 'outbox_xid_is_of_this_transaction'`, f.schema).Scan(&n))
	return n
}

// Where nothing is to be done, Migrate waits for nobody: neither for another process that
// migrates, nor for a lock on a table of events.
func TestMigrateUpToDateWaitsForNobody(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, len(files(t)))
	open, err := f.db.Begin(background)
	require.NoError(t, err)
	defer open.Rollback(background)
	_, err = open.Exec(background, f.sql(`LOCK TABLE {s}.outbox, {s}.outbox_failed, {s}.outbox_lease IN ACCESS EXCLUSIVE MODE`))
	require.NoError(t, err)
	_, err = open.Exec(background, `SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))`, f.schema)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	require.NoError(t, outbox.Migrate(ctx, f.db, outbox.MigrateConfig{Schema: f.schema}))
}

// A tool of the project's own knows nothing of lock timeouts. A file that it applies fails
// while somebody uses outbox, instead of keeping all writers waiting, and can be repeated.
func TestMigrationsByHandLetGo(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, 2)
	open, err := f.db.Begin(background)
	require.NoError(t, err)
	defer open.Rollback(background)
	_, err = open.Exec(background, f.sql(`SELECT count(*) FROM {s}.outbox, {s}.outbox_failed`))
	require.NoError(t, err)
	for _, name := range files(t)[2:4] {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		start := time.Now()
		err = f.tryScript(string(sql))
		var failure *pgconn.PgError
		require.ErrorAs(t, err, &failure)
		require.Equal(t, "55P03", failure.Code, name)
		require.Less(t, time.Since(start), longestLock)
		if name == files(t)[2] { // the next one needs it, and outbox itself
			require.NoError(t, open.Rollback(background))
			f.script(t, string(sql))
			open, err = f.db.Begin(background)
			require.NoError(t, err)
			defer open.Rollback(background)
			_, err = open.Exec(background, f.sql(`SELECT count(*) FROM {s}.outbox`))
			require.NoError(t, err)
		}
	}
	require.NoError(t, open.Rollback(background))
	for _, name := range files(t)[3:] {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		f.script(t, string(sql))
	}
}
