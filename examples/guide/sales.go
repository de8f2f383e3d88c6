package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

// newSales returns the consumer that adds up the sales of each product.
func newSales(db *pgxpool.Pool, kafka []kgo.Opt, events *outbox.Registry) (*outbox.Consumer, error) {
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	return outbox.NewConsumer(db, kafka, events, "sales", cfg, outbox.Handle("SALE_COUNTED", countSale))
}

// countSale runs in a transaction that also stores that the event is handled: an
// event that arrives twice is counted once.
func countSale(ctx context.Context, tx pgx.Tx, order OrderPlaced, _ outbox.Metadata) error {
	tag, err := tx.Exec(ctx, `UPDATE sales SET cents = cents + $2 WHERE product = $1`, order.Product, order.Cents)
	if err != nil {
		return err // is retried; later events of its key wait
	}
	if tag.RowsAffected() == 0 {
		// No retry helps: the record goes to order-events.dlq at once.
		return outbox.Permanent(fmt.Errorf("no product %q", order.Product))
	}
	return nil
}
