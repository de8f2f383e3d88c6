package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/kafkaserver"
)

const (
	firstPartitions = 12  // of both topics
	eventRate       = 100 // events a second, and records of the plain producer
	eventWriters    = 4
	keysOfWriter    = 75
)

// brokersSite is a pair of PostgreSQL servers and a cluster of brokers. Two relays with default
// options publish what is recorded, and a plain producer with default options writes to a topic
// of the same shape.
type brokersSite struct {
	*pair
	*crew
	kafka      *kafkaserver.Cluster
	manager    *kgo.Client // changes topics
	plainTopic string
	start      time.Time
	events     *marks // of the relays
	plain      *marks // of the plain producer
	arrivals   arrivals
	recoveries []recovery
}

func newBrokersSite(t *testing.T) *brokersSite {
	t.Helper()
	s := &brokersSite{crew: newCrew(t), events: newMarks(), plain: newMarks()}
	var err error
	s.kafka, err = kafkaserver.StartCluster(s.ctx, brokerConfig(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.kafka.Stop()) })
	s.pair = newPairBeside(t, "read-write", s.kafka.Brokers())
	s.waitForStandby(t)
	s.plainTopic = s.topic + "-plain"
	s.manager = s.admin(t)
	s.createTopics(t)
	s.reader.Close()
	s.reader, err = oracle.Follow(s.brokers, s.topic, s.arrivals.decode)
	require.NoError(t, err)
	t.Cleanup(s.reader.Close)
	for _, name := range []string{"first", "second"} { // one leads, one stands by
		log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})).With("relay", name)
		run(t, s.relayPool(t), []kgo.Opt{kgo.SeedBrokers(s.brokers...), kgo.WithHooks(s.events)}, outbox.RelayConfig{
			Logger: log, DeliveryTimeout: *deliveryTimeout, Lease: 2 * *deliveryTimeout,
		})
	}
	return s
}

// write records events and produces records, each of a steady rate, until stop is called. It
// lives through outages. stop returns the ids of the events whose commit was confirmed.
func (s *brokersSite) write(t *testing.T, seed uint64) (stop func() map[string]struct{}) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var writing sync.WaitGroup
	for n := range eventWriters {
		writing.Go(func() { s.recordSteadily(ctx, rand.New(rand.NewPCG(seed, uint64(n))), n) })
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.DefaultProduceTopic(s.plainTopic), kgo.WithHooks(s.plain))
	require.NoError(t, err)
	writing.Go(func() { s.produceSteadily(ctx, t, rand.New(rand.NewPCG(seed, eventWriters)), client) })
	stop = sync.OnceValue(func() map[string]struct{} {
		cancel()
		writing.Wait()
		client.Close()
		return s.events.confirmed()
	})
	t.Cleanup(func() { stop() })
	return stop
}

func keyOf(writer, n int) string { return fmt.Sprintf("key-%d-%d", writer, n) }

// recordSteadily commits events of keys of its own. A version whose commit fails may be there all
// the same; the next one has a higher version in any case.
func (s *brokersSite) recordSteadily(ctx context.Context, rng *rand.Rand, writer int) {
	versions := map[string]int64{}
	steadily(ctx, eventRate/eventWriters, func() {
		key := keyOf(writer, rng.IntN(keysOfWriter))
		versions[key]++
		e := oracle.Event{ID: uuid.NewString(), Key: key, Version: versions[key]}
		s.events.begin(e.ID)
		whole := context.WithoutCancel(ctx)
		if pgx.BeginFunc(whole, s.db, func(tx pgx.Tx) error { return s.record(whole, tx, e) }) == nil {
			s.events.confirm(e.ID)
		}
	})
}

// produceSteadily is the plain producer. Its keys are those of the events, so that each partition
// has as many of them.
func (s *brokersSite) produceSteadily(ctx context.Context, t *testing.T, rng *rand.Rand, client *kgo.Client) {
	steadily(ctx, eventRate, func() {
		e := oracle.Event{ID: uuid.NewString(), Key: keyOf(rng.IntN(eventWriters), rng.IntN(keysOfWriter))}
		value, err := json.Marshal(e)
		if err != nil {
			t.Error(err)
			return
		}
		s.plain.begin(e.ID)
		s.plain.confirm(e.ID)
		client.Produce(ctx, &kgo.Record{Key: []byte(e.Key), Value: value}, func(_ *kgo.Record, err error) {
			if err != nil && ctx.Err() == nil {
				t.Errorf("the plain producer has lost a record: %v", err)
			}
		})
	})
}

// steadily calls f so many times a second. After a call that took long it does not catch up.
func steadily(ctx context.Context, rate int, f func()) {
	ticker := time.NewTicker(time.Second / time.Duration(rate))
	defer ticker.Stop()
	for ctx.Err() == nil {
		f()
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

// awaitStart waits until each partition of both topics has accepted something.
func (s *brokersSite) awaitStart(t *testing.T) {
	t.Helper()
	require.True(t, s.await(t, testenv.Patience, func() bool {
		now := time.Now()
		return len(s.plain.partitions(now)) == firstPartitions && len(s.events.partitions(now)) == firstPartitions
	}), "not all partitions accept something")
	s.start = time.Now()
}

// confirmed returns the ids of the records that were made for certain.
func (m *marks) confirmed() map[string]struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[string]struct{}{}
	for id, one := range m.ids {
		if one.certain {
			all[id] = struct{}{}
		}
	}
	return all
}

// logf logs a line with the time since the start.
func (s *brokersSite) logf(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf("%5.1f s: %s", time.Since(s.start).Seconds(), fmt.Sprintf(format, args...))
}
