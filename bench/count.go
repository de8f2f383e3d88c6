package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

// countAll consumes a topic from its start, as a new group, and counts its events
// by their keys.
func countAll(ctx context.Context, j job) (u used, err error) {
	db, err := services.NewPool(ctx, j.Postgres, shelfPartitions+1) // consumers leave one to their handlers
	if err != nil {
		return u, err
	}
	defer db.Close()
	events, err := outbox.NewRegistry(orders.Source, outbox.Event(j.EventType, orders.Aggregate, orders.Placed.Key).Topic(j.Topic))
	if err != nil {
		return u, err
	}
	first, counted := &firstBatch{profile: j.Profile}, newCountdown(j.Events)
	consumer, err := outbox.NewConsumer(db, []kgo.Opt{kgo.SeedBrokers(j.Brokers...), kgo.WithHooks(first)}, events,
		j.Group, outbox.ConsumerConfig{
			HandlerConfig: outbox.HandlerConfig{
				Schema: j.Schema,
				Hooks:  outbox.ConsumerHooks{Handled: func(outbox.Metadata, string, time.Duration) { counted.done(1) }},
				From:   outbox.FromStart, MaxPoll: j.MaxPoll,
			},
		}, j.counter())
	if err != nil {
		return u, err
	}
	running, stop := runAside(ctx, consumer.Run)
	select {
	case <-counted.all:
		if err = first.err; err == nil {
			u, err = finish(first.meter, j.Events, j)
		}
	case <-running.Done():
		err = context.Cause(running)
	}
	return u, errors.Join(err, stop())
}

// firstBatch is a hook that starts the meter when the first records have arrived:
// joining a group takes as long as it takes.
type firstBatch struct {
	profile string
	once    sync.Once
	meter   *meter
	err     error
}

// OnFetchBatchRead implements [kgo.HookFetchBatchRead].
func (f *firstBatch) OnFetchBatchRead(kgo.BrokerMetadata, string, int32, kgo.FetchBatchMetrics) {
	f.once.Do(func() { f.meter, f.err = startMeter(f.profile) })
}

const (
	sqlCount     = `UPDATE {schema}.counts SET n = n + 1 WHERE key = $1`
	sqlCountMany = `
UPDATE {schema}.counts AS c
   SET n = c.n + k.n
  FROM (SELECT key, count(*) AS n FROM unnest($1::text[]) AS key GROUP BY key) AS k
 WHERE c.key = k.key`
)

// counter is the handler that counts: each event, or those that arrived together.
func (j job) counter() outbox.Handler {
	one, many := services.InSchema(sqlCount, j.Schema), services.InSchema(sqlCountMany, j.Schema)
	if j.NoTx {
		return outbox.HandleNoTx("COUNTED", func(context.Context, orders.Placed, outbox.Metadata) error { return nil })
	}
	if j.InBatch {
		return outbox.HandleBatch("COUNTED", func(ctx context.Context, tx pgx.Tx, events []outbox.Received[orders.Placed]) error {
			keys := make([]string, len(events))
			for i, e := range events {
				keys[i] = e.Event.Order
			}
			_, err := tx.Exec(ctx, many, keys)
			return err
		})
	}
	return outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e orders.Placed, _ outbox.Metadata) error {
		_, err := tx.Exec(ctx, one, e.Order)
		return err
	})
}
