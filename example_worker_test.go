package outbox_test

import (
	"context"
	"log"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
)

// A worker hands what the service records to handlers, without Kafka. Each order is marked once, in
// the transaction that notes it.
func ExampleWorker() {
	worker, err := outbox.NewWorker(db, events, "orders", outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: 5}},
		From:          outbox.FromStart, // also what was recorded before the first start of the group
	}, outbox.Handle("ORDER_PAID", func(ctx context.Context, tx pgx.Tx, e OrderPaid, _ outbox.Metadata) error {
		_, err := tx.Exec(ctx, `UPDATE orders SET paid = true WHERE id = $1`, e.OrderID)
		return err
	}))
	if err != nil {
		log.Fatal(err)
	}
	if err := worker.Run(ctx); err != nil { // until ctx is cancelled
		log.Fatal(err)
	}
}
