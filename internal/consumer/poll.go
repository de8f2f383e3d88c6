package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// pollRecords is the most records of one poll.
const pollRecords = 1_000

// startPolling runs poll in the background. The channel is closed when poll has returned.
func (m *membership) startPolling(ctx context.Context) (ended <-chan struct{}) {
	polling := make(chan struct{})
	go func() {
		defer close(polling)
		m.poll(ctx)
	}()
	return polling
}

// poll polls and fills the queues until ctx is cancelled. It also runs the member's other loops.
func (m *membership) poll(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(m.starts.Outdated(), cancel)()
	var loops sync.WaitGroup
	defer loops.Wait()
	defer cancel()
	loops.Go(func() { m.keepCommitting(ctx) })
	loops.Go(func() { m.starts.Run(ctx, m.client) })
	loops.Go(func() { m.checkDeadLetterTopics(ctx) })
	loops.Go(func() { m.watchHandlers(ctx) })
	loops.Go(func() { m.watchLag(ctx) })
	loops.Go(func() { m.watchWaiting(ctx) })
	loops.Go(func() { m.limits.pauses.Watch(ctx, m.reader.processor.Routes.Topics, m.pauseTopics) })
	for ctx.Err() == nil {
		began := time.Now()
		fetches := m.client.PollRecords(ctx, pollRecords)
		fetches.EachError(func(topic string, number int32, err error) {
			m.fetchFailed(ctx, began, kafka.Partition{Topic: topic, Number: number}, err)
		})
		fetches.EachPartition(m.distribute)
		if m.pieces.Grew() {
			m.limitFetches(m.client)
		}
		if m.limits.budget.IsOver() {
			for _, w := range m.all() {
				w.recheckQueue()
			}
		}
		if fetches.NumRecords() < pollRecords {
			m.bound.Reset()
		}
		m.client.AllowRebalance()
	}
}

// distribute moves polled records of a partition into the queue of its worker.
func (m *membership) distribute(p kgo.FetchTopicPartition) {
	if len(p.Records) == 0 {
		return
	}
	at := kafka.Partition{Topic: p.Topic, Number: p.Partition}
	w := m.workerOf(at)
	if w == nil { // fetched before the partition was revoked
		return
	}
	if m.outages.Failing() {
		m.outages.Report(outageFetching, time.Now(), nil)
	}
	m.starts.Works(at)
	if from, lost := w.fetched(p.FetchPartition); lost > 0 {
		m.starts.Passed(at, from, lost)
	}
	w.add(p.Records)
}

// fetchFailed logs a failed fetch. The client retries it.
func (m *membership) fetchFailed(ctx context.Context, began time.Time, at kafka.Partition, err error) {
	var loss *kgo.ErrDataLoss
	var large *kgo.ErrDecompressTooLarge
	switch {
	case ctx.Err() != nil:
	case errors.As(err, &loss):
		m.log.Warn("outbox: Kafka has lost records of a partition", "partition", at.Name(), "error", err)
	case errors.Is(err, kafka.ErrFetchFull):
	case errors.As(err, &large):
		m.block(at, large)
	case kafka.IsReplaced(err):
		m.starts.Stall(at)
	default:
		m.outages.Report(outageFetching, began, err)
	}
}

// block notes and logs a batch that the client cannot decompress. Fetching of its partition has ended.
func (m *membership) block(at kafka.Partition, large *kgo.ErrDecompressTooLarge) {
	if w := m.workerOf(at); w != nil {
		w.block(large)
	}
	m.log.Error("outbox: a batch of records is larger than this consumer decompresses, and its partition waits; raise kgo.MaxDecompressBatchBytes in the Kafka options and start again, "+
		"or set the offset of the group to next_offset to pass over the batch", "topic", large.Topic, "partition", large.Partition, "offset", large.Offset, "next_offset", large.NextOffset,
		"bytes", m.client.OptValue(kgo.MaxDecompressBatchBytes))
}

// limitFetches limits the bytes of one fetch of a partition to its share of MaxQueueBytes, or to the
// largest batch if that is more.
func (m *membership) limitFetches(client *kgo.Client) {
	m.once.Do(func() { m.fetchPartitionBytes, _ = client.OptValue(kgo.FetchMaxPartitionBytes).(int32) })
	all, _ := client.OptValue(kgo.FetchMaxBytes).(int32)
	client.UpdateFetchMaxBytes(all, int32(min(int(m.fetchPartitionBytes), m.pieces.Size(m.limits.budget.Share()))))
}

// batchHook is a hook of the Kafka client. It gets the compressed size of each fetched batch.
type batchHook func(bytes int)

func (f batchHook) OnFetchBatchRead(_ kgo.BrokerMetadata, _ string, _ int32, read kgo.FetchBatchMetrics) {
	f(read.CompressedBytes)
}
