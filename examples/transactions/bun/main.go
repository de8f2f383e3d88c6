// The example for bun stores an order and its event in one transaction, and the shipment in
// that of the event's handler.
package main

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/outboxsql"
)

// Order is a row of orders.
type Order struct {
	ID       string `bun:",pk"`
	Product  string
	Quantity int
}

// Shipment is a row of shipments.
type Shipment struct {
	ID       int64 `bun:",pk,autoincrement"`
	OrderID  string
	Quantity int
}

type store struct {
	db       *bun.DB
	recorder *outbox.Recorder
	waker    *outbox.Waker
}

func main() { shop.Main(open) }

func open(s *shop.Shop) (shop.Store, error) {
	pool := s.Pool
	db := bun.NewDB(stdlib.OpenDBFromPool(pool), pgdialect.New())
	return &store{db: db, recorder: s.Recorder, waker: s.Relay.Waker()}, nil
}

func (s *store) Place(ctx context.Context, order shop.OrderPlaced) error {
	err := s.db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		row := &Order{ID: order.OrderID, Product: order.Product, Quantity: order.Quantity}
		if _, err := tx.NewInsert().Model(row).Exec(ctx); err != nil {
			return err
		}
		return outboxsql.Record(ctx, tx, s.recorder, order)
	})
	if err != nil {
		return err
	}
	s.waker.Wake()
	return nil
}

func (s *store) Ship(ctx context.Context, tx *sql.Tx, order shop.OrderPlaced, _ outbox.Metadata) error {
	row := &Shipment{OrderID: order.OrderID, Quantity: order.Quantity}
	_, err := s.db.NewInsert().Conn(tx).Model(row).Exec(ctx)
	return err
}

func (s *store) Close() error { return s.db.Close() }
