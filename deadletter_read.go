package outbox

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

// offsetReader reads what is committed between two offsets. It fetches by itself,
// because a consuming client hands out records only, and does not say that it is at
// the end where aborted ones are the last.
type offsetReader struct {
	client  *kgo.Client
	leaders map[kafka.Partition]leader
}

// leader is whom to ask for a partition, and the id by which it knows the topic.
type leader struct {
	broker int32
	topic  [16]byte
}

// span is what is left to read of a partition.
type span struct {
	kafka.Partition
	next, end int64
}

const (
	readBytes = 1 << 20 // of a partition at once; a larger batch comes whole
	readWait  = 500 * time.Millisecond
	readPause = 100 * time.Millisecond
	// readPatience is how long a partition may give nothing of what it has.
	readPatience = 30 * time.Second

	// What Kafka calls the ends of a partition, as timestamps, and the isolation
	// level of what is committed.
	firstOffset, endOffset = -2, -1
	readCommitted          = 1
)

var errNothingFetched = errors.New("the broker has nothing there")

// checkFrom refuses offsets that no record has.
func checkFrom(from map[int32]int64) error {
	for number, offset := range from {
		if number < 0 || offset < 0 {
			return fmt.Errorf("offset %d of partition %d to begin with: must not be negative", offset, number)
		}
	}
	return nil
}

// spans returns what the partitions of a topic have now, from the given offsets on.
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
		next := max(from[number], firsts[number]) // what was before is deleted
		spans = append(spans, span{kafka.Partition{Topic: topic, Number: number}, min(next, end), end})
	}
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.Number, b.Number) })
	return spans, nil
}

// askLeaders learns who leads the partitions of a topic.
func (o *offsetReader) askLeaders(ctx context.Context, topic string) error {
	response, err := askTopics(ctx, o.client, topic)
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

// offsets returns an end of each partition of the topic whose leaders are known.
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

// read returns what comes next of a span, which may be nothing, and moves it on.
func (o *offsetReader) read(ctx context.Context, s *span) ([]*kgo.Record, error) {
	for begun := time.Now(); ; {
		records, next, err := o.fetch(ctx, s.Partition, s.next)
		if next > s.next { // what follows may be bad, and is then met next time
			s.next = min(next, s.end)
			return slices.DeleteFunc(records, func(r *kgo.Record) bool { return r.Offset >= s.end }), nil
		}
		if err == nil {
			err = errNothingFetched
		}
		if isLasting(err) || time.Since(begun) > readPatience {
			return nil, fmt.Errorf("read %v at offset %d: %w", s.Partition, s.next, err)
		}
		if wait.Sleep(ctx, readPause); ctx.Err() != nil {
			return nil, fmt.Errorf("read %v at offset %d: %w", s.Partition, s.next, context.Cause(ctx))
		}
		if err := o.askLeaders(ctx, s.Topic); err != nil && isLasting(err) {
			return nil, err
		}
	}
}

// isLasting reports whether Kafka will say the same again.
func isLasting(err error) bool {
	var k *kerr.Error
	return errors.As(err, &k) && !k.Retriable
}

// fetch returns committed records of a partition from an offset on, and the offset
// behind what it has seen.
func (o *offsetReader) fetch(ctx context.Context, p kafka.Partition, from int64) ([]*kgo.Record, int64, error) {
	leader := o.leaders[p]
	one := kmsg.NewFetchRequestTopicPartition()
	one.Partition, one.FetchOffset, one.PartitionMaxBytes = p.Number, from, readBytes
	topic := kmsg.NewFetchRequestTopic()
	topic.Topic, topic.TopicID = p.Topic, leader.topic // by its name, or by its id since Kafka 3.1
	topic.Partitions = append(topic.Partitions, one)
	request := kmsg.NewPtrFetchRequest()
	request.MaxWaitMillis, request.MinBytes, request.IsolationLevel = int32(readWait.Milliseconds()), 1, readCommitted
	request.Topics = append(request.Topics, topic)
	response, err := o.client.Broker(int(leader.broker)).RetriableRequest(ctx, request)
	if err != nil {
		return nil, from, err
	}
	fetched, _ := response.(*kmsg.FetchResponse) // that is what answers this request
	if err := kerr.ErrorForCode(fetched.ErrorCode); err != nil {
		return nil, from, err
	}
	for _, t := range fetched.Topics {
		for _, rp := range t.Partitions {
			got, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
				Offset: from, IsolationLevel: kgo.ReadCommitted(), Topic: p.Topic, Partition: p.Number,
			}, &rp, kgo.DefaultDecompressor(), nil)
			return got.Records, next, got.Err
		}
	}
	return nil, from, nil
}
