package main

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/lib/pq"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTransactions(t *testing.T) { shoptest.Test(t, opener(t)) }

// opener opens the store by an address for lib/pq.
func opener(t *testing.T) shoptest.Open {
	t.Helper()
	return func(s *shop.Shop) (shop.Store, error) {
		s.DatabaseURL = shoptest.ForPQ(t, s.DatabaseURL)
		return open(s)
	}
}

// In a handler lib/pq's values work, but errors are those of pgx, and there is no COPY.
func TestHandler(t *testing.T) {
	h, _ := shoptest.NewHandler(t, opener(t))
	require.NoError(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO orders SELECT id, 'tea', 1 FROM unnest($1::text[]) AS id`, pq.Array([]string{"a", `b "{}`}))
		require.NoError(t, err)
		var ids []string
		require.NoError(t, tx.QueryRowContext(ctx, `SELECT array_agg(id ORDER BY id) FROM orders`).Scan(pq.Array(&ids)))
		require.Equal(t, []string{"a", `b "{}`}, ids)
		var none sql.NullTime
		require.NoError(t, tx.QueryRowContext(ctx, `SELECT NULL::timestamptz`).Scan(&none))
		require.False(t, none.Valid)
		return nil
	}))
	h.RequireOrders("a", `b "{}`)
	err := h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES ($1, 'tea', 1)`, "a")
		return err
	})
	var failed *pgconn.PgError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "23505", failed.SQLState())
	require.Error(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		copying, err := tx.PrepareContext(ctx, `COPY orders (id, product, quantity) FROM STDIN`)
		if err != nil {
			return err
		}
		defer copying.Close()
		_, err = copying.ExecContext(ctx, "c", "tea", 1)
		return err
	}))
	h.RequireOrders("a", `b "{}`)
}
