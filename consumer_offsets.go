package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

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

var errExpelled = errors.New("the group has expelled this member")

// checkMember refuses a commit that would set an offset back. A member that Kafka
// expelled comes back under another member id and learns only then that its partitions
// are assigned to others. These may be further on, and Kafka does not check on a commit
// whose the partitions are.
func (m *membership) checkMember(commit *kmsg.OffsetCommitRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if commit.MemberID != m.member {
		return errExpelled
	}
	return nil
}

// commitStartOffsets is called before partitions are read. Where the group has no
// committed offset, it commits the one to begin with: if this member died before its
// first commit, the next one would begin at a later end of the partition. If that
// fails, the client tries the whole again.
func (m *membership) commitStartOffsets(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	m.committing.Lock()
	defer m.committing.Unlock()
	missing := map[string]map[int32]int64{}
	for topic, numbers := range offsets {
		for number, offset := range numbers {
			if at := offset.EpochOffset().Offset; at < 0 {
				put(missing, topic, number, at) // -1 is the end and -2 the start, for both
			}
		}
	}
	if len(missing) == 0 {
		return offsets, nil
	}
	found, err := listOffsets(ctx, m.client, missing)
	if err != nil {
		return nil, err
	}
	starts := map[string]map[int32]kgo.EpochOffset{}
	for topic, numbers := range found {
		for number, at := range numbers {
			put(starts, topic, number, kgo.EpochOffset{Epoch: -1, Offset: at})
			offsets[topic][number] = kgo.NewOffset().At(at)
		}
	}
	if err := m.commitOffsets(starts); err != nil {
		return nil, fmt.Errorf("commit first offsets: %w", err)
	}
	return offsets, nil
}

// put sets the value of a partition.
func put[V any](m map[string]map[int32]V, topic string, number int32, v V) {
	if m[topic] == nil {
		m[topic] = map[int32]V{}
	}
	m[topic][number] = v
}

// listOffsets asks Kafka for the end (-1) or the start (-2) of partitions, as a client
// that reads committed records sees it.
func listOffsets(ctx context.Context, client *kgo.Client, wanted map[string]map[int32]int64) (map[string]map[int32]int64, error) {
	request := kmsg.NewPtrListOffsetsRequest()
	request.IsolationLevel = 1
	for topic, numbers := range wanted {
		t := kmsg.NewListOffsetsRequestTopic()
		t.Topic = topic
		for number, position := range numbers {
			p := kmsg.NewListOffsetsRequestTopicPartition()
			p.Partition, p.Timestamp = number, position
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

// Lag returns how far the partitions that this process holds at the moment are behind,
// sorted. It asks Kafka for their ends. A consumer that does not run holds none.
func (c *Consumer) Lag(ctx context.Context) ([]PartitionLag, error) {
	m := c.current.Load()
	if m == nil {
		return nil, nil
	}
	committed, ends := m.client.CommittedOffsets(), map[string]map[int32]int64{}
	for _, w := range m.all() {
		if _, ok := committed[w.partition.Topic][w.partition.Number]; ok {
			const end = -1
			put(ends, w.partition.Topic, w.partition.Number, end)
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
