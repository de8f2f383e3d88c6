// The example for sqlc stores an order and its event in one transaction, and the shipment in
// that of the event's handler. The package orders is generated from queries.sql.
package main

//go:generate go run github.com/sqlc-dev/sqlc/cmd/sqlc@v1.31.1 generate

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/examples/transactions/sqlc/orders"
	"github.com/outboxgo/outbox/outboxsql"
)

type store struct {
	db       *sql.DB
	queries  *orders.Queries
	recorder *outbox.Recorder
	waker    *outbox.Waker
}

func main() { shop.Main(open) }

func open(s *shop.Shop) (shop.Store, error) {
	pool := s.Pool
	db := stdlib.OpenDBFromPool(pool)
	return &store{db: db, queries: orders.New(db), recorder: s.Recorder, waker: s.Relay.Waker()}, nil
}

func (s *store) Place(ctx context.Context, order shop.OrderPlaced) error {
	return outboxsql.InTx(ctx, s.db, s.waker, func(tx *sql.Tx) error {
		row := orders.CreateOrderParams{ID: order.OrderID, Product: order.Product, Quantity: int32(order.Quantity)}
		if err := s.queries.WithTx(tx).CreateOrder(ctx, row); err != nil {
			return err
		}
		return outboxsql.Record(ctx, tx, s.recorder, order)
	})
}

func (s *store) Ship(ctx context.Context, tx *sql.Tx, order shop.OrderPlaced, _ outbox.Metadata) error {
	return s.queries.WithTx(tx).CreateShipment(ctx, order.OrderID)
}

func (s *store) Close() error { return s.db.Close() }
