package faults

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A partition has no leader that takes anything. Its events wait, uncounted; those
// of the other partition go on, through batches in which every second event is
// for the dead one, and the breaker stays closed. When the leader is back,
// everything arrives in order.
func TestDeadPartitionHoldsUpNothingElse(t *testing.T) {
	ctx := t.Context()
	topic := "partition-" + uuid.NewString()
	kafka, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(2, topic))
	require.NoError(t, err)
	defer kafka.Close()
	var dead atomic.Bool
	dead.Store(true)
	for n := range int32(2) {
		require.NoError(t, kafka.MoveTopicPartition(topic, n, n))
	}
	kafka.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		kafka.KeepControl()
		if kafka.CurrentNode() != 1 || !dead.Load() {
			return nil, nil, false
		}
		return notLeader(request.(*kmsg.ProduceRequest)), nil, true
	})

	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema}))
	registry, err := outbox.NewRegistry("faults", outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(topic))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(registry, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	commit := func(keys []string, version int64) (events []oracle.Event) {
		require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			for _, key := range keys {
				e := oracle.Event{ID: uuid.NewString(), Key: key, Version: version}
				events = append(events, e)
				if err := rec.Record(ctx, tx, e); err != nil {
					return err
				}
			}
			return nil
		}))
		return events
	}

	var opened atomic.Int32
	relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(kafka.ListenAddrs()...), kgo.MetadataMinAge(50 * time.Millisecond)}, outbox.RelayConfig{
		Schema: schema, PollInterval: 10 * time.Millisecond, DeliveryTimeout: time.Second, SendTimeout: 2 * time.Second,
		RetryInterval: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		Hooks: outbox.RelayHooks{Breaker: func(_, to outbox.BreakerState) {
			if to == outbox.BreakerOpen {
				opened.Add(1)
			}
		}},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	defer func() { cancel(); require.NoError(t, <-done) }()
	reader, err := oracle.Follow(ctx, kafka.ListenAddrs(), topic, nil)
	require.NoError(t, err)

	var lost []oracle.Event
	committed := map[string]struct{}{}
	for version := range int64(6) {
		alive, gone := keysOf(topic, version)
		events := commit(append(alive, gone...), version+1)
		for _, e := range events {
			committed[e.ID] = struct{}{}
		}
		for _, e := range events[:len(alive)] {
			require.Eventually(t, func() bool { return reader.Has(e.ID) }, patience, time.Millisecond, "held up")
		}
		lost = append(lost, events[len(alive):]...)
	}
	for _, e := range lost {
		require.False(t, reader.Has(e.ID))
	}
	require.Zero(t, opened.Load(), "the breaker opened for all")
	var retries int
	require.NoError(t, db.QueryRow(ctx, fmt.Sprintf(`SELECT max(retry_count) FROM %s.outbox_failed`, pgx.Identifier{schema}.Sanitize())).Scan(&retries))
	require.Zero(t, retries)

	dead.Store(false)
	require.Eventually(t, func() bool { return reader.Missing(committed) == 0 }, patience, 10*time.Millisecond)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	var v oracle.Verdict
	v.Judge(committed, arrived)
	require.Zero(t, v.Lost+v.Phantom+v.Inversions, "%s", v)
}

// notLeader answers a produce request as a broker that no longer leads.
func notLeader(request *kmsg.ProduceRequest) kmsg.Response {
	response := request.ResponseKind().(*kmsg.ProduceResponse)
	for _, t := range request.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic, topic.TopicID = t.Topic, t.TopicID
		for _, p := range t.Partitions {
			partition := kmsg.NewProduceResponseTopicPartition()
			partition.Partition, partition.ErrorCode = p.Partition, kerr.NotLeaderForPartition.Code
			topic.Partitions = append(topic.Partitions, partition)
		}
		response.Topics = append(response.Topics, topic)
	}
	return response
}

// keysOf returns keys of the live partition, 0, and of the dead one, 1: some that
// come again in each round, and some that are new.
func keysOf(topic string, round int64) (alive, gone []string) {
	partitioner := kgo.StickyKeyPartitioner(nil).ForTopic(topic)
	for i := 0; len(alive) < 10 || len(gone) < 10; i++ {
		key := fmt.Sprintf("key-%d", i)
		if i >= 5 {
			key = fmt.Sprintf("key-%d-%d", round, i)
		}
		if partitioner.Partition(&kgo.Record{Key: []byte(key)}, 2) == 0 {
			alive = append(alive, key)
		} else {
			gone = append(gone, key)
		}
	}
	return alive, gone
}
