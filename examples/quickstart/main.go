// The quickstart records one event, relays it, and prints what arrives in Kafka.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
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
	kafka := []kgo.Opt{kgo.SeedBrokers(os.Getenv("KAFKA_BROKERS")), kgo.AllowAutoTopicCreation()}

	must("migrated", outbox.Migrate(ctx, db, outbox.MigrateConfig{}))
	events := must(outbox.NewRegistry("hello", // to the topic greeting-events, keyed by recipient
		outbox.Event("acme.greeting.sent.v1", "Greeting", GreetingSent.Recipient)))
	rec := must(outbox.NewRecorder(events, outbox.RecorderConfig{}))
	relay := must(outbox.NewRelay(db, kafka, outbox.RelayConfig{}))

	must("committed", pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		return rec.Record(ctx, tx, GreetingSent{"gopher", "hello", time.Now()}) // beside your own statements
	}))
	go func() {
		reader := must(kgo.NewClient(append(kafka, kgo.ConsumeTopics("greeting-events"))...))
		for ctx.Err() == nil {
			for _, r := range reader.PollFetches(ctx).Records() {
				fmt.Printf("arrived: %s %s\n", r.Key, r.Value)
				stop() // Run finishes what is in flight and returns
			}
		}
	}()
	must("relayed", relay.Run(ctx)) // in a service: a goroutine beside your server
}

func must[T any](v T, err error) T {
	if err != nil && !errors.Is(err, context.Canceled) { // a signal is no error, and ends Run at once
		panic(err)
	}
	return v
}
