package outbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
)

// PartitionLag is how far a consumer is behind in a partition.
type PartitionLag struct {
	// Topic of the partition.
	Topic string
	// Partition is its number.
	Partition int32
	// Next is the offset that is committed: of the next record to handle.
	Next int64
	// End is the offset behind the last record.
	End int64
}

// Records returns how many offsets are left to handle: not fewer than there are
// records, because markers of transactions and gaps of compaction have some too.
func (l PartitionLag) Records() int64 { return max(0, l.End-l.Next) }

// Lag returns how far the partitions that this process has at the moment are behind,
// sorted. It asks Kafka for their ends. A consumer that does not run has none.
func (c *Consumer) Lag(ctx context.Context) ([]PartitionLag, error) {
	m := c.current.Load()
	if m == nil {
		return nil, nil
	}
	committed, ends := m.client.CommittedOffsets(), map[string]map[int32]int64{}
	for _, w := range m.all() {
		if _, ok := committed[w.at.Topic][w.at.Number]; ok {
			const end = -1
			put(ends, w.at.Topic, w.at.Number, end)
		}
	}
	if len(ends) == 0 {
		return nil, nil
	}
	ends, err := listOffsets(ctx, m.client, ends)
	if err != nil {
		return nil, fmt.Errorf("outbox: lag of group %s: %w", c.cfg.Group, err)
	}
	var lags []PartitionLag
	for topic, numbers := range ends {
		for number, end := range numbers {
			lags = append(lags, PartitionLag{Topic: topic, Partition: number, Next: committed[topic][number].Offset, End: end})
		}
	}
	slices.SortFunc(lags, func(a, b PartitionLag) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return lags, nil
}
