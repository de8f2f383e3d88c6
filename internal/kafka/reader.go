package kafka

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

	"github.com/outboxgo/outbox/internal/wait"
)

// Reader reads the committed records between two offsets. It sends its own fetch
// requests: a consuming client returns records only, so it does not tell that it is at
// the end of a partition if the last records there are of aborted transactions.
type Reader struct {
	client  *kgo.Client
	leaders map[Partition]leader
}

// NewReader returns a reader that asks with a client. It belongs to one goroutine.
func NewReader(client *kgo.Client) *Reader { return &Reader{client: client} }

// leader is the broker that leads a partition, and the id by which it knows the topic.
type leader struct {
	broker int32
	topic  [16]byte
}

// Span is the part of a partition that remains to be read: from Next up to End.
type Span struct {
	Partition
	Next, End int64
}

const (
	fetchBytes      = 1 << 20 // of a partition at once; Kafka sends a larger batch whole
	fetchWait       = 500 * time.Millisecond
	fetchRetryPause = 100 * time.Millisecond
	// fetchTimeout bounds the wait for a partition that returns nothing before its end.
	fetchTimeout = 30 * time.Second
)

var errNothingFetched = errors.New("the broker has nothing there")

// ErrBatch is the error of a batch that Kafka has sent and that cannot be decoded, or is too large when decompressed.
var ErrBatch = errors.New("the batch cannot be decoded")

// CheckOffsets rejects offsets and partitions that cannot exist.
func CheckOffsets(from map[int32]int64) error {
	for number, offset := range from {
		if number < 0 || offset < 0 {
			return fmt.Errorf("offset %d of partition %d to begin with: must not be negative", offset, number)
		}
	}
	return nil
}

// Spans returns the spans of the partitions of a topic, from the given offsets to their
// ends now.
func (r *Reader) Spans(ctx context.Context, topic string, from map[int32]int64) ([]Span, error) {
	if err := r.askLeaders(ctx, topic); err != nil {
		return nil, err
	}
	for number := range from {
		if err := r.checkKnown(Partition{topic, number}); err != nil {
			return nil, err
		}
	}
	var spans []Span
	for p := range r.leaders {
		spans = append(spans, Span{Partition: p, Next: from[p.Number]})
	}
	slices.SortFunc(spans, func(a, b Span) int { return cmp.Compare(a.Number, b.Number) })
	return spans, r.bound(ctx, spans)
}

// Span returns the span of one partition, from an offset to its end now. It does not need the leaders of the others.
func (r *Reader) Span(ctx context.Context, p Partition, from int64) (Span, error) {
	if err := r.askLeaders(ctx, p.Topic); err != nil {
		return Span{}, err
	}
	if err := r.checkKnown(p); err != nil {
		return Span{}, err
	}
	one := []Span{{Partition: p, Next: from}}
	err := r.bound(ctx, one)
	return one[0], err
}

// ErrNoPartition is a [kerr.UnknownTopicOrPartition]: the topic exists, and does not have the partition.
var ErrNoPartition = fmt.Errorf("%w", kerr.UnknownTopicOrPartition)

// checkKnown returns an error if the topic has no such partition.
func (r *Reader) checkKnown(p Partition) error {
	if _, known := r.leaders[p]; !known {
		return fmt.Errorf("%v to begin with: %w", p, ErrNoPartition)
	}
	return nil
}

// bound sets the ends of spans, and moves their beginnings into what Kafka has: records before the first offset are
// deleted.
func (r *Reader) bound(ctx context.Context, spans []Span) error {
	firsts, err := r.offsets(ctx, spans, FirstOffset)
	if err != nil {
		return err
	}
	ends, err := r.offsets(ctx, spans, EndOffset)
	if err != nil {
		return err
	}
	for i := range spans {
		s := &spans[i]
		s.End = ends[s.Partition]
		s.Next = min(max(s.Next, firsts[s.Partition]), s.End)
	}
	return nil
}

// TopicID returns the id of the topic of a partition that Spans or Span has returned.
func (r *Reader) TopicID(p Partition) TopicID { return r.leaders[p].topic }

// askLeaders asks Kafka which brokers lead the partitions of a topic.
func (r *Reader) askLeaders(ctx context.Context, topic string) error {
	response, err := Metadata(ctx, r.client, topic)
	if err != nil {
		return err
	}
	r.leaders = map[Partition]leader{}
	for _, t := range response.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			return fmt.Errorf("topic %s: %w", topic, err)
		}
		for _, p := range t.Partitions {
			r.leaders[Partition{Topic: topic, Number: p.Partition}] = leader{p.Leader, t.TopicID}
		}
	}
	return nil
}

// offsets returns the first or the end offset of the partitions of spans.
func (r *Reader) offsets(ctx context.Context, spans []Span, which int64) (map[Partition]int64, error) {
	wanted := map[Partition]int64{}
	for _, s := range spans {
		wanted[s.Partition] = which
	}
	return ListOffsets(ctx, r.client, Committed, wanted)
}

// Read returns the next records of a span, which may be none, and advances the span.
func (r *Reader) Read(ctx context.Context, s *Span) ([]*kgo.Record, error) {
	for start := time.Now(); ; {
		records, next, err := r.fetch(ctx, s.Partition, s.Next)
		if next > s.Next { // an error about later records comes again with the next read
			s.Next = min(next, s.End)
			return slices.DeleteFunc(records, func(r *kgo.Record) bool { return r.Offset >= s.End }), nil
		}
		if err == nil {
			err = errNothingFetched
		}
		if isLasting(err) || time.Since(start) > fetchTimeout {
			return nil, fmt.Errorf("read %v at offset %d: %w", s.Partition, s.Next, err)
		}
		if wait.Sleep(ctx, fetchRetryPause); ctx.Err() != nil {
			return nil, fmt.Errorf("read %v at offset %d: %w", s.Partition, s.Next, context.Cause(ctx))
		}
		if err := r.askLeaders(ctx, s.Topic); err != nil && isLasting(err) {
			return nil, err
		}
	}
}

// isLasting reports whether a retry would return the same error.
func isLasting(err error) bool {
	var k *kerr.Error
	return errors.As(err, &k) && !k.Retriable || errors.Is(err, kgo.ErrMaxDecompress) || errors.Is(err, ErrBatch)
}

// fetch returns committed records of a partition from an offset on, and the offset
// behind the records that it has read, which include aborted ones.
func (r *Reader) fetch(ctx context.Context, p Partition, from int64) ([]*kgo.Record, int64, error) {
	leader := r.leaders[p]
	answer, err := r.ask(ctx, p, leader, kgo.EpochOffset{Epoch: -1, Offset: from})
	if answer == nil || err != nil {
		return nil, from, err
	}
	fetched, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
		Offset: from, IsolationLevel: kgo.ReadCommitted(), Topic: p.Topic, Partition: p.Number,
	}, answer, DecompressorOf(r.client), nil)
	err = fetched.Err
	if err != nil && answer.ErrorCode == 0 {
		err = fmt.Errorf("%w: %w", ErrBatch, err)
	}
	return fetched.Records, next, err
}

// Raw returns what the leader of a partition answers to a fetch of committed records from an offset on, of the topic
// with an id. Batches are compressed in it. The epoch is that of the record before, or -1. If the leader has another
// record there, the answer has a DivergingEpoch, from Kafka 2.7 on.
func (r *Reader) Raw(ctx context.Context, p Partition, id TopicID, from kgo.EpochOffset) (*kmsg.FetchResponseTopicPartition, error) {
	if err := r.askLeaders(ctx, p.Topic); err != nil {
		return nil, err
	}
	leader, known := r.leaders[p]
	if !known {
		return nil, kerr.UnknownTopicOrPartition
	}
	if id != (TopicID{}) && leader.topic != id {
		return nil, kerr.UnknownTopicID
	}
	answer, err := r.ask(ctx, p, leader, from)
	if err == nil && answer == nil {
		err = errNothingFetched
	}
	if err == nil {
		err = kerr.ErrorForCode(answer.ErrorCode)
	}
	return answer, err
}

// ask sends a fetch request. It returns nil if the answer has nothing about the partition.
func (r *Reader) ask(ctx context.Context, p Partition, leader leader, from kgo.EpochOffset) (*kmsg.FetchResponseTopicPartition, error) {
	one := kmsg.NewFetchRequestTopicPartition()
	one.Partition, one.FetchOffset, one.LastFetchedEpoch, one.PartitionMaxBytes = p.Number, from.Offset, from.Epoch, fetchBytes
	topic := kmsg.NewFetchRequestTopic()
	topic.Topic, topic.TopicID = p.Topic, leader.topic // by its name, or by its id since Kafka 3.1
	topic.Partitions = append(topic.Partitions, one)
	request := kmsg.NewPtrFetchRequest()
	request.MaxWaitMillis, request.MinBytes, request.IsolationLevel = int32(fetchWait.Milliseconds()), 1, int8(Committed)
	request.Topics = append(request.Topics, topic)
	response, err := r.client.Broker(int(leader.broker)).RetriableRequest(ctx, request)
	if err != nil {
		return nil, err
	}
	answer, _ := response.(*kmsg.FetchResponse) // the type that answers this request
	if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
		return nil, err
	}
	for _, t := range answer.Topics {
		for i := range t.Partitions {
			return &t.Partitions[i], nil
		}
	}
	return nil, nil
}
