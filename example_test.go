package outbox_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
)

type OrderPaid struct {
	OrderID, ProductID string
	Quantity           int
	At                 time.Time
}

type StockDepleted struct {
	ProductID string
	At        time.Time
}

func (e OrderPaid) OccurredAt() time.Time     { return e.At }
func (e StockDepleted) OccurredAt() time.Time { return e.At }

var (
	ctx    context.Context
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	events *outbox.Registry
	cache  interface {
		Delete(ctx context.Context, key string) error
	}
	errBusy = errors.New("the cache is busy")
)

func ExampleConsumer() {
	c, err := outbox.NewConsumer(db, kafka, events, "product-statistics", outbox.ConsumerConfig{},
		outbox.Handle("SALES_COUNT_INCREASED", func(ctx context.Context, tx pgx.Tx, e OrderPaid, m outbox.Metadata) error {
			_, err := tx.Exec(ctx, `UPDATE product_statistic SET sales_count = sales_count + $2 WHERE product_id = $1`, e.ProductID, e.Quantity)
			return err
		}),
		outbox.HandleNoTx("CACHE_INVALIDATED", func(ctx context.Context, e StockDepleted, m outbox.Metadata) error {
			return cache.Delete(ctx, "product:"+e.ProductID)
		}),
	)
	if err != nil {
		log.Fatal(err)
	}
	err = c.Run(ctx) // blocks; cancel ctx: what is in flight is finished, offsets are committed
	if err != nil {
		log.Fatal(err)
	}
}
