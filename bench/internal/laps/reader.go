package laps

import (
	"context"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Reader reads the topic.
type Reader struct{ Client *kgo.Client }

// ReadFrom returns a reader of the committed records of a topic from the offsets on where its partitions once ended.
func ReadFrom(brokers []string, topic string, ends kadm.ListedOffsets) (*Reader, error) {
	from := map[int32]kgo.Offset{}
	ends.Each(func(o kadm.ListedOffset) { from[o.Partition] = kgo.NewOffset().At(o.Offset) })
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}))
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return &Reader{client}, nil
}

// Collect reads until all events of the lap have arrived.
func (r *Reader) Collect(ctx context.Context, l *Lap) error {
	for l.Missing > 0 {
		fetches := r.Client.PollFetches(ctx)
		at := time.Since(l.Start)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read topic with %d events missing: %w", l.Missing, err)
		}
		for record := range fetches.RecordsAll() {
			n, err := orders.Number(record.Value)
			if err != nil {
				return err
			}
			l.Arrive(n, at)
		}
	}
	return nil
}
