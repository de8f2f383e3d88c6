package migrator_test

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
)

// nextRelease are the files of a release that comes after this one. They change tables that are in use, in the way in
// which a migration has to do it: each file locks as few tables as it can, and the file that locks outbox reads no row.
var nextRelease = []struct{ name, sql string }{
	{"failed.sql", `
		ALTER TABLE outbox_failed ADD COLUMN next int NOT NULL DEFAULT 0,
		      ADD CONSTRAINT outbox_failed_next CHECK (next >= 0) NOT VALID;
		CREATE INDEX outbox_failed_next_idx ON outbox_failed (relay, next);`},
	{"lease.sql", `
		ALTER TABLE outbox_failed VALIDATE CONSTRAINT outbox_failed_next;
		ALTER TABLE outbox_lease ADD COLUMN next int;`},
	{"outbox.sql", `
		LOCK TABLE ONLY outbox IN ACCESS EXCLUSIVE MODE;
		LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE NOWAIT;
		ALTER TABLE outbox ADD COLUMN next int NOT NULL DEFAULT 0;`},
}

// names returns the names of the files of this release.
func names(t *testing.T) []string {
	t.Helper()
	all, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

// nextName returns the name of a file of the next release.
func nextName(t *testing.T, i int) string {
	t.Helper()
	return fmt.Sprintf("%04d_%s", len(names(t))+i+1, nextRelease[i].name)
}

// nextFiles returns the files of this release and of the next one.
func nextFiles(t *testing.T) fs.FS {
	t.Helper()
	files := fstest.MapFS{}
	for _, name := range names(t) {
		files[name] = &fstest.MapFile{Data: []byte(file(t, name))}
	}
	for i, next := range nextRelease {
		files[nextName(t, i)] = &fstest.MapFile{Data: []byte(next.sql)}
	}
	return files
}

// file returns the statements of a file of this release.
func file(t *testing.T, name string) string {
	t.Helper()
	sql, err := fs.ReadFile(migrations.FS, name)
	require.NoError(t, err)
	return string(sql)
}

// fixture is a schema with the tables of this release.
type fixture struct {
	db     *pgxpool.Pool
	schema string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	f := &fixture{db: db, schema: schema}
	require.NoError(t, f.migrator(nil).Run(t.Context()))
	return f
}

// migrator returns one that applies files, or those of this release if files is nil.
func (f *fixture) migrator(files fs.FS) *migrator.Migrator {
	return &migrator.Migrator{DB: f.db, Schema: f.schema, LockTimeout: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), Files: files}
}

func (f *fixture) sql(sql string) string {
	return strings.ReplaceAll(sql, "{s}", pgx.Identifier{f.schema}.Sanitize())
}

func (f *fixture) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := f.db.Exec(t.Context(), f.sql(sql), args...)
	require.NoError(t, err, sql)
}

// script runs statements whose names are unqualified, as a transaction.
func (f *fixture) script(t *testing.T, sql string) {
	t.Helper()
	require.NoError(t, f.tryScript(t.Context(), sql))
}

func (f *fixture) tryScript(ctx context.Context, sql string) error {
	return pgx.BeginFunc(ctx, f.db, func(tx pgx.Tx) error {
		_, err := tx.Conn().PgConn().Exec(ctx, f.sql("SET LOCAL search_path TO {s};")+sql).ReadAll()
		return err
	})
}

func (f *fixture) count(t *testing.T, from string) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(t.Context(), f.sql(`SELECT count(*) FROM {s}.`+from)).Scan(&n))
	return n
}

// applied counts the files that Run remembers.
func (f *fixture) applied(t *testing.T) int {
	t.Helper()
	return f.count(t, "outbox_migration")
}

// open runs a statement in a transaction that stays open until the test ends it.
func (f *fixture) open(t *testing.T, db *pgxpool.Pool, sql string) pgx.Tx {
	t.Helper()
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(t.Context(), f.sql(sql))
	require.NoError(t, err)
	return tx
}

// insertEvents records $1 events.
const insertEvents = `
INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT gen_random_uuid(), 'acme.order.created.v1', 'test', 'Order', n::text, '{"n": 1}', 'application/json', now()
  FROM generate_series(1, $1) AS n`

// insertFailures has each third event wait in outbox_failed.
const insertFailures = `
INSERT INTO {s}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload,
                               content_type, occurred_at, created_at, status)
SELECT id, 'order-events/' || id, event_id, event_type, source, aggregate_type, aggregate_id, payload,
       content_type, occurred_at, created_at, 'waiting'
  FROM {s}.outbox WHERE id % 3 = 0`
