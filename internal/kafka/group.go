package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/check"
)

// CheckGroupIsEmpty returns [kerr.NonEmptyGroup] if a group has members.
func CheckGroupIsEmpty(ctx context.Context, client *kgo.Client, group string) error {
	classic := kmsg.NewPtrDescribeGroupsRequest()
	classic.Groups = []string{group}
	response, err := classic.RequestWith(ctx, client)
	if err != nil {
		return fmt.Errorf("describe group: %w", err)
	}
	members := 0
	for _, g := range response.Groups {
		if err := kerr.ErrorForCode(g.ErrorCode); err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
			return fmt.Errorf("describe group: %w", err)
		}
		members += len(g.Members)
	}
	next := kmsg.NewPtrConsumerGroupDescribeRequest() // of KIP-848
	next.Groups = []string{group}
	if described, err := next.RequestWith(ctx, client); err == nil { // else the broker knows no such groups
		for _, g := range described.Groups {
			members += len(g.Members)
		}
	}
	if members > 0 {
		return fmt.Errorf("%d members: %w", members, kerr.NonEmptyGroup)
	}
	return nil
}

// AllGroupOffsets asks Kafka for all committed offsets of a group. One that is committed for a topic that was deleted
// and created again is NoOffset: the group begins as if it had none.
func AllGroupOffsets(ctx context.Context, client *kgo.Client, group string) (map[Partition]int64, error) {
	found, err := fetchGroupOffsets(ctx, client, group, nil)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, nil
	}
	ids, cluster, err := describe(ctx, client, found)
	if ids == nil {
		return nil, err
	}
	offsets := make(map[Partition]int64, len(found))
	for at, offset := range found {
		offsets[at] = offset.At
		if offset.IsOfDeleted(ids[at.Topic], cluster) {
			offsets[at] = NoOffset
		}
	}
	return offsets, nil
}

// GroupOffset is a committed offset of a group.
type GroupOffset struct {
	At       int64
	Metadata string // of the member that has committed it
}

// GroupOffsets asks Kafka for the committed offsets of a group in some partitions, by
// topic. A partition without one is not in the result.
func GroupOffsets(ctx context.Context, client *kgo.Client, group string, wanted map[string][]int32) (map[Partition]GroupOffset, error) {
	if len(wanted) == 0 { // which Kafka would understand as all
		return nil, nil
	}
	return fetchGroupOffsets(ctx, client, group, wanted)
}

func fetchGroupOffsets(ctx context.Context, client *kgo.Client, group string, wanted map[string][]int32) (map[Partition]GroupOffset, error) {
	request := kmsg.NewPtrOffsetFetchRequest()
	one := kmsg.NewOffsetFetchRequestGroup()
	request.Group, one.Group = group, group
	for topic, numbers := range wanted {
		request.Topics = append(request.Topics, kmsg.OffsetFetchRequestTopic{Topic: topic, Partitions: numbers})
		one.Topics = append(one.Topics, kmsg.OffsetFetchRequestGroupTopic{Topic: topic, Partitions: numbers})
	}
	request.Groups = append(request.Groups, one)
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("fetch offsets: %w", err)
	}
	found, err := OffsetsIn(response)
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return nil, fmt.Errorf("fetch offsets: %w", err)
	}
	return found, nil
}

// OffsetsIn returns the committed offsets in an answer, with the errors of the other partitions.
func OffsetsIn(response *kmsg.OffsetFetchResponse) (map[Partition]GroupOffset, error) {
	found := map[Partition]GroupOffset{}
	errs := []error{kerr.ErrorForCode(response.ErrorCode)}
	add := func(topic string, number int32, offset int64, metadata *string, code int16) {
		if err := kerr.ErrorForCode(code); err != nil {
			errs = append(errs, fmt.Errorf("%v: %w", Partition{topic, number}, err))
		} else if offset >= 0 {
			committed := GroupOffset{At: offset}
			if metadata != nil {
				committed.Metadata = *metadata
			}
			found[Partition{topic, number}] = committed
		}
	}
	for _, t := range response.Topics { // of brokers before Kafka 3.0
		for _, p := range t.Partitions {
			add(t.Topic, p.Partition, p.Offset, p.Metadata, p.ErrorCode)
		}
	}
	for _, g := range response.Groups {
		errs = append(errs, kerr.ErrorForCode(g.ErrorCode))
		for _, t := range g.Topics {
			for _, p := range t.Partitions {
				add(t.Topic, p.Partition, p.Offset, p.Metadata, p.ErrorCode)
			}
		}
	}
	return found, errors.Join(errs...)
}

// CommitGroupOffsets commits offsets of a group without members. Kafka refuses it with
// [kerr.UnknownMemberID] if there are some.
func CommitGroupOffsets(ctx context.Context, client *kgo.Client, group string, offsets map[Partition]int64) error {
	request := kmsg.NewPtrOffsetCommitRequest()
	request.Group = group
	ids, cluster, err := describe(ctx, client, offsets)
	if err != nil {
		return err
	}
	names := map[TopicID]string{} // newer brokers answer with ids only
	for topic, id := range ids {
		names[id] = topic
		t := kmsg.NewOffsetCommitRequestTopic()
		t.Topic, t.TopicID = topic, id
		for p, offset := range offsets {
			if p.Topic == topic {
				one := kmsg.NewOffsetCommitRequestTopicPartition()
				one.Partition, one.Offset, one.Metadata = p.Number, offset, OffsetName(id, cluster)
				t.Partitions = append(t.Partitions, one)
			}
		}
		request.Topics = append(request.Topics, t)
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return fmt.Errorf("commit offsets: %w", err)
	}
	var errs []error
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				errs = append(errs, fmt.Errorf("commit offset of %v: %w", Partition{cmp.Or(t.Topic, names[t.TopicID]), p.Partition}, err))
			}
		}
	}
	return errors.Join(errs...)
}

// TopicIDs asks Kafka for the ids of the topics of partitions.
func TopicIDs[V any](ctx context.Context, client *kgo.Client, of map[Partition]V) (map[string]TopicID, error) {
	ids, _, err := describe(ctx, client, of)
	return ids, err
}

// describe returns the ids of the topics of partitions, and that of the cluster. The error names the topics that Kafka
// does not describe; the ids of the others are returned with it. They are nil if Kafka does not answer.
func describe[V any](ctx context.Context, client *kgo.Client, of map[Partition]V) (ids map[string]TopicID, cluster string, err error) {
	names := map[string]bool{}
	for p := range of {
		names[p.Topic] = true
	}
	response, err := Metadata(ctx, client, slices.Collect(maps.Keys(names))...)
	if err != nil {
		return nil, "", fmt.Errorf("describe topics: %w", err)
	}
	if response.ClusterID != nil {
		cluster = *response.ClusterID
	}
	ids = map[string]TopicID{}
	var errs []error
	for _, t := range response.Topics {
		if t.Topic == nil {
			continue
		}
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			errs = append(errs, fmt.Errorf("describe topic %s: %w", *t.Topic, err))
			continue
		}
		ids[*t.Topic] = t.TopicID
	}
	return ids, cluster, errors.Join(errs...)
}

// PartitionsOf asks Kafka for the partitions of topics. A topic that does not exist has none, and neither has a name
// that Kafka does not take: it is not sent. The error names the topics that Kafka does not describe; the partitions of
// the others are returned with it.
func PartitionsOf(ctx context.Context, client *kgo.Client, topics []string) (all []Partition, err error) {
	topics = slices.DeleteFunc(slices.Clone(topics), func(name string) bool { return check.Topic(name) != nil })
	if len(topics) == 0 { // which Kafka would understand as all
		return nil, nil
	}
	response, err := Metadata(ctx, client, topics...)
	if err != nil {
		return nil, fmt.Errorf("describe topics: %w", err)
	}
	var errs []error
	for _, t := range response.Topics {
		if t.Topic == nil {
			continue
		}
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			if !errors.Is(err, kerr.UnknownTopicOrPartition) {
				errs = append(errs, fmt.Errorf("describe topic %s: %w", *t.Topic, err))
			}
			continue
		}
		for _, p := range t.Partitions {
			all = append(all, Partition{*t.Topic, p.Partition})
		}
	}
	return all, errors.Join(errs...)
}
