package kafka

import (
	"encoding/base64"
	"strings"
)

// Brokers before Kafka 4.1 know the topic of a committed offset by its name. A member that has not seen yet that its
// topic was deleted and created again commits an offset of the old topic to the new one. So the metadata of an offset
// has the id of its topic. It has the cluster, too: tools copy offsets with their metadata to other clusters, where
// the same topics have other ids.
const (
	metadataTopic   = "topic " // with the id, as the tools of Kafka write it
	metadataCluster = " in cluster "
)

// NoOffset stands for a committed offset that does not count.
const NoOffset = -1

// OffsetName returns the metadata of an offset of a topic, or nil if Kafka has given no ids.
func OffsetName(id TopicID, cluster string) *string {
	if cluster == "" || id == (TopicID{}) {
		return nil
	}
	name := metadataTopic + base64.RawURLEncoding.EncodeToString(id[:]) + metadataCluster + cluster
	return &name
}

// IsOfDeleted reports whether an offset is committed for another topic of the cluster than that with the id. Offsets
// of earlier releases, of tools and of other clusters are not.
func (o GroupOffset) IsOfDeleted(id TopicID, cluster string) bool {
	rest, ours := strings.CutPrefix(o.Metadata, metadataTopic)
	text, of, complete := strings.Cut(rest, metadataCluster)
	named, err := base64.RawURLEncoding.DecodeString(text)
	if !ours || !complete || err != nil || len(named) != len(id) || id == (TopicID{}) {
		return false
	}
	return of == cluster && TopicID(named) != id
}
