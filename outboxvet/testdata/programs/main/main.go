package main // want package:"registered" `example.com/vet/shop.Canceled is not registered: example.com/vet/shop/shop.go:31 records it`

import (
	"context"
	"time"

	"example.com/vet/lone"
	"example.com/vet/shop"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

type Liked struct{}

func (e Liked) OccurredAt() time.Time { return time.Time{} }
func (e Liked) key() string           { return "" }

type Viewed struct{}

func (e Viewed) OccurredAt() time.Time { return time.Time{} }

func main() {
	events, err := outbox.NewRegistry("shop", shop.Events(),
		outbox.Event("acme.order.liked.v1", "Order", Liked.key), outbox.Event("acme.order.paid.v1", "Order", shop.Paid.Order))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	run(context.Background(), nil, rec)
}

func run(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder) error {
	if err := shop.Cancel(ctx, tx, rec, "1"); err != nil {
		return err
	}
	if err := lone.Ship(ctx, tx, rec, "1"); err != nil { // no package registers near lone
		return err
	}
	return rec.Record(ctx, tx, Liked{}, outbox.RawEvent{}, Viewed{}) // want `Viewed is not registered`
}
