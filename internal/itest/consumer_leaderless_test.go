package itest

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	kafkaclient "github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// leaderlessFixture is twoTopics on a broker that says that some partitions have no leader.
type leaderlessFixture struct {
	*twoTopics
	cluster *kfake.Cluster
	answer  atomic.Pointer[kmsg.MetadataResponse] // in place of the broker's, unless it is nil
}

// newLeaderlessFixture has a topic with one partition, and another one with two.
func newLeaderlessFixture(t *testing.T) *leaderlessFixture {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	s := &leaderlessFixture{cluster: cluster, twoTopics: &twoTopics{startFixture: &startFixture{log: new(testenv.Buffer), seen: map[string]int{}}}}
	s.consumerFixture = newConsumerFixtureOn(t, func(h *relayFixture) { h.brokers = cluster.ListenAddrs() })
	s.group, s.other = "start-"+s.topic, s.topic+".refunds"
	for topic, partitions := range map[string]int32{s.topic: 1, s.other: 2, s.topic + ".dlq": 1, s.other + ".dlq": 1} {
		testenv.CreateTopic(t, s.brokers, topic, partitions)
	}
	s.admin, err = kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	t.Cleanup(s.admin.Close)
	cluster.ControlKey(int16(kmsg.Metadata), s.describe)
	return s
}

// describe is a control of the broker.
func (s *leaderlessFixture) describe(r kmsg.Request) (kmsg.Response, error, bool) {
	s.cluster.KeepControl()
	all := s.answer.Load()
	if all == nil {
		return nil, nil, false
	}
	return testenv.AnswerMetadata(r, all), nil, true
}

// loseLeader takes the leader from a partition until restore.
func (s *leaderlessFixture) loseLeader(t *testing.T, lost kafkaclient.Partition) {
	t.Helper()
	s.answer.Store(nil)
	all, err := kafkaclient.Metadata(background, s.admin, s.topic, s.other, s.topic+".dlq", s.other+".dlq")
	require.NoError(t, err)
	for i := range all.Topics {
		if topic := &all.Topics[i]; *topic.Topic == lost.Topic {
			testenv.LoseLeader(topic, lost.Number)
		}
	}
	s.answer.Store(all)
}

func (s *leaderlessFixture) restore() { s.answer.Store(nil) }

// A partition of a topic that the group has not listed has no leader. That delays no other topic, and the topic is read
// from its beginning once the partition has one.
func TestNewTopicWithoutLeader(t *testing.T) {
	t.Parallel()
	s := newLeaderlessFixture(t)
	s.loseLeader(t, kafkaclient.Partition{Topic: s.other, Number: 1})
	c := s.run(t, kgo.MetadataMinAge(50*time.Millisecond))
	s.requireSeen(t, s.put(t, 0, 3)...)
	requireNoWork(t, c, "topic "+s.other+" has been failing")
	refunds := s.refunds(t, 3)
	s.requireSeen(t, s.put(t, 0, 3)...)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 6 }, testenv.Patience, 10*time.Millisecond)
	s.restore()
	s.requireSeen(t, append(refunds, s.put(t, 0, 3)...)...)
	require.Eventually(t, func() bool { return c.Health().Works }, testenv.Patience, 10*time.Millisecond)
}

// A partition that was added to a topic has no leader. That delays no other partition of the topic.
func TestAddedPartitionWithoutLeader(t *testing.T) {
	t.Parallel()
	s := newLeaderlessFixture(t)
	stop := s.startFixture.run(t, outbox.ConsumerConfig{})
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	stop()
	s.addPartitions(t, 2)
	added := s.put(t, 1, 3)
	s.loseLeader(t, kafkaclient.Partition{Topic: s.topic, Number: 1})
	s.startFixture.run(t, outbox.ConsumerConfig{}, kgo.MetadataMinAge(50*time.Millisecond))
	s.requireSeen(t, s.put(t, 0, 3)...)
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 3 }, testenv.Patience, 10*time.Millisecond)
	s.restore()
	s.requireSeen(t, added...)
}

// The same while a member reads the topic: it goes on with the partitions that it has.
func TestPartitionWithoutLeaderAddedToMember(t *testing.T) {
	t.Parallel()
	for name, opts := range groupProtocols {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newLeaderlessFixture(t)
			s.startFixture.run(t, outbox.ConsumerConfig{}, append(opts, kgo.MetadataMinAge(50*time.Millisecond))...)
			require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
			s.addPartitions(t, 2)
			added := s.put(t, 1, 3)
			s.loseLeader(t, kafkaclient.Partition{Topic: s.topic, Number: 1})
			s.requireLogged(t, "LEADER_NOT_AVAILABLE")
			s.requireSeen(t, s.put(t, 0, 3)...)
			require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 3 }, testenv.Patience, 10*time.Millisecond)
			s.restore()
			s.requireSeen(t, added...)
		})
	}
}

// The same without a database, where reading begins at the ends of the partitions.
func TestPartitionWithoutLeaderOrDatabase(t *testing.T) {
	t.Parallel()
	s := newLeaderlessFixture(t)
	s.addPartitions(t, 2)
	s.loseLeader(t, kafkaclient.Partition{Topic: s.topic, Number: 1})
	see := func(_ context.Context, _ sale, m outbox.Metadata) error { return s.see(m) }
	s.runPlain(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromEnd}}, see, kgo.MetadataMinAge(50*time.Millisecond))
	require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 0 }, testenv.Patience, 10*time.Millisecond)
	s.requireSeen(t, s.put(t, 0, 3)...)
	s.restore()
	require.Eventually(t, func() bool { return s.committed(t, s.group, 1) == 0 }, testenv.Patience, 10*time.Millisecond)
	s.requireSeen(t, append(s.put(t, 0, 3), s.put(t, 1, 3)...)...)
}
