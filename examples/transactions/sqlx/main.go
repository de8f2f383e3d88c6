// The example for sqlx stores an order and its event in one transaction, and the shipment in
// that of the event's handler.
package main

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/outboxsql"
)

// Order is a row of orders.
type Order struct {
	ID       string
	Product  string
	Quantity int
}

type store struct {
	db       *sqlx.DB
	recorder *outbox.Recorder
	waker    *outbox.Waker
}

func main() { shop.Main(open) }

func open(s *shop.Shop) (shop.Store, error) {
	pool := s.Pool
	db := sqlx.NewDb(stdlib.OpenDBFromPool(pool), "pgx")
	return &store{db: db, recorder: s.Recorder, waker: s.Relay.Waker()}, nil
}

func (s *store) Place(ctx context.Context, order shop.OrderPlaced) error {
	tx, err := s.db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after Commit
	row := Order{ID: order.OrderID, Product: order.Product, Quantity: order.Quantity}
	if _, err := tx.NamedExecContext(ctx, `INSERT INTO orders VALUES (:id, :product, :quantity)`, row); err != nil {
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

// Ship reads and writes through sqlx. Its Tx does not know the driver, so it cannot bind named
// parameters: BindNamed does.
func (s *store) Ship(ctx context.Context, tx *sql.Tx, order shop.OrderPlaced, _ outbox.Metadata) error {
	x := sqlx.Tx{Tx: tx, Mapper: s.db.Mapper}
	var row Order
	if err := x.GetContext(ctx, &row, `SELECT * FROM orders WHERE id = $1`, order.OrderID); err != nil {
		return err
	}
	query, args, err := s.db.BindNamed(`INSERT INTO shipments (order_id, quantity) VALUES (:id, :quantity)`, row)
	if err != nil {
		return err
	}
	_, err = x.ExecContext(ctx, query, args...)
	return err
}

func (s *store) Close() error { return s.db.Close() }
