package main

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/examples/transactions/ent/ent"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTransactions(t *testing.T) { shoptest.Test(t, open) }

// In a handler, edges are written and read in its transaction, and a transaction of ent ends with it.
func TestHandler(t *testing.T) {
	h, _ := shoptest.NewHandler(t, open)
	place := func(ctx context.Context, tx *sql.Tx, id string) error {
		inside, err := inTx(tx).Tx(ctx)
		require.NoError(t, err)
		first := inside.Shipment.Create().SetQuantity(1).SaveX(ctx)
		inside.Order.Create().SetID(id).SetProduct("tea").SetQuantity(1).AddShipments(first).ExecX(ctx)
		return inside.Commit()
	}
	require.NoError(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		require.NoError(t, place(ctx, tx, "a"))
		found := inTx(tx).Order.Query().WithShipments().OnlyX(ctx)
		require.Len(t, found.Edges.Shipments, 1)
		err := inTx(tx).Order.Create().SetID("b").SetProduct("tea").SetQuantity(1).AddShipmentIDs(99).Exec(ctx)
		require.True(t, ent.IsConstraintError(err), err)
		return nil
	}), "ent noticed the shipment that is not there, and has written the order")
	require.ErrorContains(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		return errors.Join(place(ctx, tx, "c"), errors.New("out of tea"))
	}), "out of tea")
	h.RequireOrders("a", "b")
}
