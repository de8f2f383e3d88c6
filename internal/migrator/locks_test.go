package migrator_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// written is what one writer has done: how many rows, and how long the slowest took.
type written struct {
	rows    int
	slowest time.Duration
	err     error
}

// write executes sql in a loop until ctx ends, each time in a transaction of its own.
func (f *fixture) write(ctx context.Context, db *pgxpool.Pool, sql string) (w written) {
	for sql = f.sql(sql); ctx.Err() == nil; w.rows++ {
		start := time.Now()
		if _, w.err = db.Exec(context.WithoutCancel(ctx), sql, 1); w.err != nil {
			return w
		}
		w.slowest = max(w.slowest, time.Since(start))
	}
	return w
}

const (
	insertEvent = `
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (gen_random_uuid(), 'acme.order.created.v1', 'test', 'Order', '1', '{"n": 1}', 'application/json', now())`
	makePartitions = `SELECT outbox_prepare_partitions(10); ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions;
		SELECT outbox_partition(); SELECT outbox_make_partitions()`
)

// livingDatabases say which transaction is open while Run migrates.
var livingDatabases = []struct {
	name    string
	rows    int
	prepare string // statements, each a transaction of the owner
	open    string // in a transaction that takes longOpen
}{
	{name: "a writer", rows: 300_000, open: insertEvent},
	{name: "an operator who reads failed events", rows: 30, open: `SELECT count(*) FROM {s}.outbox_failed`},
	{name: "a relay that proves its lease", rows: 30, open: `SELECT count(*) FROM {s}.outbox_lease`},
	{name: "a dump", rows: 30, open: `SELECT count(*) FROM {s}.outbox, {s}.outbox_failed, {s}.outbox_lease`},
	{name: "a writer, and outbox has partitions", rows: 30, open: insertEvent, prepare: makePartitions},
	{name: "a reader of one partition", rows: 30, open: `SELECT count(*) FROM {s}.outbox_default`, prepare: makePartitions},
}

// longOpen is how long a transaction stays open in front of Run. A writer of outbox may wait for longestLock longer
// than a writer of a table that no migration knows: the lock timeout is a tenth of it. Both writers share the delays of
// the machine.
const (
	longOpen    = 2 * time.Second
	longestLock = time.Second
)

// While Run brings a database up to date that is in use, no writer waits for longer than the lock timeout: not behind
// a transaction that is open, nor while indexes of outbox_failed are built.
func TestMigrateLivingDatabase(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it measures how long writers wait.
	for _, tt := range livingDatabases {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.exec(t, insertEvents, tt.rows)
			f.exec(t, insertFailures)
			f.exec(t, `CREATE TABLE {s}.alongside (id int)`)
			if tt.prepare != "" {
				for sql := range strings.SplitSeq(tt.prepare, ";") {
					f.script(t, sql)
				}
			}
			open := f.open(t, f.db, tt.open)

			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var writing sync.WaitGroup
			var alongside written
			events, closed := make([]written, 3), make(chan struct{})
			writers := testenv.Pool(t, nil)
			for i := range events {
				writing.Go(func() { events[i] = f.write(ctx, writers, insertEvents) })
			}
			writing.Go(func() { alongside = f.write(ctx, writers, `INSERT INTO {s}.alongside VALUES ($1)`) })
			closing := time.AfterFunc(longOpen, func() {
				defer close(closed)
				_ = open.Commit(context.WithoutCancel(ctx))
			})
			defer func() {
				if !closing.Stop() {
					<-closed
				}
			}()
			start := time.Now()
			err := f.migrator(nextFiles(t)).Run(t.Context())
			took := time.Since(start)
			stop()
			writing.Wait()
			require.NoError(t, err)
			rows := tt.rows + strings.Count(tt.open, "INSERT")
			t.Logf("migrated in %v; meanwhile %+v, and alongside outbox %+v", took, events, alongside)
			require.NoError(t, alongside.err)
			for _, w := range events {
				require.NoError(t, w.err)
				require.Less(t, w.slowest, longestLock+alongside.slowest)
				rows += w.rows
			}
			require.GreaterOrEqual(t, took, longOpen)
			require.Equal(t, rows, f.count(t, "outbox"))
			require.Equal(t, tt.rows/3, f.count(t, "outbox_failed"))
			require.Equal(t, len(names(t))+len(nextRelease), f.applied(t))
		})
	}
}

// An error of Run that waits for a lock, and its log, say which process has the lock.
func TestMigrateSaysWhoHasTheLock(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	holder := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "nightly report" })
	open := f.open(t, holder, `SELECT count(*) FROM {s}.outbox`)
	var log testenv.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	m := f.migrator(nextFiles(t))
	m.Logger, m.LockTimeout = slog.New(slog.NewTextHandler(&log, nil)), time.Millisecond
	err := m.Run(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	for _, part := range []string{nextName(t, 2), "nightly report", "idle in transaction", "outbox"} {
		require.ErrorContains(t, err, part)
		require.Contains(t, log.String(), part)
	}
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
	require.Equal(t, len(names(t))+2, f.applied(t), "the files that need no lock on outbox are applied")

	require.NoError(t, open.Rollback(t.Context()))
	require.NoError(t, f.migrator(nextFiles(t)).Run(t.Context()))
}

// A file that fails leaves those before it, and is named. What it did itself is undone.
func TestMigrateFileFails(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.exec(t, `ALTER TABLE {s}.outbox_lease ADD COLUMN next text`)
	err := f.migrator(nextFiles(t)).Run(t.Context())
	require.ErrorContains(t, err, nextName(t, 1)+": ")
	require.Equal(t, len(names(t))+1, f.applied(t))
	require.Equal(t, 1, f.notValidated(t), "its first statement is undone")
	f.exec(t, `ALTER TABLE {s}.outbox_lease DROP COLUMN next`)
	require.NoError(t, f.migrator(nextFiles(t)).Run(t.Context()))
	require.Zero(t, f.notValidated(t))
}

// notValidated counts the constraints that were not checked against the rows that were there before them.
func (f *fixture) notValidated(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_constraint AS c JOIN pg_namespace AS n ON n.oid = c.connamespace
		 WHERE n.nspname = $1 AND NOT c.convalidated AND c.conname <> 'outbox_xid_is_of_this_transaction'`, f.schema).Scan(&n))
	return n
}

// On a schema that is up to date, Run waits neither for another process that migrates, nor for a
// lock on a table of events.
func TestMigrateUpToDateWaitsForNobody(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	open := f.open(t, f.db, `LOCK TABLE {s}.outbox, {s}.outbox_failed, {s}.outbox_lease IN ACCESS EXCLUSIVE MODE`)
	_, err := open.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))`, f.schema)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	require.NoError(t, f.migrator(nil).Run(ctx))
}

// A tool of the project's own sets no lock timeout. A file that it applies fails while a table is in use, instead of
// keeping all writers waiting, and can be repeated.
func TestMigrationsByHandLetGo(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	f := &fixture{db: db, schema: schema}
	last := len(names(t)) - 1
	for _, name := range names(t)[:last] {
		f.script(t, file(t, name))
	}
	for _, table := range []string{"outbox_cursor", "outbox_lease", "event_handled", "event_delivery"} {
		open := f.open(t, f.db, `SELECT count(*) FROM {s}.`+table)
		start := time.Now()
		err := f.tryScript(t.Context(), file(t, names(t)[last]))
		var failure *pgconn.PgError
		require.ErrorAs(t, err, &failure)
		require.Equal(t, "55P03", failure.Code, table)
		require.Less(t, time.Since(start), longestLock)
		require.NoError(t, open.Rollback(t.Context()))
	}
	f.script(t, file(t, names(t)[last]))
}

// Another session that changes the rights to the schema at the same time does not make Run fail.
func TestMigrateBesideAChangeOfRights(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	f := &fixture{db: db, schema: schema}
	f.exec(t, `GRANT CREATE ON SCHEMA {s} TO PUBLIC`)
	for _, sql := range []string{`REVOKE CREATE ON SCHEMA {s} FROM PUBLIC`, `GRANT USAGE ON SCHEMA {s} TO PUBLIC`} {
		open := f.open(t, f.db, sql)
		done := make(chan error, 1)
		go func() { done <- f.migrator(nil).Run(t.Context()) }()
		require.Never(t, func() bool { return len(done) > 0 }, time.Second, 10*time.Millisecond, "it waits")
		require.NoError(t, open.Commit(t.Context()))
		require.NoError(t, <-done)
		f.exec(t, `DROP SCHEMA {s} CASCADE`)
		f.exec(t, `CREATE SCHEMA {s}`)
		f.exec(t, `GRANT CREATE ON SCHEMA {s} TO PUBLIC`)
	}
}
