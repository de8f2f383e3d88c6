package mixed_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/outboxgo/outbox/outboxtest"
)

// cupSold is an event whose payload has what libraries replace in statements.
type cupSold struct {
	Cup  string    `json:"cup"`
	Note string    `json:"note"`
	At   time.Time `json:"at"`
}

func (c cupSold) OccurredAt() time.Time { return c.At }
func (c cupSold) cup() string           { return c.Cup }

// newCups returns tables, and what records that cups were sold.
func newCups(t *testing.T) (*pgxpool.Pool, string, *outbox.Registry, *outbox.Recorder) {
	t.Helper()
	pool, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), pool, outbox.MigrateConfig{Schema: schema}))
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.cup.sold.v1", "Cup", cupSold.cup))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	return pool, schema, events, rec
}

var errUndo = errors.New("undo")

// A test of a service looks into the transaction of its library before it is rolled back, and at what is committed
// through the same connections.
func TestRecordedByEachLibrary(t *testing.T) {
	t.Parallel()
	pool, schema, events, rec := newCups(t)
	db, libraries := allLibraries(t, pool)
	committed := cupSold{Cup: "committed", At: time.Now().Truncate(time.Microsecond)}
	require.NoError(t, inTx(t.Context(), db, func(tx *sql.Tx) error { return outboxsql.Record(t.Context(), tx, rec, committed) }))
	for name, library := range libraries {
		t.Run(name, func(t *testing.T) {
			sold := cupSold{Cup: "a", Note: `? $1 :cup {"b": "\\"}`, At: committed.At}
			require.ErrorIs(t, library.inTx(t.Context(), func(tx outboxsql.Tx, look outboxtest.SQLDB) error {
				require.NoError(t, outboxsql.Record(t.Context(), tx, rec, sold))
				here := outboxtest.InSchema(outboxtest.SQL(look), schema)
				outboxtest.RequireRecorded(t.Context(), t, here, events, sold)
				id := uuid.New()
				later := outbox.With(cupSold{Cup: "later", At: committed.At}, outbox.EventOptions{ID: id, NotBefore: committed.At.Add(time.Hour)})
				require.NoError(t, outboxsql.Record(t.Context(), tx, rec, later))
				outboxtest.RequireRecorded(t.Context(), t, here, events, later)
				for _, want := range []bool{true, false} {
					cancelled, err := outboxsql.Cancel(t.Context(), tx, rec, id)
					require.NoError(t, err)
					require.Equal(t, want, cancelled)
				}
				found := outboxtest.Recorded[cupSold](t.Context(), t, here, events)
				require.Len(t, found, 1, "what others have recorded is not there")
				require.Equal(t, sold.Note, found[0].Note)
				return errUndo
			}), errUndo)
			found := outboxtest.Recorded[cupSold](t.Context(), t, outboxtest.InSchema(outboxtest.SQL(library.db), schema), events)
			require.Len(t, found, 1)
			require.Equal(t, "committed", found[0].Cup)
		})
	}
}

// DrainWorker looks through lib/pq, while the worker has a pool of pgx.
func TestDrainWorkerByPQ(t *testing.T) {
	t.Parallel()
	pool, schema, events, rec := newCups(t)
	pq, err := sql.Open("postgres", shoptest.ForPQ(t, pool.Config().ConnString()))
	require.NoError(t, err)
	defer pq.Close()
	handled := 0
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: schema, From: outbox.FromStart}, PollInterval: 10 * time.Millisecond}
	worker, err := outbox.NewWorker(pool, events, "cups", cfg, outboxsql.Handle("COUNTED", func(context.Context, *sql.Tx, cupSold, outbox.Metadata) error {
		handled++
		return nil
	}))
	require.NoError(t, err)
	require.NoError(t, outboxsql.InTx(t.Context(), pq, worker.Waker(), func(tx *sql.Tx) error {
		return outboxsql.Record(t.Context(), tx, rec, cupSold{Cup: "a", At: time.Now()}, cupSold{Cup: "a", At: time.Now()})
	}))
	outboxtest.DrainWorker(t.Context(), t, outboxtest.InSchema(outboxtest.SQL(pq), schema), worker)
	require.Equal(t, 2, handled)
}

// allLibraries returns all libraries over a pool, and the database of those that use it.
func allLibraries(t *testing.T, pool *pgxpool.Pool) (*sql.DB, map[string]lookable) {
	t.Helper()
	db := stdlib.OpenDBFromPool(pool)
	pq, err := sql.Open("postgres", shoptest.ForPQ(t, pool.Config().ConnString()))
	require.NoError(t, err)
	direct := stdlib.OpenDBFromPool(testenv.PoolIn(t, pgx.QueryExecModeCacheStatement)) // which PrepareStmt needs
	t.Cleanup(func() { require.NoError(t, errors.Join(pq.Close(), db.Close(), direct.Close())) })
	return db, map[string]lookable{
		"stdlib": ofSQL(db), "lib/pq": ofSQL(pq), "GORM": ofGORM(t, db, false), "GORM that prepares": ofGORM(t, direct, true), "driver of ent": ofEnt(db), "Bun": ofBun(db),
		"sqlx": ofSQLX(db, "pgx"), "sqlx on lib/pq": ofSQLX(pq, "postgres"),
	}
}

// lookable is a library, as far as a test needs it.
type lookable struct {
	db   outboxtest.SQLDB
	inTx func(ctx context.Context, f func(tx outboxsql.Tx, look outboxtest.SQLDB) error) error
}

func inTx(ctx context.Context, db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func ofSQL(db *sql.DB) lookable {
	return lookable{db, func(ctx context.Context, f func(outboxsql.Tx, outboxtest.SQLDB) error) error {
		return inTx(ctx, db, func(tx *sql.Tx) error { return f(tx, tx) })
	}}
}

func ofGORM(t *testing.T, conn *sql.DB, prepares bool) lookable {
	t.Helper()
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: conn}), &gorm.Config{Logger: logger.Discard, PrepareStmt: prepares})
	require.NoError(t, err)
	return lookable{db.Statement.ConnPool, func(ctx context.Context, f func(outboxsql.Tx, outboxtest.SQLDB) error) error {
		return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			return f(tx.Statement.ConnPool.(outboxsql.Tx), tx.Statement.ConnPool)
		})
	}}
}

func ofEnt(db *sql.DB) lookable {
	driver := entsql.OpenDB(dialect.Postgres, db)
	return lookable{driver, func(ctx context.Context, f func(outboxsql.Tx, outboxtest.SQLDB) error) error {
		begun, err := driver.Tx(ctx)
		if err != nil {
			return err
		}
		tx := begun.(*entsql.Tx)
		return errors.Join(f(tx, tx), tx.Rollback())
	}}
}

func ofBun(conn *sql.DB) lookable {
	db := bun.NewDB(conn, pgdialect.New())
	return lookable{db, func(ctx context.Context, f func(outboxsql.Tx, outboxtest.SQLDB) error) error {
		return db.RunInTx(ctx, nil, func(_ context.Context, tx bun.Tx) error { return f(tx, tx) })
	}}
}

func ofSQLX(conn *sql.DB, driver string) lookable {
	db := sqlx.NewDb(conn, driver)
	return lookable{db, func(ctx context.Context, f func(outboxsql.Tx, outboxtest.SQLDB) error) error {
		tx, err := db.BeginTxx(ctx, nil)
		if err != nil {
			return err
		}
		return errors.Join(f(tx, tx), tx.Rollback())
	}}
}
