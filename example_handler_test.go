package outbox_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
)

// A batch handler gets the events that arrived together and writes them with one
// statement.
func ExampleHandleBatch() {
	h := outbox.HandleBatch("SALES_COUNTED", func(ctx context.Context, tx pgx.Tx, received []outbox.Received[OrderPaid]) error {
		sold := map[string]int{}
		for _, r := range received {
			sold[r.Event.ProductID] += r.Event.Quantity
		}
		var batch pgx.Batch
		for product, n := range sold {
			batch.Queue(`UPDATE product_statistic SET sales_count = sales_count + $2 WHERE product_id = $1`, product, n)
		}
		return tx.SendBatch(ctx, &batch).Close()
	})
	consume(h)
}

// An order is invoiced once, also if the same order is paid by two different events.
func ExampleOncePer() {
	h := outbox.Handle("ORDER_INVOICED", func(ctx context.Context, tx pgx.Tx, e OrderPaid, _ outbox.Metadata) error {
		_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id) VALUES ($1)`, e.OrderID)
		return err
	})
	consume(outbox.OncePer(h, func(e OrderPaid, _ outbox.Metadata) (aggregateType, aggregateID string) {
		return "Order", e.OrderID
	}))
}

// A payment provider calls again until it gets an answer. The order is marked once.
func ExampleInbox_Once() {
	inbox, err := outbox.NewInbox("", "payments")
	if err != nil {
		log.Fatal(err)
	}
	webhook := func(ctx context.Context, eventID, orderID string) error {
		return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			message := outbox.InboxMessage{Source: "stripe", ID: eventID, Action: "ORDER_PAID"}
			_, err := inbox.Once(ctx, tx, message, func() ([]byte, error) {
				_, err := tx.Exec(ctx, `UPDATE orders SET paid = true WHERE id = $1`, orderID)
				return nil, err // no answer is to be kept
			})
			return err
		})
	}
	for range 2 {
		if err := webhook(ctx, "evt_1", "order-1"); err != nil {
			log.Fatal(err)
		}
	}
}

// An effect that is idempotent by nature needs no note in PostgreSQL.
func ExampleHandleNoTx() {
	consume(outbox.HandleNoTx("CACHE_INVALIDATED", func(ctx context.Context, e StockDepleted, _ outbox.Metadata) error {
		return cache.Delete(ctx, "product:"+e.ProductID)
	}))
}

// No retry mends an order that does not exist, so its event becomes a dead letter at
// once.
func ExamplePermanent() {
	consume(outbox.Handle("ORDER_CLOSED", func(ctx context.Context, tx pgx.Tx, e OrderPaid, _ outbox.Metadata) error {
		tag, err := tx.Exec(ctx, `UPDATE orders SET closed = true WHERE id = $1`, e.OrderID)
		if err == nil && tag.RowsAffected() == 0 {
			err = outbox.Permanent(errors.New("no such order"))
		}
		return err
	}))
}

// A cache that is busy has time again in a minute.
func ExampleRetryAfter() {
	consume(outbox.HandleNoTx("CACHE_INVALIDATED", func(ctx context.Context, e StockDepleted, _ outbox.Metadata) error {
		err := cache.Delete(ctx, "product:"+e.ProductID)
		if errors.Is(err, errBusy) {
			err = outbox.RetryAfter(err, time.Minute)
		}
		return err
	}))
}

// A handler of the newer version gets the events of the older one as well.
func ExampleUpcast() {
	_, err := outbox.NewConsumer(db, kafka, events, "warehouse", outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Upcasters: []outbox.Upcaster{outbox.Upcast(func(old StockDepleted) StockDepletedV2 {
				return StockDepletedV2{StockDepleted: old, Warehouse: "main"}
			})},
		},
	}, outbox.HandleNoTx("RESTOCKED", func(ctx context.Context, e StockDepletedV2, _ outbox.Metadata) error {
		return cache.Delete(ctx, e.Warehouse+":"+e.ProductID)
	}))
	if err != nil {
		log.Fatal(err)
	}
}

// Metadata has the data of an event that are not in its payload.
func ExampleMetadata() {
	consume(outbox.HandleNoTx("LOGGED", func(ctx context.Context, e OrderPaid, m outbox.Metadata) error {
		where := "not from Kafka"
		if m.Kafka != nil {
			where = m.Kafka.Topic
		}
		log.Println(m.ID, m.Type, m.Extensions["correlationid"], where)
		return nil
	}))
}

// Hooks are called while the consumer works: for metrics and traces, or to tell the team
// about dead letters.
func ExampleConsumerHooks() {
	_, err := outbox.NewConsumer(db, kafka, events, "hooked", outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Hooks: outbox.ConsumerHooks{
				DeadLettered: func(m outbox.Metadata, action, topic string, err error) {
					log.Println("given up:", m.ID, action, topic, err)
				},
			},
		},
	}, outbox.HandleNoTx("SEEN", func(context.Context, OrderPaid, outbox.Metadata) error { return nil }))
	if err != nil {
		log.Fatal(err)
	}
}

// A middleware runs around each call of a handler.
func ExampleMiddleware() {
	cfg := outbox.ConsumerConfig{}
	cfg.Middleware = []outbox.Middleware{func(ctx context.Context, call outbox.HandlerCall, next func(context.Context) error) error {
		began := time.Now()
		err := next(ctx)
		log.Println(call.Action, len(call.Events), time.Since(began), err)
		return err
	}}
	_, err := outbox.NewConsumer(db, kafka, events, "measured", cfg, outbox.HandleNoTx("SEEN", func(context.Context, OrderPaid, outbox.Metadata) error { return nil }))
	if err != nil {
		log.Fatal(err)
	}
}

// StockDepletedV2 says in which warehouse, too.
type StockDepletedV2 struct {
	StockDepleted
	Warehouse string
}

// consume makes a consumer of one handler; ExampleConsumer shows the whole.
func consume(h outbox.Handler) {
	c, err := outbox.NewConsumer(db, kafka, events, "examples", outbox.ConsumerConfig{}, h)
	if err != nil {
		log.Fatal(err)
	}
	_ = c // c.Run(ctx)
}

// A worker passes the recorded events to handlers, without Kafka. Each order is marked once, in the
// transaction that notes it.
func ExampleWorker() {
	worker, err := outbox.NewWorker(db, events, "orders", outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{
			From:  outbox.FromStart, // also what was recorded before the first start of the group
			Retry: outbox.RetryPolicy{MaxRetries: 5},
		},
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
