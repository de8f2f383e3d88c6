package guardtx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// guardFixture is a table of notes, and one of effects.
type guardFixture struct {
	db     *pgxpool.Pool
	schema string
}

func newGuardFixture(t *testing.T, mode pgx.QueryExecMode) *guardFixture {
	t.Helper()
	_, schema := testenv.Schema(t)
	g := &guardFixture{db: testenv.PoolIn(t, mode), schema: pgx.Identifier{schema}.Sanitize()}
	for _, table := range []string{"notes", "effects"} {
		_, err := g.db.Exec(t.Context(), `CREATE TABLE `+g.schema+`.`+table+` (n int)`)
		require.NoError(t, err)
	}
	return g
}

func (g *guardFixture) begin(t *testing.T, shared bool) *guardtx.Tx {
	t.Helper()
	conn, err := g.db.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	tx, err := guardtx.Begin(t.Context(), conn.Conn(), guardtx.Limits{Call: time.Minute, Whole: time.Minute}, shared, func(b *pgx.Batch) { b.Queue(`INSERT INTO ` + g.schema + `.notes VALUES (1)`) })
	require.NoError(t, err)
	return tx
}

// effect returns a function of the host that has an effect and runs statements.
func (g *guardFixture) effect(ctx context.Context, statements ...string) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		for _, sql := range append([]string{`INSERT INTO ` + g.schema + `.effects VALUES (1)`}, statements...) {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	}
}

func (g *guardFixture) requireRows(t *testing.T, notes, effects int) {
	t.Helper()
	for table, want := range map[string]int{"notes": notes, "effects": effects} {
		var n int
		require.NoError(t, g.db.QueryRow(t.Context(), `SELECT count(*) FROM `+g.schema+`.`+table).Scan(&n))
		require.Equal(t, want, n, table)
	}
}

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// The work of a function commits with the other statements of the transaction, in all ways in which
// a pool can send statements. Savepoints are the function's own.
func TestCommit(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for _, shared := range []bool{false, true} {
			g := newGuardFixture(t, mode)
			tx := g.begin(t, shared)
			require.NoError(t, tx.Call("GOOD", func(tx pgx.Tx) error {
				bad := pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error { return g.effect(t.Context(), "SELECT 1/0")(tx) })
				return errors.Join(requireFails(bad), pgx.BeginFunc(t.Context(), tx, g.effect(t.Context())))
			}))
			require.NoError(t, tx.Call("GOOD", g.effect(t.Context())))
			require.NoError(t, tx.Commit(t.Context()))
			g.requireRows(t, 1, 2)
		}
	}
}

func requireFails(err error) error {
	if err == nil {
		return errors.New("it does not fail")
	}
	return nil
}

// A function that ends the transaction by a statement commits nothing, and the error says
// what it did, with its name.
func TestFunctionEndsTransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		g := newGuardFixture(t, mode)
		for _, statement := range []string{"COMMIT", "END", "COMMIT; BEGIN", "COMMIT AND CHAIN", "ROLLBACK", "ROLLBACK; BEGIN", "ROLLBACK AND CHAIN", "PREPARE TRANSACTION 'p'"} {
			tx := g.begin(t, false)
			err := tx.Call("ENDS", g.effect(t.Context(), statement))
			if err == nil {
				err = tx.Commit(t.Context())
			}
			require.ErrorContains(t, err, "handler ENDS", statement)
			if statement != "PREPARE TRANSACTION 'p'" {
				require.ErrorIs(t, err, guardtx.ErrEnded, statement)
			}
			tx.Rollback(t.Context())
			g.requireRows(t, 0, 0)
		}
	}
}

// The same if it ignores the error and begins a transaction of its own: what it does in that
// is not committed either. It is found out at once, or at the commit if the statements go past the transaction.
func TestFunctionIgnoresError(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeExec)
	for _, end := range []string{"COMMIT", "ROLLBACK"} {
		tx := g.begin(t, true)
		err := tx.Call("ENDS", func(tx pgx.Tx) error {
			_, _ = tx.Exec(t.Context(), end)
			_, err := tx.Exec(t.Context(), "BEGIN")
			return errors.Join(err, g.effect(t.Context())(tx))
		})
		require.ErrorIs(t, err, guardtx.ErrEnded)
		require.ErrorContains(t, err, "handler ENDS")
		tx.Rollback(t.Context())
		g.requireRows(t, 0, 0)

		tx = g.begin(t, true)
		require.NoError(t, tx.Call("ENDS", func(tx pgx.Tx) error {
			_, _ = tx.Conn().Exec(t.Context(), end)
			_, err := tx.Conn().Exec(t.Context(), "BEGIN")
			return errors.Join(err, g.effect(t.Context())(tx))
		}))
		err = tx.Commit(t.Context())
		require.ErrorIs(t, err, guardtx.ErrEnded)
		require.ErrorContains(t, err, "handler ENDS")
		tx.Rollback(t.Context())
		g.requireRows(t, 0, 0)
	}
}

// What a function sets behind an end of the transaction that is not seen ends as well, however the function ends.
func TestSettingsBehindTheEnd(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // settings of the session
	for _, mode := range modes {
		g := newGuardFixture(t, mode)
		for _, statements := range [][]string{{"COMMIT"}, {"ROLLBACK"}, {"ROLLBACK", "BEGIN"}} {
			for _, failure := range []error{nil, errors.New("failed")} {
				tx := g.begin(t, true)
				conn := tx.Own().Conn()
				err := tx.Call("ENDS", func(tx pgx.Tx) error {
					_, _ = conn.Exec(t.Context(), statements[0]) // a COMMIT fails, and rolls back
					for _, sql := range slices.Concat([]string{"SET search_path = outbox_test", "SET outbox_test.tenant = '7'", "SELECT pg_advisory_lock_shared(7)"}, statements[1:]) {
						_, err := conn.Exec(t.Context(), sql)
						require.NoError(t, err)
					}
					return failure
				})
				if err == nil {
					err = tx.Commit(t.Context())
				}
				require.Error(t, err)
				tx.Rollback(t.Context())
				if conn.IsClosed() { // pgx closes it if a COMMIT fails within a transaction
					require.Equal(t, "BEGIN", statements[len(statements)-1])
					continue
				}
				var is string
				require.NoError(t, conn.QueryRow(t.Context(), `SELECT concat_ws('|', current_setting('search_path'), current_setting('outbox_test.tenant', true),
					(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()))`).Scan(&is))
				require.Equal(t, `"$user", public||0`, is, "%v, %v, %v", mode, statements, failure)
			}
		}
	}
}

// Behind a pooler another client may have changed settings of a session for good. They are not taken for those of the
// pool, and end with the first transaction. What the pool has set stays.
func TestSettingsOfAPooledSession(t *testing.T) {
	t.Parallel()
	other := testenv.OtherDatabase(t)
	for _, set := range []string{"", "SET search_path = shop"} {
		_, err := other.Exec(t.Context(), "SET search_path = poison; SET lock_timeout = '7s'")
		require.NoError(t, err)
		cfg := other.Config()
		cfg.AfterConnect, cfg.ConnConfig.AfterConnect = nil, nil
		if set != "" {
			cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { _, err := conn.Exec(ctx, set); return err }
		}
		db, err := pgxpool.NewWithConfig(t.Context(), cfg)
		require.NoError(t, err)
		defer db.Close()
		conn, err := pg.Borrow(t.Context(), db)
		require.NoError(t, err)
		defer conn.Return()
		for range 2 {
			tx, err := guardtx.Begin(t.Context(), conn.Conn, guardtx.Limits{}, false, func(*pgx.Batch) {})
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
		}
		var is, want string
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT concat_ws('|', current_setting('search_path'), current_setting('lock_timeout'))`).Scan(&is))
		if want = `"$user", public|0`; set != "" {
			want = "shop|0"
		}
		require.Equal(t, want, is)
	}
}

// Commit and Rollback of the transaction that a function gets fail, and so does the function,
// whatever it makes of that.
func TestFunctionCallsCommit(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeExec)
	for _, end := range []func(pgx.Tx, context.Context) error{pgx.Tx.Commit, pgx.Tx.Rollback} {
		tx := g.begin(t, true)
		err := tx.Call("ENDS", func(tx pgx.Tx) error {
			if err := end(tx, t.Context()); !errors.Is(err, guardtx.ErrEnded) {
				return fmt.Errorf("the error is %w", err)
			}
			return nil
		})
		require.EqualError(t, err, "handler ENDS: "+guardtx.ErrEnded.Error())
		tx.Rollback(t.Context())
	}
}

// A function that returns nil, and leaves the transaction in a state in which others fail,
// is the one that fails.
func TestFunctionLeavesTransaction(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeExec)
	for want, f := range map[string]func(pgx.Tx){
		"left its transaction aborted": func(tx pgx.Tx) { _, _ = tx.Exec(t.Context(), "SELECT 1/0") },
		"left rows":                    func(tx pgx.Tx) { _, _ = tx.Query(t.Context(), "SELECT 1") },
		"its connection was lost":      func(tx pgx.Tx) { _ = tx.Conn().Close(t.Context()) },
	} {
		tx := g.begin(t, false)
		err := tx.Call("LEAVES", func(tx pgx.Tx) error { f(tx); return nil })
		require.ErrorContains(t, err, "handler LEAVES has")
		require.ErrorContains(t, err, want)
		tx.Rollback(t.Context())
	}
	g.requireRows(t, 0, 0)
}

// A change of settings is noticed, by the statement; or, of the settings that are compared,
// if something in PostgreSQL makes it. Alone in a transaction a function may do what it wants.
func TestSettings(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		g := newGuardFixture(t, mode)
		_, err := g.db.Exec(t.Context(), `CREATE FUNCTION `+g.schema+`.act(text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_catalog.set_config('search_path', $1, true); END $$`)
		require.NoError(t, err)
		for _, tt := range []struct {
			statement   string
			seen, fails bool
		}{
			{"SELECT 1", false, false},
			{"SET LOCAL outbox_test.tenant = '7'", true, false},
			{"SET LOCAL lock_timeout = '7s'", true, true},
			{"SELECT " + g.schema + ".act('pg_catalog')", false, true},
		} {
			for _, shared := range []bool{false, true} {
				tx := g.begin(t, shared)
				require.NoError(t, tx.Call("SETS", g.effect(t.Context(), tt.statement)))
				require.Equal(t, tt.seen, tx.ChangedSettings(), tt.statement)
				err := tx.Commit(t.Context())
				if tt.fails && shared {
					require.ErrorIs(t, err, guardtx.ErrSettings, tt.statement)
					continue
				}
				require.NoError(t, err, tt.statement)
			}
		}
	}
}

// All ways to send a statement are looked at.
func TestSettingsByAnyWay(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeExec)
	const set = "SELECT set_config('outbox_test.tenant', '7', true)"
	for name, f := range map[string]func(pgx.Tx) error{
		"Query":    func(tx pgx.Tx) error { rows, err := tx.Query(t.Context(), set); rows.Close(); return err },
		"QueryRow": func(tx pgx.Tx) error { var s string; return tx.QueryRow(t.Context(), set).Scan(&s) },
		"Prepare":  func(tx pgx.Tx) error { _, err := tx.Prepare(t.Context(), "", set); return err },
		"prepared before": func(tx pgx.Tx) error {
			_, err := tx.Conn().Prepare(t.Context(), "prepared", set)
			return errors.Join(err, exec(tx, "prepared"))
		},
		"SendBatch": func(tx pgx.Tx) error {
			var b pgx.Batch
			b.Queue(set)
			return tx.SendBatch(t.Context(), &b).Close()
		},
		"Begin": func(tx pgx.Tx) error {
			return pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error { _, err := tx.Exec(t.Context(), set); return err })
		},
	} {
		tx := g.begin(t, true)
		require.NoError(t, tx.Call("SETS", f), name)
		require.True(t, tx.ChangedSettings(), name)
		tx.Rollback(t.Context())
	}
}

// A statement that a function prepares in the transaction is known by its name.
func TestPreparedStatement(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeExec)
	tx := g.begin(t, true)
	require.NoError(t, tx.Call("GOOD", func(tx pgx.Tx) error {
		_, err := tx.Prepare(t.Context(), "known", "SELECT 1")
		return errors.Join(err, exec(tx, "known"))
	}))
	require.False(t, tx.ChangedSettings())
	require.NoError(t, tx.Commit(t.Context()))
}

func exec(tx pgx.Tx, sql string) error { _, err := tx.Exec(context.Background(), sql); return err }

// What cannot be begun is an error, and the connection can be used again.
func TestBeginFails(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		g := newGuardFixture(t, mode)
		conn, err := g.db.Acquire(t.Context())
		require.NoError(t, err)
		for _, sql := range []string{"nowhere VALUES (1)", "notes VALUES (1/0)"} {
			_, err = guardtx.Begin(t.Context(), conn.Conn(), guardtx.Limits{Call: time.Minute, Whole: time.Minute}, false, func(b *pgx.Batch) { b.Queue(`INSERT INTO ` + g.schema + `.` + sql) })
			require.Error(t, err)
			require.EqualValues(t, 'I', conn.Conn().PgConn().TxStatus())
		}
		conn.Release()
	}
}

// Behind the end of the transaction nothing is sent, by no way: it would commit by itself, and the function is called
// again.
func TestNothingIsSentBehindTheEnd(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeExec)
	insert := `INSERT INTO ` + g.schema + `.effects VALUES (1)`
	ways := map[string]func(tx pgx.Tx, statements ...string) error{
		"exec": func(tx pgx.Tx, statements ...string) (err error) {
			for _, s := range statements {
				_, failed := tx.Exec(t.Context(), s)
				err = errors.Join(err, failed)
			}
			return err
		},
		"query": func(tx pgx.Tx, statements ...string) (err error) {
			for _, s := range statements {
				rows, _ := tx.Query(t.Context(), s)
				rows.Close()
				err = errors.Join(err, rows.Err())
			}
			return err
		},
		"row": func(tx pgx.Tx, statements ...string) (err error) {
			for _, s := range statements {
				if failed := tx.QueryRow(t.Context(), s).Scan(); !errors.Is(failed, pgx.ErrNoRows) {
					err = errors.Join(err, failed)
				}
			}
			return err
		},
		"batch": func(tx pgx.Tx, statements ...string) error {
			var batch pgx.Batch
			for _, s := range statements {
				batch.Queue(s)
			}
			return tx.SendBatch(t.Context(), &batch).Close()
		},
		"text": func(tx pgx.Tx, statements ...string) error {
			_, err := tx.Exec(t.Context(), strings.Join(statements, "; "), pgx.QueryExecModeSimpleProtocol)
			return err
		},
		"savepoint": func(tx pgx.Tx, statements ...string) error {
			inner, err := tx.Begin(t.Context())
			if err != nil {
				return err
			}
			for _, s := range statements {
				_, failed := inner.Exec(t.Context(), s)
				err = errors.Join(err, failed)
			}
			return err
		},
		"copy": func(tx pgx.Tx, statements ...string) error {
			_, err := tx.Exec(t.Context(), statements[0])
			_, failed := tx.CopyFrom(t.Context(), pgx.Identifier{g.schema, "effects"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
			return errors.Join(err, failed)
		},
	}
	for name, send := range ways {
		for _, end := range []string{"COMMIT", "ROLLBACK"} {
			for _, shared := range []bool{false, true} {
				tx := g.begin(t, shared)
				err := tx.Call("ENDS", func(tx pgx.Tx) error {
					_ = send(tx, end, insert, "COMMIT")
					_ = send(tx, "BEGIN", insert, "COMMIT")
					return nil
				})
				require.ErrorIs(t, err, guardtx.ErrEnded, name)
				require.ErrorContains(t, err, "handler ENDS", name)
				tx.Rollback(t.Context())
				g.requireRows(t, 0, 0)
			}
		}
	}
}

// A function has its own savepoints, and not those of the functions before it in the transaction.
func TestSavepointsOfOthers(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		g := newGuardFixture(t, mode)
		own := []string{"SAVEPOINT here", "ROLLBACK TO here", "SAVEPOINT Here", "RELEASE SAVEPOINT here"}
		for _, foreign := range []string{"ROLLBACK TO here", `ROLLBACK WORK TO SAVEPOINT "here"`, "SAVEPOINT other; RELEASE here"} {
			tx := g.begin(t, true)
			require.NoError(t, tx.Call("FIRST", g.effect(t.Context(), own...)))
			err := tx.Call("SECOND", func(tx pgx.Tx) error {
				_, _ = tx.Exec(t.Context(), foreign, pgx.QueryExecModeSimpleProtocol)
				return nil
			})
			require.ErrorContains(t, err, "handler SECOND has released, or gone back to, a savepoint that it has not set", foreign)
			require.NotErrorIs(t, err, guardtx.ErrEnded)
			require.Error(t, tx.Commit(t.Context()))
			g.requireRows(t, 0, 0)
		}
		tx := g.begin(t, true)
		require.NoError(t, tx.Call("FIRST", g.effect(t.Context(), own...)))
		require.NoError(t, tx.Call("SECOND", g.effect(t.Context(), own...)), "savepoints of the same names")
		require.NoError(t, tx.Commit(t.Context()))
		g.requireRows(t, 1, 2)
	}
}

// What a function leaves behind, a goroutine for example, cannot use the transaction when the function has returned.
func TestTransactionAfterItsFunction(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeCacheStatement)
	ctx, insert := t.Context(), `INSERT INTO `+g.schema+`.effects VALUES (1)`
	tx := g.begin(t, true)
	var left, nested pgx.Tx
	require.NoError(t, tx.Call("LEAVES", func(tx pgx.Tx) (err error) {
		left = tx
		nested, err = tx.Begin(ctx)
		return err
	}))
	for _, host := range []pgx.Tx{left, nested} {
		_, err := host.Exec(ctx, insert)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		rows, err := host.Query(ctx, insert)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		_, err = pgx.CollectRows(rows, pgx.RowTo[int])
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		require.ErrorIs(t, host.QueryRow(ctx, insert).Scan(), pgx.ErrTxClosed)
		var b pgx.Batch
		b.Queue(insert)
		require.ErrorIs(t, host.SendBatch(ctx, &b).Close(), pgx.ErrTxClosed)
		_, err = host.CopyFrom(ctx, pgx.Identifier{"effects"}, nil, nil)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		_, err = host.Prepare(ctx, "left", insert)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		_, err = host.Begin(ctx)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
	}
	require.NoError(t, tx.Call("NEXT", func(own pgx.Tx) error {
		for _, host := range []pgx.Tx{nested, left} { // a late deferred call
			require.ErrorIs(t, host.Rollback(ctx), pgx.ErrTxClosed)
			require.ErrorIs(t, host.Commit(ctx), pgx.ErrTxClosed)
		}
		_, err := own.Exec(ctx, insert)
		return err
	}))
	require.ErrorIs(t, nested.Rollback(ctx), pgx.ErrTxClosed)
	require.NoError(t, tx.Commit(ctx))
	g.requireRows(t, 1, 1)
}

// A goroutine that a function has left behind gets the connection of the transaction, because it does not look for nil.
// What it does then is not committed.
func TestConnectionAfterItsFunction(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	for _, ask := range []func(pgx.Tx) error{
		func(tx pgx.Tx) error {
			_, err := tx.Conn().Exec(ctx, `INSERT INTO `+g.schema+`.effects VALUES (1)`)
			return err
		},
		func(tx pgx.Tx) error {
			objects := tx.LargeObjects()
			_, err := objects.Create(ctx, 0)
			return err
		},
	} {
		tx := g.begin(t, true)
		var left pgx.Tx
		failed := errors.New("failed")
		require.ErrorIs(t, tx.Call("LEAVES", func(tx pgx.Tx) error { left = tx; return failed }), failed)
		require.False(t, tx.Used())
		require.NoError(t, ask(left))
		require.NoError(t, tx.Call("NEXT", func(own pgx.Tx) error {
			_, err := own.Exec(ctx, `INSERT INTO `+g.schema+`.effects VALUES (2)`)
			return err
		}))
		require.ErrorContains(t, tx.Commit(ctx), "handler LEAVES has left a goroutine behind")
		g.requireRows(t, 0, 0)
	}
}

// A goroutine that a function has left behind has used the transaction, or it cannot use it any more.
func TestUseWhileTheFunctionReturns(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeCacheStatement)
	ctx := t.Context()
	for range 50 {
		tx := g.begin(t, true)
		result := make(chan error, 1)
		err := tx.Call("LEAVES", func(tx pgx.Tx) error {
			go func() { result <- tx.Commit(ctx) }()
			return nil
		})
		used := tx.Used()
		require.True(t, err == nil || used)
		if err := <-result; !used {
			require.ErrorIs(t, err, pgx.ErrTxClosed)
		}
		tx.Rollback(ctx)
	}
}

// If no function was called, the guard of the transaction may be gone all the same, for example behind a pooler. Then
// the commit fails.
func TestGuardIsGoneWithoutACall(t *testing.T) {
	t.Parallel()
	g := newGuardFixture(t, pgx.QueryExecModeCacheStatement)
	tx := g.begin(t, true)
	_, err := tx.Own().Exec(t.Context(), `CLOSE outbox_guard`)
	require.NoError(t, err)
	require.ErrorIs(t, tx.Commit(t.Context()), guardtx.ErrEnded)
	g.requireRows(t, 0, 0)
}
