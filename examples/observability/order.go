package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// orderPlaced says that a customer placed an order.
type orderPlaced struct {
	ID    string    `json:"id"`
	Cents int64     `json:"cents"`
	Note  string    `json:"note,omitempty"`
	At    time.Time `json:"at"`
}

// OccurredAt is when the customer did.
func (e orderPlaced) OccurredAt() time.Time { return e.At }

func (e orderPlaced) order() string { return e.ID }

// registry says how the event travels.
func registry(topic string) (*outbox.Registry, error) {
	return outbox.NewRegistry("observability", outbox.Event("acme.order.placed.v1", "Order", orderPlaced.order).Topic(topic))
}

// sqlTables makes the tables of the service.
const sqlTables = `
CREATE TABLE {schema}.orders (id text PRIMARY KEY, cents bigint NOT NULL);
CREATE TABLE {schema}.sales (day date PRIMARY KEY, cents bigint NOT NULL);`

const sqlOrder = `INSERT INTO {schema}.orders VALUES ($1, $2)`

// place stores an order and records its event.
func (s *service) place(ctx context.Context, o orderPlaced) error {
	return s.relay.Waker().InTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, s.sql(sqlOrder), o.ID, o.Cents); err != nil {
			return err
		}
		return s.rec.Record(ctx, tx, o)
	})
}

var errNoPrice = errors.New("order without a price")

const sqlSale = `
INSERT INTO {schema}.sales AS s (day, cents) VALUES ($1, $2)
    ON CONFLICT (day) DO UPDATE SET cents = s.cents + excluded.cents`

// countSale is the handler of the event. It refuses what is free of charge, so that
// there is something to see among the dead letters.
func (s *service) countSale(ctx context.Context, tx pgx.Tx, e orderPlaced, _ outbox.Metadata) error {
	if e.Cents <= 0 {
		return outbox.Permanent(errNoPrice)
	}
	_, err := tx.Exec(ctx, s.sql(sqlSale), e.At, e.Cents)
	s.log.DebugContext(ctx, "sale counted", "order", e.ID)
	return err
}

// sendMail is the handler of a worker, which gets the event without Kafka. There is no mail
// about what is free of charge, so that there is something to see among the dead deliveries.
func (s *service) sendMail(ctx context.Context, e orderPlaced, _ outbox.Metadata) error {
	if e.Cents <= 0 {
		return outbox.Permanent(errNoPrice)
	}
	s.log.DebugContext(ctx, "mail sent", "order", e.ID)
	return nil
}
