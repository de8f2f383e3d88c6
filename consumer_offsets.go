package outbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
)

// commitOffsets commits and waits for the answer. The caller holds committing.
func (m *membership) commitOffsets(offsets map[string]map[int32]kgo.EpochOffset) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), commitTimeout)
	defer cancel()
	ctx = kgo.PreCommitFnContext(ctx, m.checkMember)
	m.client.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse, cerr error) {
		if err = cerr; err != nil {
			return // the response may be nil
		}
		for _, t := range response.Topics {
			for _, p := range t.Partitions {
				if err == nil {
					err = kerr.ErrorForCode(p.ErrorCode)
				}
			}
		}
	})
	return err
}

var errExpelled = errors.New("the group took this member for dead")

// checkMember refuses a commit that would put an offset back. A member that Kafka
// took for dead comes back under another name and learns only then that kafka.Partitions
// are with others; they may be further, and Kafka does not ask whose they are.
func (m *membership) checkMember(commit *kmsg.OffsetCommitRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if commit.MemberID != m.member {
		return errExpelled
	}
	return nil
}

// settleOffsets gives partitions that nobody has committed an offset for a place
// in numbers, and commits it before anything is read: a member that dies before
// its first commit would else leave nothing behind, and the next one begin later.
// If that fails, the client tries the whole again.
func (m *membership) settleOffsets(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	m.committing.Lock()
	defer m.committing.Unlock()
	open := map[string]map[int32]int64{}
	for topic, numbers := range offsets {
		for number, offset := range numbers {
			if at := offset.EpochOffset().Offset; at < 0 {
				put(open, topic, number, at) // -1 is the end and -2 the start, for both
			}
		}
	}
	if len(open) == 0 {
		return offsets, nil
	}
	found, err := listOffsets(ctx, m.client, open)
	if err != nil {
		return nil, err
	}
	places := map[string]map[int32]kgo.EpochOffset{}
	for topic, numbers := range found {
		for number, at := range numbers {
			put(places, topic, number, kgo.EpochOffset{Epoch: -1, Offset: at})
			offsets[topic][number] = kgo.NewOffset().At(at)
		}
	}
	if err := m.commitOffsets(places); err != nil {
		return nil, fmt.Errorf("commit first offsets: %w", err)
	}
	return offsets, nil
}

// put sets what belongs to a partition.
func put[V any](m map[string]map[int32]V, topic string, number int32, v V) {
	if m[topic] == nil {
		m[topic] = map[int32]V{}
	}
	m[topic][number] = v
}

// listOffsets asks Kafka where partitions have their end (-1) or start (-2), as a
// client that reads committed records sees it.
func listOffsets(ctx context.Context, client *kgo.Client, wanted map[string]map[int32]int64) (map[string]map[int32]int64, error) {
	request := kmsg.NewPtrListOffsetsRequest()
	request.IsolationLevel = 1
	for topic, numbers := range wanted {
		t := kmsg.NewListOffsetsRequestTopic()
		t.Topic = topic
		for number, place := range numbers {
			p := kmsg.NewListOffsetsRequestTopicPartition()
			p.Partition, p.Timestamp = number, place
			t.Partitions = append(t.Partitions, p)
		}
		request.Topics = append(request.Topics, t)
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("list offsets: %w", err)
	}
	found := map[string]map[int32]int64{}
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, fmt.Errorf("list offsets of %s: %w", kafka.Partition{Topic: t.Topic, Number: p.Partition}, err)
			}
			put(found, t.Topic, p.Partition, p.Offset)
		}
	}
	return found, nil
}
