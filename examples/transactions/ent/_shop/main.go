// The example for ent stores an order and its event in one transaction, and the shipment in
// that of the event's handler. The package ent is generated from ent/schema.
package main

//go:generate go tool ent generate --feature sql/execquery --target ent ../schema

import (
	"context"
	"database/sql"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/ent/_shop/ent"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/outboxsql"
)

type store struct {
	client   *ent.Client
	recorder *outbox.Recorder
	waker    *outbox.Waker
}

func main() { shop.Main(open) }

func open(s *shop.Shop) (shop.Store, error) {
	pool := s.Pool
	client := ent.NewClient(ent.Driver(entsql.OpenDB(dialect.Postgres, stdlib.OpenDBFromPool(pool))))
	return &store{client: client, recorder: s.Recorder, waker: s.Relay.Waker()}, nil
}

// Place needs ExecContext of ent.Tx, which the feature sql/execquery generates.
func (s *store) Place(ctx context.Context, order shop.OrderPlaced) error {
	tx, err := s.client.Tx(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after Commit
	err = tx.Order.Create().SetID(order.OrderID).SetProduct(order.Product).SetQuantity(order.Quantity).Exec(ctx)
	if err != nil {
		return err
	}
	if err := outboxsql.Record(ctx, tx, s.recorder, order); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	s.waker.Wake()
	return nil
}

// handlerDriver is the driver of a client in a handler. Where ent would begin a transaction,
// which it does to write several rows for an edge, it stays in the one of the handler.
type handlerDriver struct{ *entsql.Driver }

func (d handlerDriver) Tx(context.Context) (dialect.Tx, error) { return dialect.NopTx(d), nil }

func inTx(tx *sql.Tx) *ent.Client {
	return ent.NewClient(ent.Driver(handlerDriver{entsql.NewDriver(dialect.Postgres, entsql.Conn{ExecQuerier: tx})}))
}

func (s *store) Ship(ctx context.Context, tx *sql.Tx, order shop.OrderPlaced, _ outbox.Metadata) error {
	client := inTx(tx)
	shipment, err := client.Shipment.Create().SetQuantity(order.Quantity).Save(ctx)
	if err != nil {
		return err
	}
	return client.Order.UpdateOneID(order.OrderID).AddShipments(shipment).Exec(ctx)
}

func (s *store) Close() error { return s.client.Close() }
