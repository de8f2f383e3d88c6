package main

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTransactions(t *testing.T) { shoptest.Test(t, open) }

// In a handler, sqlx reads structs, and lists by In; named parameters need BindNamed.
func TestHandler(t *testing.T) {
	h, opened := shoptest.NewHandler(t, open)
	s := opened.(*store)
	require.NoError(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		x := sqlx.Tx{Tx: tx, Mapper: s.db.Mapper}
		x.MustExecContext(ctx, `INSERT INTO orders VALUES ('a', 'tea', 1), ('b', 'tea', 2), ('c', 'tea', 3)`)
		query, args, err := sqlx.In(`SELECT * FROM orders WHERE id IN (?) ORDER BY id`, []string{"a", "c"})
		require.NoError(t, err)
		var rows []Order
		require.NoError(t, x.SelectContext(ctx, &rows, s.db.Rebind(query), args...))
		require.Equal(t, []Order{{"a", "tea", 1}, {"c", "tea", 3}}, rows)
		var all struct {
			At     time.Time
			Amount float64
			Raw    []byte
			None   *string
		}
		require.NoError(t, x.GetContext(ctx, &all, `SELECT '2026-01-02 03:04:05Z'::timestamptz AS at, 1.5::numeric AS amount, '{}'::jsonb AS raw, NULL::text AS none`))
		require.Equal(t, 2026, all.At.UTC().Year())
		require.Equal(t, []any{1.5, "{}", (*string)(nil)}, []any{all.Amount, string(all.Raw), all.None})
		return nil
	}))
	h.RequireOrders("a", "b", "c")
	require.Error(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		x := sqlx.Tx{Tx: tx, Mapper: s.db.Mapper}
		_, err := x.NamedExecContext(ctx, `DELETE FROM orders WHERE id = :id`, Order{ID: "a"})
		return err
	}))
	h.RequireOrders("a", "b", "c")
	for _, end := range []func(x *sqlx.Tx) error{(*sqlx.Tx).Commit, (*sqlx.Tx).Rollback} {
		require.ErrorIs(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
			x := sqlx.Tx{Tx: tx, Mapper: s.db.Mapper}
			x.MustExecContext(ctx, `DELETE FROM orders`)
			_ = end(&x)
			return nil
		}), outbox.ErrHandlerTx)
	}
	h.RequireOrders("a", "b", "c")
}
