package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
)

// bothTopics are the relay's and the plain producer's. Each change is made to both, so that a
// partition of one has the same brokers as that of the other.
func (s *brokersSite) bothTopics() []string { return []string{s.topic, s.plainTopic} }

// createTopics creates both topics. Brokers stamp their records, so that those of several
// partitions have an order.
func (s *brokersSite) createTopics(t *testing.T) {
	t.Helper()
	stamps := "LogAppendTime"
	request := kmsg.NewPtrCreateTopicsRequest()
	for _, name := range s.bothTopics() {
		topic := kmsg.NewCreateTopicsRequestTopic()
		topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, -1, -1 // as assigned
		topic.Configs = []kmsg.CreateTopicsRequestTopicConfig{{Name: "message.timestamp.type", Value: &stamps}}
		for p := range int32(firstPartitions) {
			ids := s.kafka.IDs()
			leader := int(p) % len(ids)
			topic.ReplicaAssignment = append(topic.ReplicaAssignment, kmsg.CreateTopicsRequestTopicReplicaAssignment{
				Partition: p, Replicas: slices.Concat(ids[leader:], ids[:leader]),
			})
		}
		request.Topics = append(request.Topics, topic)
	}
	response, err := request.RequestWith(s.ctx, s.manager)
	require.NoError(t, err)
	for _, topic := range response.Topics {
		require.NoError(t, kerr.ErrorForCode(topic.ErrorCode))
	}
	s.heal(t)
}

// heal waits until all brokers are there and all replicas of both topics are in sync.
func (s *brokersSite) heal(t *testing.T) {
	t.Helper()
	var missing string
	require.True(t, s.await(t, stall, func() bool {
		missing = s.missing()
		return missing == ""
	}), "the cluster is not whole: %s", missing)
}

// missing tells what the cluster lacks, or returns "".
func (s *brokersSite) missing() string {
	found, err := s.describe()
	switch {
	case err != nil:
		return err.Error()
	case len(found.Brokers) < len(s.kafka.IDs()):
		return fmt.Sprintf("%d brokers are there", len(found.Brokers))
	}
	for _, topic := range found.Topics {
		if err := kerr.ErrorForCode(topic.ErrorCode); err != nil {
			return fmt.Sprintf("%s: %v", *topic.Topic, err)
		}
		for _, p := range topic.Partitions {
			if p.Leader < 0 || len(p.ISR) < len(p.Replicas) {
				return fmt.Sprintf("%s/%d has the leader %d, and %v of %v are in sync", *topic.Topic, p.Partition, p.Leader, p.ISR, p.Replicas)
			}
		}
	}
	return ""
}

// describe returns what a broker knows of both topics.
func (s *brokersSite) describe() (*kmsg.MetadataResponse, error) {
	ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
	defer cancel()
	return kafka.Metadata(ctx, s.manager, s.bothTopics()...)
}

// leading returns the broker that leads most partitions of both topics.
func (s *brokersSite) leading(t *testing.T) (id int32) {
	t.Helper()
	found, err := s.describe()
	require.NoError(t, err)
	leads := map[int32]int{}
	for _, topic := range found.Topics {
		for _, p := range topic.Partitions {
			leads[p.Leader]++
		}
	}
	for _, other := range s.kafka.IDs() {
		if id == 0 || leads[other] > leads[id] {
			id = other
		}
	}
	return id
}

// controller waits until there is one.
func (s *brokersSite) controller(t *testing.T) (id int32) {
	t.Helper()
	var err error
	require.True(t, s.await(t, stall, func() bool {
		id, err = s.kafka.Controller(s.ctx)
		return err == nil
	}), "%v", err)
	return id
}

// coordinator returns the broker that coordinates a group (kind 0) or a transactional id (1).
func (s *brokersSite) coordinator(t *testing.T, kind int8) int32 {
	t.Helper()
	request := kmsg.NewPtrFindCoordinatorRequest()
	request.CoordinatorType, request.CoordinatorKeys = kind, []string{s.topic}
	response, err := request.RequestWith(s.ctx, s.manager)
	require.NoError(t, err)
	require.Len(t, response.Coordinators, 1)
	require.NoError(t, kerr.ErrorForCode(response.Coordinators[0].ErrorCode))
	return response.Coordinators[0].NodeID
}

// partitionCount returns how many partitions each topic has.
func (s *brokersSite) partitionCount(t *testing.T) int {
	t.Helper()
	found, err := s.describe()
	require.NoError(t, err)
	require.Len(t, found.Topics[0].Partitions, len(found.Topics[1].Partitions))
	return len(found.Topics[0].Partitions)
}

// choose returns brokers in random order. The first is the one that is to lead.
func (s *brokersSite) choose(rng *rand.Rand, n int) []int32 {
	ids := s.kafka.IDs()
	rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids[:n]
}

// alterAssignments gives each partition other brokers, and waits until they have it.
func (s *brokersSite) alterAssignments(t *testing.T, rng *rand.Rand, replicas int) {
	t.Helper()
	var partitions []kmsg.AlterPartitionAssignmentsRequestTopicPartition
	for n := range s.partitionCount(t) {
		p := kmsg.NewAlterPartitionAssignmentsRequestTopicPartition()
		p.Partition, p.Replicas = int32(n), s.choose(rng, replicas)
		partitions = append(partitions, p)
	}
	request := kmsg.NewPtrAlterPartitionAssignmentsRequest()
	for _, name := range s.bothTopics() {
		topic := kmsg.NewAlterPartitionAssignmentsRequestTopic()
		topic.Topic, topic.Partitions = name, partitions
		request.Topics = append(request.Topics, topic)
	}
	response, err := request.RequestWith(s.ctx, s.manager)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.ErrorCode))
	for _, topic := range response.Topics {
		for _, p := range topic.Partitions {
			require.NoError(t, kerr.ErrorForCode(p.ErrorCode), "%s/%d", topic.Topic, p.Partition)
		}
	}
	require.True(t, s.await(t, stall, func() bool { return s.missing() == "" && s.haveReplicas(replicas) }), "the reassignment does not end")
}

func (s *brokersSite) haveReplicas(n int) bool {
	found, err := s.describe()
	if err != nil {
		return false
	}
	for _, topic := range found.Topics {
		for _, p := range topic.Partitions {
			if len(p.Replicas) != n {
				return false
			}
		}
	}
	return true
}

// electLeaders makes the first replica of each partition its leader.
func (s *brokersSite) electLeaders(t *testing.T) {
	t.Helper()
	response, err := kmsg.NewPtrElectLeadersRequest().RequestWith(s.ctx, s.manager)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.ErrorCode))
	for _, topic := range response.Topics {
		for _, p := range topic.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				require.ErrorIs(t, err, kerr.ElectionNotNeeded, "%s/%d", topic.Topic, p.Partition)
			}
		}
	}
}

// createPartitions adds partitions to each topic and returns how many the topics have then.
func (s *brokersSite) createPartitions(t *testing.T, rng *rand.Rand, more int) (count int) {
	t.Helper()
	count = s.partitionCount(t) + more
	var assignment []kmsg.CreatePartitionsRequestTopicAssignment
	for range more {
		assignment = append(assignment, kmsg.CreatePartitionsRequestTopicAssignment{Replicas: s.choose(rng, len(s.kafka.IDs()))})
	}
	request := kmsg.NewPtrCreatePartitionsRequest()
	for _, name := range s.bothTopics() {
		topic := kmsg.NewCreatePartitionsRequestTopic()
		topic.Topic, topic.Count, topic.Assignment = name, int32(count), assignment
		request.Topics = append(request.Topics, topic)
	}
	response, err := request.RequestWith(s.ctx, s.manager)
	require.NoError(t, err)
	for _, topic := range response.Topics {
		require.NoError(t, kerr.ErrorForCode(topic.ErrorCode), topic.Topic)
	}
	require.True(t, s.await(t, stall, func() bool {
		found, err := s.describe()
		return err == nil && len(found.Topics[0].Partitions) == count && len(found.Topics[1].Partitions) == count
	}), "the partitions do not appear")
	return count
}
