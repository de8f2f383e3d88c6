package outboxtest_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

// open returns the fixture's database for database/sql, in a mode of the protocol.
func (h *schemaFixture) open(t testing.TB, mode pgx.QueryExecMode) *sql.DB {
	t.Helper()
	pool := testenv.PoolIn(t, mode)
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

// beginSQL opens a transaction that rolls back when the test ends.
func beginSQL(t testing.TB, db *sql.DB) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(background, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// The helpers find in a transaction of database/sql what they find in one of pgx, and say the same if it is not there.
func TestSQLIsLikePgx(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheStatement, pgx.QueryExecModeDescribeExec,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			db := h.open(t, mode)
			for _, tt := range recordedTests {
				tx := beginSQL(t, db)
				require.NoError(t, outboxsql.Record(background, tx, h.rec, tt.recorded...))
				outboxtest.RequireRecorded(background, t, h.in(outboxtest.SQL(tx)), h.events, tt.want...)
				require.NoError(t, tx.Rollback())
			}
			for _, tt := range notRecordedTests {
				tx := beginSQL(t, db)
				require.NoError(t, outboxsql.Record(background, tx, h.rec, tt.recorded...))
				says := failure(t, func(f *fakeT) {
					outboxtest.RequireRecorded(background, f, h.in(outboxtest.SQL(tx)), h.events, tt.want...)
				})
				for _, want := range tt.says {
					require.Contains(t, says, want, tt.name)
				}
				require.NoError(t, tx.Rollback())
			}
		})
	}
}

// Transactions as libraries make them of those of database/sql. Those of Bun do not pass arguments on.
type (
	bunTx       struct{ *sql.Tx }
	bunDB       struct{ *sql.DB }
	preparingTx struct{ libraryTx }
	ownTx       struct{ tx *sql.Tx }
)

// libraryTx is the interface of a transaction of some library.
type libraryTx interface {
	outboxtest.SQLDB
	Commit() error
	Rollback() error
}

func (bunTx) QueryContext(context.Context, string, ...any) (*sql.Rows, error) {
	panic("it would drop the arguments")
}

func (bunDB) QueryContext(context.Context, string, ...any) (*sql.Rows, error) {
	panic("it would drop the arguments")
}

func (o ownTx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return o.tx.QueryContext(ctx, query, args...)
}
func (o ownTx) Commit() error   { return o.tx.Commit() }
func (o ownTx) Rollback() error { return o.tx.Rollback() }

// In a transaction counts what it has recorded, elsewhere what is committed.
func TestSQLWhere(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	h.commit(t, productLiked{"committed", noon})
	db := h.open(t, pgx.QueryExecModeCacheDescribe)
	tx := beginSQL(t, db)
	conn, err := db.Conn(background)
	require.NoError(t, err)
	defer conn.Close()
	require.Empty(t, outboxtest.Recorded[productLiked](background, t, h.in(outboxtest.SQL(tx)), h.events), "it has recorded nothing")
	require.NoError(t, outboxsql.Record(background, tx, h.rec, productLiked{"open", noon}))
	for _, tt := range []struct {
		name string
		db   outboxtest.SQLDB
		want string
	}{
		{"transaction", tx, "open"},
		{"transaction of Bun", bunTx{tx}, "open"},
		{"pointer to one", &bunTx{tx}, "open"},
		{"transaction behind an interface", &preparingTx{tx}, "open"},
		{"transaction of another library", ownTx{tx}, "open"},
		{"pool", db, "committed"},
		{"pool of Bun", &bunDB{db}, "committed"},
		{"connection", conn, "committed"},
	} {
		found := outboxtest.Recorded[productLiked](background, t, h.in(outboxtest.SQL(tt.db)), h.events)
		require.Equal(t, []productLiked{{Product: tt.want}}, found, tt.name)
		outboxtest.RequireNotRecorded[orderPlaced](background, t, h.in(outboxtest.SQL(tt.db)), h.events)
	}
	says := failure(t, func(f *fakeT) {
		outboxtest.RequireNotRecorded[productLiked](background, f, h.in(outboxtest.SQL(db)), h.events)
	})
	require.Contains(t, says, "recorded in schema "+h.schema+", and should not be:\n  acme.product.liked.v1 at 2026-02-03T12:00:00Z")
}

// Errors of the driver fail the test with what the driver says.
func TestSQLFails(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	db := h.open(t, pgx.QueryExecModeCacheDescribe)
	ended := beginSQL(t, db)
	require.NoError(t, ended.Rollback())
	aborted := beginSQL(t, db)
	_, err := aborted.Exec(`SELECT 1/0`)
	require.Error(t, err)
	cancelled, cancel := context.WithCancel(background)
	cancel()
	for _, nothing := range []outboxtest.DB{nil, outboxtest.InSchema(nil, h.schema)} {
		says := failure(t, func(f *fakeT) { outboxtest.Recorded[productLiked](background, f, nothing, h.events) })
		require.Contains(t, says, "read outbox: db must not be nil")
	}
	for _, tt := range []struct {
		ctx  context.Context
		db   outboxtest.SQLDB
		says string
	}{
		{background, nil, "read outbox: db must not be nil"},
		{background, (*sql.Tx)(nil), "read outbox: db must not be nil"},
		{background, bunTx{}, "read outbox: db must not be nil"},
		{background, (*bunTx)(nil), "read outbox: db must not be nil"},
		{background, ended, "read outbox: " + sql.ErrTxDone.Error()},
		{background, aborted, "current transaction is aborted"},
		{cancelled, db, "context canceled"},
	} {
		says := failure(t, func(f *fakeT) {
			outboxtest.RequireNotRecorded[productLiked](tt.ctx, f, h.in(outboxtest.SQL(tt.db)), h.events)
		})
		require.Contains(t, says, tt.says)
	}
}

// Play passes events that code has recorded in a *sql.Tx inside a transaction of pgx to handlers.
// Some of the handlers write through a *sql.Tx, too.
func TestPlayOfSQL(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	h.exec(t, `CREATE TABLE {s}.parcel (id text PRIMARY KEY)`)
	cfg := outbox.WorkerConfig{}
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait = 1, time.Hour
	w := h.worker(t, cfg, outboxsql.Handle("PACK", func(ctx context.Context, tx *sql.Tx, e orderPlaced, m outbox.Metadata) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO "+h.table("parcel")+" VALUES ($1)", e.ID); err != nil {
			return err
		}
		if m.Attempt == 1 {
			return errBusy
		}
		return outboxsql.Record(ctx, tx, h.rec, productLiked{e.ID, noon})
	}))
	tx := h.begin(t)
	require.NoError(t, outboxsql.Within(background, tx, func(tx *sql.Tx) error {
		err := outboxsql.Record(background, tx, h.rec, orderPlaced{ID: "a", At: noon})
		outboxtest.RequireRecorded(background, t, h.in(outboxtest.SQL(tx)), h.events, orderPlaced{ID: "a", At: noon})
		return err
	}))
	require.Equal(t, []short{
		{"PACK", "a", 1, 0, time.Hour, outboxtest.Retried},
		{"PACK", "a", 2, time.Hour, 0, outboxtest.Done},
	}, shortened(outboxtest.Play(background, t, h.in(tx), w)))
	outboxtest.RequireRecorded(background, t, h.in(tx), h.events, productLiked{"a", noon})

	ofSQL := outboxtest.SQL(beginSQL(t, h.open(t, pgx.QueryExecModeCacheDescribe)))
	says := failure(t, func(f *fakeT) { outboxtest.Play(background, f, ofSQL, w) })
	require.Contains(t, says, "*sql.Tx is no transaction of pgx, which handlers get a part of: outboxsql.Within ")
}

// DrainWorker decides by what a *sql.DB sees.
func TestDrainWorkerOfSQL(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	db := h.open(t, pgx.QueryExecModeCacheDescribe)
	w := h.worker(t, outbox.WorkerConfig{}, outboxsql.Handle("PACK", func(ctx context.Context, tx *sql.Tx, e orderPlaced, _ outbox.Metadata) error {
		if e.ID == "bad" {
			return outbox.Permanent(errBusy)
		}
		return outboxsql.Record(ctx, tx, h.rec, productLiked{e.ID, noon})
	}))
	h.commit(t, orderPlaced{ID: "a", At: noon}, orderPlaced{ID: "b", At: noon})
	outboxtest.DrainWorker(background, t, h.in(outboxtest.SQL(db)), w)
	outboxtest.RequireRecorded(background, t, h.in(outboxtest.SQL(db)), h.events, productLiked{"a", noon}, productLiked{"b", noon})
	h.commit(t, orderPlaced{ID: "bad", At: noon})
	require.Regexp(t, `not handled:\n  \d+ \S+ of bad: dead, PACK: permanent: busy`, failure(t, func(f *fakeT) {
		outboxtest.DrainWorker(background, f, h.in(outboxtest.SQL(db)), w)
	}))
	require.Contains(t, failure(t, func(f *fakeT) {
		outboxtest.DrainWorker(background, f, h.in(outboxtest.SQL(beginSQL(t, db))), w)
	}), "*sql.Tx is a transaction: a worker sees what is committed")
}

// What it returns is a DB for other readers, too.
func TestSQLRows(t *testing.T) {
	t.Parallel()
	db := stdlib.OpenDBFromPool(testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 }))
	defer db.Close()
	rows, err := outboxtest.SQL(db).Query(background, `SELECT n AS number, 'x' AS text FROM generate_series(1, 2) AS n`)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToMap)
	require.NoError(t, err)
	require.Equal(t, []map[string]any{{"number": int64(1), "text": "x"}, {"number": int64(2), "text": "x"}}, found)
	type named struct {
		Text   string
		Number int
	}
	rows, err = outboxtest.SQL(db).Query(background, `SELECT n AS number, 'x' AS text FROM generate_series(1, 2) AS n`)
	require.NoError(t, err)
	structs, err := pgx.CollectRows(rows, pgx.RowToStructByName[named])
	require.NoError(t, err)
	require.Equal(t, []named{{"x", 1}, {"x", 2}}, structs)
	rows, err = outboxtest.SQL(db).Query(background, `SELECT 1/(2-n) FROM generate_series(1, 2) AS n`)
	require.NoError(t, err)
	_, err = pgx.CollectRows(rows, pgx.RowTo[int])
	require.ErrorContains(t, err, "division by zero")
	require.NoError(t, db.PingContext(background), "its only connection is back")
}
