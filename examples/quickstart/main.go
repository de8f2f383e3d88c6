// The quickstart records an event, relays it to Kafka and handles it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

type GreetingSent struct {
	To, Text string
	At       time.Time
}

func (e GreetingSent) OccurredAt() time.Time { return e.At }
func (e GreetingSent) Recipient() string     { return e.To }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	db := must(pgxpool.New(ctx, os.Getenv("DATABASE_URL")))
	defer db.Close()
	kafka := []kgo.Opt{kgo.SeedBrokers(os.Getenv("KAFKA_BROKERS")), kgo.AllowAutoTopicCreation()}
	must("migrated", outbox.Migrate(ctx, db, outbox.MigrateConfig{}))

	events := must(outbox.NewRegistry("hello", // to the topic greeting-events, keyed by recipient
		outbox.Event("acme.greeting.sent.v1", "Greeting", GreetingSent.Recipient)))
	recorder := must(outbox.NewRecorder(events, outbox.RecorderConfig{}))
	relay := must(outbox.NewRelay(db, kafka, outbox.RelayConfig{}))
	printer := must(outbox.NewConsumer(db, kafka, events, "printer", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.Handle("PRINTED", func(_ context.Context, tx pgx.Tx, e GreetingSent, _ outbox.Metadata) error {
			fmt.Printf("arrived: %s, %s\n", e.To, e.Text) // statements in tx commit once, however often e arrives
			stop()                                        // ends both Runs once they have finished what is in flight
			return nil
		})))
	must("committed", pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { // together with your own statements
		return recorder.Record(ctx, tx, GreetingSent{"gopher", "hello", time.Now()})
	}))
	var running sync.WaitGroup
	running.Go(func() { must("relayed", relay.Run(ctx)) }) // in every process: one relays, the others stand by
	running.Go(func() { must("handled", printer.Run(ctx)) })
	running.Wait()
}

func must[T any](v T, err error) T {
	if err != nil && !errors.Is(err, context.Canceled) { // a signal is no error
		panic(err)
	}
	return v
}
