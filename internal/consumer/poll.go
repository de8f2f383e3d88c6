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
	loops.Go(func() { m.refetch(ctx) })
	loops.Go(func() { m.checkDeadLetterTopics(ctx) })
	loops.Go(func() { m.watchHandlers(ctx) })
	loops.Go(func() { m.watchLag(ctx) })
	loops.Go(func() { m.watchWaiting(ctx) })
	loops.Go(func() { m.limits.pauses.Watch(ctx, m.reader.processor.Routes.Topics, m.pauseTopics) })
	for ctx.Err() == nil {
		began := time.Now()
		polling, cancel := m.streams.polling(ctx)
		fetches := m.client.PollRecords(polling, pollRecords)
		cancel()
		fetches.EachError(func(topic string, number int32, err error) {
			m.fetchFailed(ctx, began, kafka.Partition{Topic: topic, Number: number}, err)
		})
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			if w := m.workerOf(kafka.Partition{Topic: p.Topic, Number: p.Partition}); w != nil { // else fetched before the partition was revoked
				m.distribute(p.FetchPartition, w)
			}
		})
		m.runStreams(ctx, &loops)
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

// distribute moves records of a partition into the queue of its worker.
func (m *membership) distribute(p kgo.FetchPartition, w *partitionWorker) {
	if len(p.Records) == 0 {
		return
	}
	m.answered()
	if p.Err == nil { // otherwise the records are those before a damaged batch
		m.fetchWorks(w.partition)
	}
	m.starts.Works(w.partition)
	if from, lost := w.fetched(p); lost > 0 {
		m.starts.Passed(w.partition, from, lost)
	}
	w.add(p.Records)
}

// fetchFailed logs a failed fetch. The client retries it.
func (m *membership) fetchFailed(ctx context.Context, began time.Time, at kafka.Partition, err error) {
	var loss *kgo.ErrDataLoss
	switch {
	case ctx.Err() != nil, errors.Is(err, context.Canceled): // the end of a stream ends a poll
	case errors.As(err, &loss):
		m.truncated(loss)
		if w := m.workerOf(at); w != nil {
			w.truncated(loss)
		}
	case isRebalance(err): // Kafka answers, so this is no outage
		m.log.Info("outbox: the group has gone on without this member, which joins it again", "error", err)
	case errors.Is(err, kafka.ErrFetchFull):
	case errors.Is(err, kafka.ErrNeedsStream):
		m.streams.wanted = append(m.streams.wanted, at)
	case kafka.IsReplaced(err):
		m.starts.Stall(at)
	default:
		m.fetchFails(began, at, err)
	}
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
