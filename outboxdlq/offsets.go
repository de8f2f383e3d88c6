package outboxdlq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// offsetReader reads the committed records between two offsets. It sends its own fetch
// requests: a consuming client returns records only, so it does not tell that it is at
// the end of a partition if the last records there are of aborted transactions.
type offsetReader struct {
	client  *kgo.Client
	leaders map[kafka.Partition]leader
}

// leader is the broker that leads a partition, and the id by which it knows the topic.
type leader struct {
	broker int32
	topic  [16]byte
}

// span is the part of a partition that remains to be read: from next up to end.
type span struct {
	kafka.Partition
	next, end int64
}

const (
	fetchBytes      = 1 << 20 // of a partition at once; Kafka sends a larger batch whole
	fetchWait       = 500 * time.Millisecond
	fetchRetryPause = 100 * time.Millisecond
	// fetchTimeout bounds the wait for a partition that returns nothing before its end.
	fetchTimeout = 30 * time.Second

	// firstOffset and endOffset ask for the ends of a partition, in place of a
	// timestamp. readCommitted is an isolation level.
	firstOffset, endOffset = -2, -1
	readCommitted          = 1
)

var errNothingFetched = errors.New("the broker has nothing there")

// checkOffsets rejects offsets and partitions that cannot exist.
func checkOffsets(from map[int32]int64) error {
	for number, offset := range from {
		if number < 0 || offset < 0 {
			return fmt.Errorf("offset %d of partition %d to begin with: must not be negative", offset, number)
		}
	}
	return nil
}

// spans returns the spans of the partitions of a topic, from the given offsets to their
// ends now.
func (o *offsetReader) spans(ctx context.Context, topic string, from map[int32]int64) ([]span, error) {
	if err := o.askLeaders(ctx, topic); err != nil {
		return nil, err
	}
	firsts, err := o.offsets(ctx, topic, firstOffset)
	if err != nil {
		return nil, err
	}
	ends, err := o.offsets(ctx, topic, endOffset)
	if err != nil {
		return nil, err
	}
	for number := range from {
		if _, ok := ends[number]; !ok {
			return nil, fmt.Errorf("%v to begin with: %w", kafka.Partition{Topic: topic, Number: number}, kerr.UnknownTopicOrPartition)
		}
	}
	var spans []span
	for number, end := range ends {
		next := max(from[number], firsts[number]) // records before the first offset are deleted
		spans = append(spans, span{kafka.Partition{Topic: topic, Number: number}, min(next, end), end})
	}
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.Number, b.Number) })
	return spans, nil
}

// askLeaders asks Kafka which brokers lead the partitions of a topic.
func (o *offsetReader) askLeaders(ctx context.Context, topic string) error {
	response, err := kafka.Metadata(ctx, o.client, topic)
	if err != nil {
		return err
	}
	o.leaders = map[kafka.Partition]leader{}
	for _, t := range response.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			return fmt.Errorf("topic %s: %w", topic, err)
		}
		for _, p := range t.Partitions {
			o.leaders[kafka.Partition{Topic: topic, Number: p.Partition}] = leader{p.Leader, t.TopicID}
		}
	}
	return nil
}

// offsets returns the first or the end offset of each partition whose leader is known.
func (o *offsetReader) offsets(ctx context.Context, topic string, which int64) (map[int32]int64, error) {
	list := kmsg.NewListOffsetsRequestTopic()
	list.Topic = topic
	for p := range o.leaders {
		one := kmsg.NewListOffsetsRequestTopicPartition()
		one.Partition, one.Timestamp = p.Number, which
		list.Partitions = append(list.Partitions, one)
	}
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID, request.IsolationLevel = -1, readCommitted
	request.Topics = append(request.Topics, list)
	response, err := request.RequestWith(ctx, o.client)
	if err != nil {
		return nil, fmt.Errorf("offsets of %s: %w", topic, err)
	}
	offsets := map[int32]int64{}
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return nil, fmt.Errorf("offsets of %v: %w", kafka.Partition{Topic: topic, Number: p.Partition}, err)
			}
			offsets[p.Partition] = p.Offset
		}
	}
	return offsets, nil
}

// read returns the next records of a span, which may be none, and advances the span.
func (o *offsetReader) read(ctx context.Context, s *span) ([]*kgo.Record, error) {
	for start := time.Now(); ; {
		records, next, err := o.fetch(ctx, s.Partition, s.next)
		if next > s.next { // an error about later records comes again with the next read
			s.next = min(next, s.end)
			return slices.DeleteFunc(records, func(r *kgo.Record) bool { return r.Offset >= s.end }), nil
		}
		if err == nil {
			err = errNothingFetched
		}
		if isLasting(err) || time.Since(start) > fetchTimeout {
			return nil, fmt.Errorf("read %v at offset %d: %w", s.Partition, s.next, err)
		}
		if wait.Sleep(ctx, fetchRetryPause); ctx.Err() != nil {
			return nil, fmt.Errorf("read %v at offset %d: %w", s.Partition, s.next, context.Cause(ctx))
		}
		if err := o.askLeaders(ctx, s.Topic); err != nil && isLasting(err) {
			return nil, err
		}
	}
}

// isLasting reports whether a retry would return the same error.
func isLasting(err error) bool {
	var k *kerr.Error
	return errors.As(err, &k) && !k.Retriable
}

// fetch returns committed records of a partition from an offset on, and the offset
// behind the records that it has read, which include aborted ones.
func (o *offsetReader) fetch(ctx context.Context, p kafka.Partition, from int64) ([]*kgo.Record, int64, error) {
	leader := o.leaders[p]
	one := kmsg.NewFetchRequestTopicPartition()
	one.Partition, one.FetchOffset, one.PartitionMaxBytes = p.Number, from, fetchBytes
	topic := kmsg.NewFetchRequestTopic()
	topic.Topic, topic.TopicID = p.Topic, leader.topic // by its name, or by its id since Kafka 3.1
	topic.Partitions = append(topic.Partitions, one)
	request := kmsg.NewPtrFetchRequest()
	request.MaxWaitMillis, request.MinBytes, request.IsolationLevel = int32(fetchWait.Milliseconds()), 1, readCommitted
	request.Topics = append(request.Topics, topic)
	response, err := o.client.Broker(int(leader.broker)).RetriableRequest(ctx, request)
	if err != nil {
		return nil, from, err
	}
	answer, _ := response.(*kmsg.FetchResponse) // the type that answers this request
	if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
		return nil, from, err
	}
	for _, t := range answer.Topics {
		for _, rp := range t.Partitions {
			fetched, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
				Offset: from, IsolationLevel: kgo.ReadCommitted(), Topic: p.Topic, Partition: p.Number,
			}, &rp, kgo.DefaultDecompressor(), nil)
			return fetched.Records, next, fetched.Err
		}
	}
	return nil, from, nil
}
