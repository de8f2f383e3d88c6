// The example for database/sql with lib/pq stores an order and its event in one transaction, and
// the shipment in that of the event's handler.
package main

import (
	"context"
	"database/sql"

	_ "github.com/lib/pq" // the driver postgres

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/outboxsql"
)

type store struct {
	db       *sql.DB
	recorder *outbox.Recorder
	waker    *outbox.Waker
}

func main() { shop.Main(open) }

func open(s *shop.Shop) (shop.Store, error) {
	db, err := sql.Open("postgres", s.DatabaseURL) // separately from s.Pool, which has the same address
	return &store{db: db, recorder: s.Recorder, waker: s.Relay.Waker()}, err
}

func (s *store) Place(ctx context.Context, order shop.OrderPlaced) error {
	return outboxsql.InTx(ctx, s.db, s.waker, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES ($1, $2, $3)`, order.OrderID, order.Product, order.Quantity)
		if err != nil {
			return err
		}
		return outboxsql.Record(ctx, tx, s.recorder, order)
	})
}

// Ship runs on a connection of the pool, so its errors are those of pgx.
func (s *store) Ship(ctx context.Context, tx *sql.Tx, order shop.OrderPlaced, _ outbox.Metadata) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO shipments (order_id, quantity) VALUES ($1, $2)`, order.OrderID, order.Quantity)
	return err
}

func (s *store) Close() error { return s.db.Close() }
