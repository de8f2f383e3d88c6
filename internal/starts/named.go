package starts

import (
	"context"
	"encoding/base64"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
)

// Brokers before Kafka 4.1 know the topic of a committed offset by its name. A member that has not seen yet that its
// topic was deleted and created again commits an offset of the old topic to the new one. So the metadata of an offset
// has the id of its topic. It has the cluster, too: tools copy offsets with their metadata to other clusters, where
// the same topics have other ids.
const (
	metadataTopic   = "topic " // with the id, as the tools of Kafka write it
	metadataCluster = " in cluster "
)

// NameTopics writes into a commit for which topics its offsets are. What Kafka has given no id is not named.
func (m *Member) NameTopics(commit *kmsg.OffsetCommitRequest) {
	cluster := m.clusterID()
	for _, t := range commit.Topics {
		if cluster == "" || t.TopicID == (kafka.TopicID{}) {
			continue
		}
		metadata := metadataTopic + base64.RawURLEncoding.EncodeToString(t.TopicID[:]) + metadataCluster + cluster
		for i := range t.Partitions {
			t.Partitions[i].Metadata = &metadata
		}
	}
}

// isOfDeleted reports whether an offset is committed for another topic of this cluster than that with the id. Offsets
// of earlier releases, of tools and of other clusters are not.
func (m *Member) isOfDeleted(metadata string, id kafka.TopicID) bool {
	rest, ours := strings.CutPrefix(metadata, metadataTopic)
	text, cluster, complete := strings.Cut(rest, metadataCluster)
	named, err := base64.RawURLEncoding.DecodeString(text)
	if !ours || !complete || err != nil || len(named) != len(id) || id == (kafka.TopicID{}) {
		return false
	}
	return cluster == m.clusterID() && kafka.TopicID(named) != id
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
	offsets := map[kafka.Partition]int64{}
	for at, offset := range committed {
		if !m.isOfDeleted(offset.Metadata, found[at.Topic].id) {
			offsets[at] = offset.At
		}
	}
	return offsets
}
