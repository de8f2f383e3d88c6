package mixed_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/outboxgo/outbox/outboxtest"
)

// hostile is a schema whose events are recorded by a driver, in one of its ways to send statements.
type hostile struct {
	db     *sql.DB
	pool   *pgxpool.Pool
	schema string
	events *outbox.Registry
	rec    *outbox.Recorder
	waker  *outbox.Waker
}

func (h *hostile) committed(t *testing.T) []cupSold {
	t.Helper()
	return outboxtest.Recorded[cupSold](t.Context(), t, outboxtest.InSchema(outboxtest.SQL(h.db), h.schema), h.events)
}

func (h *hostile) inTx(t *testing.T, f func(tx *sql.Tx) error) error {
	t.Helper()
	return outboxsql.InTx(t.Context(), h.db, h.waker, f)
}

func (h *hostile) record(t *testing.T, tx *sql.Tx, cups ...string) error {
	t.Helper()
	for _, cup := range cups {
		if err := outboxsql.Record(t.Context(), tx, h.rec, cupSold{Cup: cup, At: time.Now()}); err != nil {
			return err
		}
	}
	return nil
}

// What is wrong with a transaction is an error with a code, whatever the driver is, and nothing of it is committed.
func TestHostileTransactions(t *testing.T) {
	t.Parallel()
	for name, open := range drivers(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, schema := testenv.Schema(t)
			require.NoError(t, outbox.Migrate(t.Context(), pool, outbox.MigrateConfig{Schema: schema}))
			h := &hostile{db: open(t), pool: pool, schema: schema}
			t.Cleanup(func() { require.NoError(t, h.db.Close()) })
			var err error
			h.events, err = outbox.NewRegistry("shop", outbox.Event("acme.cup.sold.v1", "Cup", cupSold.cup))
			require.NoError(t, err)
			h.rec, err = outbox.NewRecorder(h.events, outbox.RecorderConfig{Schema: schema})
			require.NoError(t, err)
			h.waker, err = outbox.NewWaker(pool, outbox.WakerConfig{Schema: schema})
			require.NoError(t, err)
			h.payloads(t)
			h.failures(t)
			h.serializable(t)
		})
	}
}

// drivers returns functions that open the database by each driver, in each way to send statements.
func drivers(t *testing.T) map[string]func(t *testing.T) *sql.DB {
	t.Helper()
	all := map[string]func(t *testing.T) *sql.DB{}
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		all["pgx "+mode.String()] = func(t *testing.T) *sql.DB { return stdlib.OpenDBFromPool(testenv.PoolIn(t, mode)) }
	}
	for _, binary := range []string{"no", "yes"} {
		all["lib/pq, binary_parameters "+binary] = func(t *testing.T) *sql.DB {
			address := shoptest.ForPQ(t, testenv.Pool(t, nil).Config().ConnString())
			if !strings.Contains(address, "binary_parameters") {
				address += "&binary_parameters=" + binary
			}
			db, err := sql.Open("postgres", address)
			require.NoError(t, err)
			return db
		}
	}
	return all
}

// payloads records what is hard to send.
func (h *hostile) payloads(t *testing.T) {
	t.Helper()
	hard := []outbox.DomainEvent{
		cupSold{Cup: "quotes", Note: "'\"\\'; DROP TABLE outbox; -- $1 $$ ? :x \u2028 é 日本 \t\n", At: time.Now().Truncate(time.Microsecond)},
		cupSold{Cup: "large", Note: strings.Repeat("é'\\", 190_000), At: time.Now().Truncate(time.Microsecond)},
		cupSold{Cup: `\x00 {"a": 1}`, At: time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC)},
	}
	require.NoError(t, h.inTx(t, func(tx *sql.Tx) error { return outboxsql.Record(t.Context(), tx, h.rec, hard...) }))
	outboxtest.RequireRecorded(t.Context(), t, outboxtest.InSchema(outboxtest.SQL(h.db), h.schema), h.events, hard...)
	require.NoError(t, h.inTx(t, func(tx *sql.Tx) error {
		err := outboxsql.Record(t.Context(), tx, h.rec, cupSold{Cup: "nul", Note: "a\x00b", At: time.Now()})
		var rejected *outbox.FieldError
		require.ErrorAs(t, err, &rejected)
		require.Equal(t, "payload", strings.ToLower(rejected.Field))
		return h.record(t, tx, "after nul")
	}), "what is rejected leaves the transaction as it is")
	require.Len(t, h.committed(t), 4)
}

// failures records where it cannot be.
func (h *hostile) failures(t *testing.T) {
	t.Helper()
	before := len(h.committed(t))
	code := func(err error) string {
		var coded interface{ SQLState() string }
		require.ErrorAs(t, err, &coded)
		return coded.SQLState()
	}
	readOnly, err := h.db.BeginTx(t.Context(), &sql.TxOptions{ReadOnly: true})
	require.NoError(t, err)
	err = h.record(t, readOnly, "read-only")
	require.Equal(t, "25006", code(err))
	require.ErrorContains(t, err, "read-only transaction")
	require.NoError(t, readOnly.Rollback())

	require.Equal(t, "25P02", code(h.inTx(t, func(tx *sql.Tx) error {
		_, _ = tx.Exec(`SELECT 1/0`)
		return h.record(t, tx, "aborted")
	})))
	require.Error(t, h.inTx(t, func(tx *sql.Tx) error {
		err := h.record(t, tx, "swallowed")
		_, _ = tx.Exec(`SELECT 1/0`)
		return err
	}), "PostgreSQL rolls back at the commit, which is no success")
	require.ErrorIs(t, h.inTx(t, func(tx *sql.Tx) error { return errors.Join(h.record(t, tx, "rolled back"), tx.Rollback()) }), sql.ErrTxDone)
	require.Error(t, h.inTx(t, func(tx *sql.Tx) error {
		err := h.record(t, tx, "lost")
		_, _ = tx.Exec(`SELECT pg_terminate_backend(pg_backend_pid())`)
		return err
	}))
	require.Panics(t, func() {
		_ = h.inTx(t, func(tx *sql.Tx) error { panic(fmt.Sprint(h.record(t, tx, "panic"))) })
	})
	ctx, cancel := context.WithCancel(t.Context())
	require.Error(t, outboxsql.InTx(ctx, h.db, h.waker, func(tx *sql.Tx) error {
		err := h.record(t, tx, "cancelled")
		cancel()
		return err
	}))
	require.ErrorIs(t, outboxsql.InTx(ctx, h.db, h.waker, func(*sql.Tx) error { return errUndo }), context.Canceled)
	require.NoError(t, h.inTx(t, func(tx *sql.Tx) error {
		_, err := tx.Exec(`SAVEPOINT a`)
		err = errors.Join(err, h.record(t, tx, "in the savepoint"))
		_, failed := tx.Exec(`SELECT 1/0`)
		require.Error(t, failed)
		_, back := tx.Exec(`ROLLBACK TO SAVEPOINT a`)
		return errors.Join(err, back, h.record(t, tx, "behind it"))
	}))
	found := h.committed(t)
	require.Len(t, found, before+1)
	require.Equal(t, "behind it", found[before].Cup)
	require.Eventually(t, func() bool { return h.db.Stats().InUse == 0 }, testenv.Patience, time.Millisecond)
}

// serializable lets two transactions write what the other one has read: one of them fails, with its events.
func (h *hostile) serializable(t *testing.T) {
	t.Helper()
	before := len(h.committed(t))
	_, err := h.pool.Exec(t.Context(), `CREATE TABLE `+pgx.Identifier{h.schema, "cups"}.Sanitize()+` (n int)`)
	require.NoError(t, err)
	begin := func() *sql.Tx {
		tx, err := h.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
		require.NoError(t, err)
		var n int
		require.NoError(t, tx.QueryRow(`SELECT count(*) FROM `+pgx.Identifier{h.schema, "cups"}.Sanitize()).Scan(&n))
		return tx
	}
	end := func(tx *sql.Tx) error {
		defer tx.Rollback()
		_, err := tx.Exec(`INSERT INTO ` + pgx.Identifier{h.schema, "cups"}.Sanitize() + ` VALUES (1)`)
		if err == nil {
			err = h.record(t, tx, "serializable")
		}
		if err == nil {
			err = tx.Commit()
		}
		return err
	}
	one, other := begin(), begin()
	require.NoError(t, end(one))
	var coded interface{ SQLState() string }
	require.ErrorAs(t, end(other), &coded)
	require.Equal(t, "40001", coded.SQLState())
	require.Len(t, h.committed(t), before+1)
}
