package main

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/uptrace/bun"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
	"github.com/outboxgo/outbox/outboxsql"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTransactions(t *testing.T) { shoptest.Test(t, open) }

// What is recorded in a nested transaction, which is a savepoint, vanishes with it.
func TestNestedTransaction(t *testing.T) {
	h, opened := shoptest.NewHandler(t, open)
	s := opened.(*store)
	undone := errors.New("undone")
	require.NoError(t, s.db.RunInTx(t.Context(), nil, func(ctx context.Context, tx bun.Tx) error {
		require.NoError(t, outboxsql.Record(ctx, tx, s.recorder, shop.OrderPlaced{OrderID: "a", At: time.Now()}))
		require.ErrorIs(t, tx.RunInTx(ctx, nil, func(ctx context.Context, nested bun.Tx) error {
			require.NoError(t, outboxsql.Record(ctx, nested, s.recorder, shop.OrderPlaced{OrderID: "b", At: time.Now()}))
			return undone
		}), undone)
		return nil
	}))
	var recorded string
	require.NoError(t, h.Pool.QueryRow(t.Context(), `SELECT string_agg(aggregate_id, ',') FROM outbox`).Scan(&recorded))
	require.Equal(t, "a", recorded)
}

// In a handler, queries on tx write several rows and read them back.
func TestHandler(t *testing.T) {
	h, opened := shoptest.NewHandler(t, open)
	s := opened.(*store)
	require.NoError(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		rows := []Order{{"a", "tea?", 1}, {"b", "$1", 2}}
		_, err := s.db.NewInsert().Conn(tx).Model(&rows).Exec(ctx)
		require.NoError(t, err)
		var found []Order
		require.NoError(t, s.db.NewSelect().Conn(tx).Model(&found).Where("id IN (?)", bun.List([]string{"a", "b"})).Order("id").Scan(ctx))
		require.Equal(t, rows, found)
		shipment := &Shipment{OrderID: "a", Quantity: 1}
		_, err = s.db.NewInsert().Conn(tx).Model(shipment).Returning("id").Exec(ctx)
		require.NoError(t, err)
		require.NotZero(t, shipment.ID)
		return nil
	}))
	h.RequireOrders("a", "b")
}
