package absent

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Block gives partitions of a topic of a single broker a second replica, on the broker that is not there. If
// min.insync.replicas of the topic is 2, these partitions accept nothing until [Unblock]. The controller must be
// reachable from here.
func Block(ctx context.Context, brokers []string, topic string, partitions []int32) error {
	if err := assign(ctx, brokers, topic, partitions, ID); err != nil {
		return fmt.Errorf("absent: block partitions of %s: %w", topic, err)
	}
	return nil
}

// Unblock leaves partitions with the replica on the broker that is there, which is then all that
// min.insync.replicas can ask for. Partitions that are not blocked stay as they are.
func Unblock(ctx context.Context, brokers []string, topic string, partitions []int32) error {
	if err := assign(ctx, brokers, topic, partitions); err != nil {
		return fmt.Errorf("absent: unblock partitions of %s: %w", topic, err)
	}
	return nil
}

// assign assigns partitions to the broker that is there, and to others.
func assign(ctx context.Context, brokers []string, topic string, partitions []int32, others ...int32) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return err
	}
	defer client.Close()
	here, err := register(ctx, client)
	if err != nil {
		return fmt.Errorf("register a broker: %w", err)
	}
	t := kmsg.NewAlterPartitionAssignmentsRequestTopic()
	t.Topic = topic
	for _, n := range partitions {
		p := kmsg.NewAlterPartitionAssignmentsRequestTopicPartition()
		p.Partition, p.Replicas = n, append([]int32{here}, others...)
		t.Partitions = append(t.Partitions, p)
	}
	request := kmsg.NewPtrAlterPartitionAssignmentsRequest()
	request.Topics = append(request.Topics, t)
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	errs := []error{kerr.ErrorForCode(response.ErrorCode)}
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				errs = append(errs, fmt.Errorf("partition %d: %w", p.Partition, err))
			}
		}
	}
	return errors.Join(errs...)
}
