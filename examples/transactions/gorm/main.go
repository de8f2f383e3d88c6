// The example for GORM stores an order and its event in one transaction, and the shipment in
// that of the event's handler.
package main

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/outboxsql"
)

// Order is a row of orders.
type Order struct {
	ID       string `gorm:"primaryKey"`
	Product  string
	Quantity int
}

// Shipment is a row of shipments.
type Shipment struct {
	ID       int64
	OrderID  string
	Quantity int
}

type store struct {
	db       *gorm.DB
	recorder *outbox.Recorder
	waker    *outbox.Waker
}

func main() { shop.Main(open) }

func open(s *shop.Shop) (shop.Store, error) {
	pool := s.Pool
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: stdlib.OpenDBFromPool(pool)}), &gorm.Config{})
	return &store{db: db, recorder: s.Recorder, waker: s.Relay.Waker()}, err
}

func (s *store) Place(ctx context.Context, order shop.OrderPlaced) error {
	err := s.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&Order{ID: order.OrderID, Product: order.Product, Quantity: order.Quantity}).Error; err != nil {
			return err
		}
		return outboxsql.Record(ctx, tx.Statement.ConnPool.(outboxsql.Tx), s.recorder, order)
	})
	if err != nil {
		return err
	}
	s.waker.Wake()
	return nil
}

// Ship lets a session of its own use the transaction. It must come from WithContext: without a
// context, a session shares its statement with s.db.
func (s *store) Ship(ctx context.Context, tx *sql.Tx, order shop.OrderPlaced, _ outbox.Metadata) error {
	db := s.db.WithContext(ctx)
	db.Statement.ConnPool = tx
	return db.Create(&Shipment{OrderID: order.OrderID, Quantity: order.Quantity}).Error
}

func (s *store) Close() error {
	db, err := s.db.DB()
	if err != nil {
		return err
	}
	return db.Close()
}
