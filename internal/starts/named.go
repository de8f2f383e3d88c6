package starts

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
)

// NameTopics writes into a commit for which topics its offsets are, see [kafka.OffsetName]. What Kafka has given no id
// is not named.
func (m *Member) NameTopics(commit *kmsg.OffsetCommitRequest) {
	cluster := m.clusterID()
	for _, t := range commit.Topics {
		name := kafka.OffsetName(t.TopicID, cluster)
		for i := range t.Partitions {
			if name != nil {
				t.Partitions[i].Metadata = name
			}
		}
	}
}

func (m *Member) clusterID() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cluster
}

// OffsetsFetched is a function for [kgo.OnOffsetsFetched]. It keeps for StartOffsets what the client leaves out.
func (m *Member) OffsetsFetched(_ context.Context, _ *kgo.Client, response *kmsg.OffsetFetchResponse) error {
	fetched, _ := kafka.OffsetsIn(response) // the client reports the error
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fetched = fetched
	return nil
}

// fetchedOffset returns an offset of the answer that the client has got last.
func (m *Member) fetchedOffset(at kafka.Partition) kafka.GroupOffset {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fetched[at]
}

// counting returns the offsets that are not those of deleted topics.
func (m *Member) counting(committed map[kafka.Partition]kafka.GroupOffset, found map[string]topicInfo) map[kafka.Partition]int64 {
	offsets, cluster := map[kafka.Partition]int64{}, m.clusterID()
	for at, offset := range committed {
		if !offset.IsOfDeleted(found[at.Topic].id, cluster) {
			offsets[at] = offset.At
		}
	}
	return offsets
}
