package faults

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A partition takes nothing. Its events wait, uncounted; those of the other one go
// on, through batches in which every second event is for the dead one, and the
// breaker stays closed. When it is back, everything arrives in order. The log
// tells of it once, as of a partition.
func TestDeadPartitionHoldsUpNothingElse(t *testing.T) {
	h := newTwoPartitions(t)
	var dead atomic.Bool
	dead.Store(true)
	h.kafka.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		h.kafka.KeepControl()
		if h.kafka.CurrentNode() != 1 || !dead.Load() {
			return nil, nil, false
		}
		return notLeader(request.(*kmsg.ProduceRequest)), nil, true
	})
	h.run(t)
	for version := range int64(6) {
		alive, gone := keysOf(h.topic, version)
		events := h.commit(t, version+1, append(alive, gone...)...)
		h.requireArrival(t, events[:len(alive)])
		h.lost = append(h.lost, events[len(alive):]...)
	}
	h.requireWaiting(t)
	dead.Store(false)
	h.requireAll(t)
}

// A partition has no leader, and its events come alone, so that nothing of their
// batches gets through. They are not mistaken for an outage of Kafka.
func TestPartitionWithoutLeader(t *testing.T) {
	h := newTwoPartitions(t)
	leaderless := h.withoutLeader(t)
	var dead atomic.Bool
	dead.Store(true)
	h.kafka.ControlKey(int16(kmsg.Metadata), func(request kmsg.Request) (kmsg.Response, error, bool) {
		h.kafka.KeepControl()
		if !dead.Load() {
			return nil, nil, false
		}
		leaderless.SetVersion(request.GetVersion())
		return leaderless, nil, true
	})
	h.run(t)
	for version := range int64(2) {
		alive, gone := keysOf(h.topic, version)
		h.lost = append(h.lost, h.commit(t, version+1, gone...)...)
		require.Eventually(t, func() bool { return h.count(t) == len(h.lost) }, patience, 10*time.Millisecond, "taken for an outage")
		h.requireArrival(t, h.commit(t, version+1, alive...))
	}
	h.requireWaiting(t)
	dead.Store(false)
	h.requireAll(t)
}

// twoPartitions is a topic with two partitions, each led by a broker of its own,
// and a relay.
type twoPartitions struct {
	kafka     *kfake.Cluster
	topic     string
	db        *pgxpool.Pool
	schema    string
	rec       *outbox.Recorder
	reader    *oracle.Reader
	log       *testenv.Buffer
	opened    atomic.Int32 // times of the breaker
	committed map[string]struct{}
	lost      []oracle.Event // committed for the dead partition
}

func newTwoPartitions(t *testing.T) *twoPartitions {
	ctx := t.Context()
	h := &twoPartitions{topic: "partition-" + uuid.NewString(), log: new(testenv.Buffer), committed: map[string]struct{}{}}
	kafka, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(2, h.topic))
	require.NoError(t, err)
	t.Cleanup(kafka.Close)
	h.kafka = kafka
	for n := range int32(2) {
		require.NoError(t, kafka.MoveTopicPartition(h.topic, n, n))
	}
	h.db, h.schema = testenv.Schema(t)
	require.NoError(t, outbox.Migrate(ctx, h.db, outbox.MigrateConfig{Schema: h.schema}))
	registry, err := outbox.NewRegistry("faults", outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(h.topic))
	require.NoError(t, err)
	h.rec, err = outbox.NewRecorder(registry, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
	h.reader, err = oracle.Follow(ctx, kafka.ListenAddrs(), h.topic, nil)
	require.NoError(t, err)
	return h
}

// run runs a relay until the test ends.
func (h *twoPartitions) run(t *testing.T) {
	relay, err := outbox.NewRelay(h.db, []kgo.Opt{kgo.SeedBrokers(h.kafka.ListenAddrs()...), kgo.MetadataMinAge(50 * time.Millisecond)}, outbox.RelayConfig{
		Schema: h.schema, PollInterval: 10 * time.Millisecond, DeliveryTimeout: time.Second, SendTimeout: 2 * time.Second,
		RetryInterval: 100 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(h.log, nil)),
		Hooks: outbox.RelayHooks{Breaker: func(_, to outbox.BreakerState) {
			if to == outbox.BreakerOpen {
				h.opened.Add(1)
			}
		}},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
}

// commit records an event for each key in one transaction.
func (h *twoPartitions) commit(t *testing.T, version int64, keys ...string) (events []oracle.Event) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), h.db, func(tx pgx.Tx) error {
		for _, key := range keys {
			e := oracle.Event{ID: uuid.NewString(), Key: key, Version: version}
			events = append(events, e)
			h.committed[e.ID] = struct{}{}
			if err := h.rec.Record(t.Context(), tx, e); err != nil {
				return err
			}
		}
		return nil
	}))
	return events
}

// count returns the number of events that wait.
func (h *twoPartitions) count(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(t.Context(), h.sql(`SELECT count(*) FROM %s.outbox_failed`)).Scan(&n))
	return n
}

func (h *twoPartitions) sql(query string) string {
	return fmt.Sprintf(query, pgx.Identifier{h.schema}.Sanitize())
}

func (h *twoPartitions) requireArrival(t *testing.T, events []oracle.Event) {
	t.Helper()
	for _, e := range events {
		require.Eventually(t, func() bool { return h.reader.Has(e.ID) }, patience, time.Millisecond, "held up")
	}
}

// requireWaiting says that the events for the dead partition wait, that no try
// was counted, and that nobody mistook it for an outage of Kafka.
func (h *twoPartitions) requireWaiting(t *testing.T) {
	t.Helper()
	for _, e := range h.lost {
		require.False(t, h.reader.Has(e.ID))
	}
	require.Zero(t, h.opened.Load(), "the breaker opened for all")
	var retries int
	require.NoError(t, h.db.QueryRow(t.Context(), h.sql(`SELECT max(retry_count) FROM %s.outbox_failed`)).Scan(&retries))
	require.Zero(t, retries)
	require.Equal(t, 1, strings.Count(h.log.String(), "partition "+h.topic+"/1 fails"))
	require.NotContains(t, h.log.String(), "Kafka fails")
}

// requireAll says that everything arrives, in order.
func (h *twoPartitions) requireAll(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return h.reader.Missing(h.committed) == 0 }, patience, 10*time.Millisecond)
	arrived, err := h.reader.Arrived()
	require.NoError(t, err)
	var v oracle.Verdict
	v.Judge(h.committed, arrived)
	require.Zero(t, v.Lost+v.Phantom+v.Inversions, "%s", v)
	require.Eventually(t, func() bool {
		return strings.Count(h.log.String(), "partition "+h.topic+"/1 works again") == 1
	}, patience, 10*time.Millisecond)
}

// withoutLeader returns what Kafka says of the topic when partition 1 has no leader.
func (h *twoPartitions) withoutLeader(t *testing.T) *kmsg.MetadataResponse {
	client, err := kgo.NewClient(kgo.SeedBrokers(h.kafka.ListenAddrs()...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = &h.topic
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(t.Context(), client)
	require.NoError(t, err)
	for i := range response.Topics[0].Partitions {
		if p := &response.Topics[0].Partitions[i]; p.Partition == 1 {
			p.Leader, p.ErrorCode = -1, kerr.LeaderNotAvailable.Code
		}
	}
	return response
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
