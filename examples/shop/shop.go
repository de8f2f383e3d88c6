// Package shop is a service in one file: it places orders and counts sales. Its
// tests show what outboxtest is for.
package shop

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

// OrderPlaced says that a customer placed an order.
type OrderPlaced struct {
	ID    string    `json:"id"`
	Cents int64     `json:"cents"`
	At    time.Time `json:"at"`
}

// OrderCanceled says that a customer thought better of it.
type OrderCanceled struct {
	ID string    `json:"id"`
	At time.Time `json:"at"`
}

// OccurredAt is when the customer did.
func (e OrderPlaced) OccurredAt() time.Time { return e.At }

// OccurredAt is when the customer did.
func (e OrderCanceled) OccurredAt() time.Time { return e.At }

func (e OrderPlaced) order() string   { return e.ID }
func (e OrderCanceled) order() string { return e.ID }

//go:generate outbox contract export --out contract.json . Events

// Events says how the events travel.
func Events() (*outbox.Registry, error) {
	return outbox.NewRegistry("shop",
		outbox.Event("acme.order.placed.v1", "Order", OrderPlaced.order),
		outbox.Event("acme.order.canceled.v1", "Order", OrderCanceled.order),
	)
}

// Tables makes the tables of the shop.
const Tables = `
CREATE TABLE orders (id text PRIMARY KEY, cents bigint NOT NULL);
CREATE TABLE sales (day date PRIMARY KEY, cents bigint NOT NULL);`

// Place places an order in tx.
func Place(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder, id string, cents int64, at time.Time) error {
	if _, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1, $2)`, id, cents); err != nil {
		return err
	}
	return rec.Record(ctx, tx, OrderPlaced{ID: id, Cents: cents, At: at})
}

const sqlSale = `
INSERT INTO sales (day, cents) VALUES ($1, $2)
    ON CONFLICT (day) DO UPDATE SET cents = sales.cents + excluded.cents`

// Sales returns the consumer that adds up the sales of each day.
func Sales(db *pgxpool.Pool, kafka []kgo.Opt, events *outbox.Registry) (*outbox.Consumer, error) {
	return outbox.NewConsumer(db, kafka, events, "sales", outbox.ConsumerConfig{},
		outbox.Handle("SALE_COUNTED", func(ctx context.Context, tx pgx.Tx, e OrderPlaced, _ outbox.Metadata) error {
			_, err := tx.Exec(ctx, sqlSale, e.At, e.Cents)
			return err
		}))
}
