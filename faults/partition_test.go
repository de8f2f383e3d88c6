package faults

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
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
	testenv.Long(t)
	t.Parallel()
	h := newTwoPartitions(t)
	var dead atomic.Bool
	dead.Store(true)
	h.kafka.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		h.kafka.KeepControl()
		if h.kafka.CurrentNode() != 1 || !dead.Load() {
			return nil, nil, false
		}
		return testenv.NotLeader(request.(*kmsg.ProduceRequest)), nil, true
	})
	h.run(t)
	for version := range int64(6) {
		alive, gone := keysOf(h.topic, version)
		events := h.commitTo(t, version+1, append(alive, gone...)...)
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
	testenv.Long(t)
	t.Parallel()
	h := newTwoPartitions(t)
	leaderless := h.withoutLeader(t)
	var dead atomic.Bool
	dead.Store(true)
	h.kafka.ControlKey(int16(kmsg.Metadata), func(request kmsg.Request) (kmsg.Response, error, bool) {
		h.kafka.KeepControl()
		if !dead.Load() {
			return nil, nil, false
		}
		return testenv.AnswerMetadata(request, leaderless), nil, true
	})
	h.run(t)
	for version := range int64(2) {
		alive, gone := keysOf(h.topic, version)
		h.lost = append(h.lost, h.commitTo(t, version+1, gone...)...)
		require.Eventually(t, func() bool { return h.countFailed(t, "true") == len(h.lost) }, testenv.Patience, 10*time.Millisecond, "taken for an outage")
		h.requireArrival(t, h.commitTo(t, version+1, alive...))
	}
	h.requireWaiting(t)
	dead.Store(false)
	h.requireAll(t)
}

// twoPartitions is a topic with two partitions, each led by a broker of its own,
// and what is committed for it.
type twoPartitions struct {
	*site
	kafka     *kfake.Cluster
	log       warnings
	committed map[string]struct{}
	lost      []oracle.Event // committed for the dead partition
}

func newTwoPartitions(t *testing.T) *twoPartitions {
	t.Helper()
	topic := "faults-" + uuid.NewString()
	kafka := fakeKafka(t, kfake.NumBrokers(2), kfake.SeedTopics(2, topic))
	for n := range int32(2) {
		require.NoError(t, kafka.MoveTopicPartition(topic, n, n))
	}
	return &twoPartitions{site: guest(t, kafka.ListenAddrs(), topic), kafka: kafka, committed: map[string]struct{}{}}
}

// run runs a relay until the test ends.
func (h *twoPartitions) run(t *testing.T) {
	t.Helper()
	run(t, h.relayPool(t), fakeOpts(h.kafka), shortly(t, &h.log))
}

// commitTo records an event for each key in one transaction.
func (h *twoPartitions) commitTo(t *testing.T, version int64, keys ...string) []oracle.Event {
	t.Helper()
	events := make([]oracle.Event, len(keys))
	for i, key := range keys {
		events[i] = oracle.Event{ID: uuid.NewString(), Key: key, Version: version}
		h.committed[events[i].ID] = struct{}{}
	}
	h.add(t, events...)
	return events
}

// requireWaiting requires that the events for the dead partition wait, that no try was counted, and
// that no relay mistook it for an outage of Kafka.
func (h *twoPartitions) requireWaiting(t *testing.T) {
	t.Helper()
	for _, e := range h.lost {
		require.False(t, h.reader.Has(e.ID))
	}
	require.Zero(t, h.countFailed(t, `retry_count > 0 OR status NOT IN ('waiting', 'parked')`))
	require.Equal(t, "outbox: partition "+h.topic+"/1 fails, trying until it works", h.log.String())
}

// requireAll says that everything arrives, in order, and that nothing else failed.
func (h *twoPartitions) requireAll(t *testing.T) {
	t.Helper()
	h.requireRecovery(t, h.committed)
	h.log.requireOutages(t, "partition "+h.topic+"/1", 1)
	require.Len(t, h.log.changes(t), 1, "%s", &h.log)
}

// withoutLeader returns what Kafka says of the topic when partition 1 has no leader.
func (h *twoPartitions) withoutLeader(t *testing.T) *kmsg.MetadataResponse {
	request := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = &h.topic
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(t.Context(), h.admin(t))
	require.NoError(t, err)
	testenv.LoseLeader(&response.Topics[0], 1)
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

// A topic has too few replicas in sync, and its event comes alone, so that nothing of its
// batch gets through. Other topics wait for it once; then its events are not tried any
// more, and a relay stops at once. The options of the client are those of franz-go.
func TestTopicWithoutReplicas(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	topic, blocked := "faults-"+uuid.NewString(), "faults-"+uuid.NewString()
	kafka := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(3, topic, blocked))
	fault := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: blocked, Err: kerr.NotEnoughReplicas, Count: -1})
	s := guest(t, kafka.ListenAddrs(), topic)
	other := s.sideBySide(t, blocked)
	log := new(warnings)
	cfg := shortly(t, log)
	stop := run(t, s.relayPool(t), []kgo.Opt{kgo.SeedBrokers(kafka.ListenAddrs()...)}, cfg)
	s.requireArrival(t, s.commit(t, "on", 1))

	lost := other.commit(t, "on", 1)
	time.Sleep(100 * time.Millisecond) // it is on its way, alone
	began := time.Now()
	s.requireArrival(t, s.commit(t, "on", 5))
	require.Less(t, time.Since(began), cfg.DeliveryTimeout+3*time.Second)
	for range 5 {
		lost = append(lost, other.commit(t, "on", 5)...)
		began := time.Now()
		s.requireArrival(t, s.commit(t, "on", 5))
		require.Less(t, time.Since(began), time.Second, "others waited")
	}
	require.Eventually(t, func() bool {
		return s.countFailed(t, `status IN ('waiting', 'parked') AND retry_count = 0`) == len(lost)
	},
		testenv.Patience, 10*time.Millisecond)
	began = time.Now()
	stop()
	require.Less(t, time.Since(began), 2*time.Second, "the stop waited for a probe")

	run(t, s.relayPool(t), []kgo.Opt{kgo.SeedBrokers(kafka.ListenAddrs()...)}, cfg)
	fault.Remove()
	other.requireArrival(t, lost)
	require.Eventually(t, func() bool { return s.countFailed(t, `status <> 'resolved'`) == 0 }, testenv.Patience, 10*time.Millisecond)
	require.NotContains(t, log.String(), "outbox: Kafka fails")
}
