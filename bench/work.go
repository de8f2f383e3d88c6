package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What the children do.

// memoryRecords is how many different records a producer holds in memory. It
// sends them again and again; each time the ones before are out of the client.
const memoryRecords = 100_000

// newProducer makes a client with the options that the relay gives its own.
func newProducer(brokers []string) (*kgo.Client, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0),
		kgo.RecordDeliveryTimeout(10*time.Second), kgo.AllowIdempotentProduceCancellation())
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return client, nil
}

// readAlone reads all events and makes records of them.
func readAlone(ctx context.Context, j job) (u used, err error) {
	db, err := pgx.Connect(ctx, j.Postgres)
	if err != nil {
		return u, err
	}
	defer db.Close(context.WithoutCancel(ctx))
	m, err := startMeter(j.Profile)
	if err != nil {
		return u, err
	}
	n, err := forEach(batches(ctx, db, j), func([]kgo.Record) error { return nil })
	if err != nil {
		return u, err
	}
	return finish(m, n, j)
}

// produceAlone produces records that are in memory.
func produceAlone(ctx context.Context, j job) (u used, err error) {
	records, err := inMemory(ctx, j)
	if err != nil {
		return u, err
	}
	client, err := newProducer(j.Brokers)
	if err != nil {
		return u, err
	}
	defer client.Close()
	m, err := startMeter(j.Profile)
	if err != nil {
		return u, err
	}
	var acks kgo.FirstErrPromise
	for i := range j.Events {
		client.Produce(ctx, &records[i%len(records)], acks.Promise())
	}
	if err := acks.Err(); err != nil {
		return u, fmt.Errorf("produce: %w", err)
	}
	return finish(m, j.Events, j)
}

// inMemory reads the first events as records.
func inMemory(ctx context.Context, j job) ([]kgo.Record, error) {
	db, err := pgx.Connect(ctx, j.Postgres)
	if err != nil {
		return nil, err
	}
	defer db.Close(context.WithoutCancel(ctx))
	j.Batch = min(j.Events, memoryRecords)
	records, _, err := readBatch(ctx, db, services.InSchema(sqlRows, j.Schema), 0, j)
	if err == nil && len(records) == 0 {
		err = errors.New("no events to produce")
	}
	return records, err
}

// pipe is the shortest loop: read a batch, produce it, wait, go on.
func pipe(ctx context.Context, j job) (u used, err error) {
	db, err := pgx.Connect(ctx, j.Postgres)
	if err != nil {
		return u, err
	}
	defer db.Close(context.WithoutCancel(ctx))
	client, err := newProducer(j.Brokers)
	if err != nil {
		return u, err
	}
	defer client.Close()
	source := batches(ctx, db, j)
	if j.Prefetch {
		source = ahead(source)
	}
	m, err := startMeter(j.Profile)
	if err != nil {
		return u, err
	}
	n, err := forEach(source, func(records []kgo.Record) error {
		var acks kgo.FirstErrPromise
		for i := range records {
			client.Produce(ctx, &records[i], acks.Promise())
		}
		return acks.Err()
	})
	if err != nil {
		return u, err
	}
	return finish(m, n, j)
}

// forEach passes each batch to do and returns how many records there were.
func forEach(source iter.Seq2[[]kgo.Record, error], do func([]kgo.Record) error) (n int, err error) {
	for records, err := range source {
		if err == nil {
			err = do(records)
		}
		if err != nil {
			return n, err
		}
		n += len(records)
	}
	return n, nil
}

// finish stops the meter, provided that all was done.
func finish(m *meter, n int, j job) (used, error) {
	u, err := m.stop(n)
	if n != j.Events {
		err = errors.Join(err, fmt.Errorf("%d of %d events", n, j.Events))
	}
	return u, err
}

// relayAll relays all events, as a host would have it done.
func relayAll(ctx context.Context, j job) (u used, err error) {
	db, err := services.NewPool(ctx, j.Postgres, 4)
	if err != nil {
		return u, err
	}
	defer db.Close()
	acked := &acked{j.Topic, newCountdown(j.Events)}
	relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(j.Brokers...), kgo.WithHooks(acked)},
		outbox.RelayConfig{Schema: j.Schema, Name: j.Relay, ExactlyOnce: j.ExactlyOnce})
	if err != nil {
		return u, err
	}
	m, err := startMeter(j.Profile)
	if err != nil {
		return u, err
	}
	running, stop := runRelay(ctx, relay)
	select {
	case <-acked.all:
		u, err = finish(m, j.Events, j)
	case <-running.Done():
		err = context.Cause(running)
	}
	return u, errors.Join(err, stop())
}

// acked is a hook that counts the records of a topic that Kafka has acknowledged, once per batch and
// partition. Its cost for the relay is negligible, and it needs no query.
type acked struct {
	topic string
	*countdown
}

// OnProduceBatchWritten implements [kgo.HookProduceBatchWritten].
func (a *acked) OnProduceBatchWritten(_ kgo.BrokerMetadata, topic string, _ int32, m kgo.ProduceBatchMetrics) {
	if topic == a.topic {
		a.done(m.NumRecords)
	}
}

// countdown tells when all of something is done.
type countdown struct {
	left atomic.Int64
	all  chan struct{} // closed with the last one
}

func newCountdown(n int) *countdown {
	c := &countdown{all: make(chan struct{})}
	c.left.Store(int64(n))
	return c
}

func (c *countdown) done(n int) {
	if left := c.left.Add(int64(-n)); left <= 0 && left+int64(n) > 0 {
		close(c.all)
	}
}

// runRelay runs a relay aside.
func runRelay(ctx context.Context, relay *outbox.Relay) (running context.Context, stop func() error) {
	return runAside(ctx, relay.Run)
}

// runAside runs something until stop is called, which returns what run returned. running ends with
// it, also if it ends by itself.
func runAside(ctx context.Context, run func(context.Context) error) (running context.Context, stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	running, ended := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- run(ctx)
		ended()
	}()
	return running, func() error {
		cancel()
		return <-done
	}
}
