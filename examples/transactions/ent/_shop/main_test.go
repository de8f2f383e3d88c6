package main

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/examples/transactions/ent/_shop/ent"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/outboxgo/outbox/outboxtest"
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

// A test looks into a transaction of ent, and a client sees what is committed.
func TestRecorded(t *testing.T) {
	h, opened := shoptest.NewHandler(t, open)
	s := opened.(*store)
	placed := shop.OrderPlaced{OrderID: "a", Product: "tea", Quantity: 1, At: time.Now().Truncate(time.Microsecond)}
	tx, err := s.client.Tx(t.Context())
	require.NoError(t, err)
	require.NoError(t, outboxsql.Record(t.Context(), tx, s.recorder, placed))
	outboxtest.RequireRecorded(t.Context(), t, outboxtest.SQL(tx), h.Events, placed)
	require.NoError(t, tx.Rollback())
	outboxtest.RequireNotRecorded[shop.OrderPlaced](t.Context(), t, outboxtest.SQL(s.client), h.Events)
}
