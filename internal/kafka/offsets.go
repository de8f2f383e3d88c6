package kafka

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// TopicID is what Kafka knows a topic by. One that is deleted and created again has
// another. It is zero for brokers before Kafka 2.8.
type TopicID = [16]byte

// What [ListOffsets] is asked for in place of a timestamp.
const (
	FirstOffset = -2
	EndOffset   = -1
)

// Isolation says which end of a partition [ListOffsets] returns.
type Isolation int8

const (
	// Uncommitted is the end behind all records, those of open transactions included.
	Uncommitted Isolation = iota
	// Committed is the end up to which a client that reads committed records can read.
	Committed
)

// ListOffsets asks Kafka for the first offset, the end, or the offset of the first record
// at or after a time in milliseconds, of each of some partitions. It returns those that it
// gets with the errors of the others. The offset is -1 if no record is as young.
func ListOffsets(ctx context.Context, client *kgo.Client, isolation Isolation, wanted map[Partition]int64) (map[Partition]int64, error) {
	found, err := ListEpochOffsets(ctx, client, isolation, wanted)
	offsets := make(map[Partition]int64, len(found))
	for at, offset := range found {
		offsets[at] = offset.Offset
	}
	return offsets, err
}

// ListEpochOffsets is [ListOffsets] with epochs: that of the leader for an end, and otherwise that of the record at the
// offset. It is -1 if Kafka does not know it.
func ListEpochOffsets(ctx context.Context, client *kgo.Client, isolation Isolation, wanted map[Partition]int64) (map[Partition]kgo.EpochOffset, error) {
	found := map[Partition]kgo.EpochOffset{}
	if len(wanted) == 0 {
		return found, nil
	}
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID, request.IsolationLevel = -1, int8(isolation)
	topics := map[string]int{}
	for p, at := range wanted {
		i, ok := topics[p.Topic]
		if !ok {
			i = len(request.Topics)
			topics[p.Topic] = i
			request.Topics = append(request.Topics, kmsg.ListOffsetsRequestTopic{Topic: p.Topic})
		}
		one := kmsg.NewListOffsetsRequestTopicPartition()
		one.Partition, one.Timestamp = p.Number, at
		request.Topics[i].Partitions = append(request.Topics[i].Partitions, one)
	}
	response, err := request.RequestWith(ctx, client) // with an error of one broker come the answers of the others
	if response == nil {
		response = new(kmsg.ListOffsetsResponse)
	}
	var errs []error
	if err != nil {
		errs = append(errs, fmt.Errorf("list offsets: %w", err))
	}
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			at := Partition{t.Topic, p.Partition}
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				errs = append(errs, fmt.Errorf("offsets of %v: %w", at, err))
				continue
			}
			found[at] = kgo.EpochOffset{Epoch: p.LeaderEpoch, Offset: p.Offset}
		}
	}
	return found, errors.Join(errs...)
}
