package outboxtopics

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A description has the fewest replicas of all partitions, and counts the partitions
// without a leader.
func TestDescribedTopic(t *testing.T) {
	t.Parallel()
	partition := func(leader int32, replicas, inSync int) kmsg.MetadataResponseTopicPartition {
		return kmsg.MetadataResponseTopicPartition{Leader: leader, Replicas: make([]int32, replicas), ISR: make([]int32, inSync)}
	}
	for _, test := range []struct {
		name       string
		partitions []kmsg.MetadataResponseTopicPartition
		want       description
	}{
		{"no partition yet", nil, description{}},
		{"all is well", []kmsg.MetadataResponseTopicPartition{partition(1, 3, 3), partition(2, 3, 3)}, description{partitions: 2, replicas: 3, inSync: 3, led: true}},
		{"one is behind", []kmsg.MetadataResponseTopicPartition{partition(1, 3, 3), partition(2, 3, 1)}, description{partitions: 2, replicas: 3, inSync: 1, led: true}},
		{"one has fewer replicas", []kmsg.MetadataResponseTopicPartition{partition(1, 3, 3), partition(2, 2, 2)}, description{partitions: 2, replicas: 2, inSync: 2, led: true}},
		{"one has no leader", []kmsg.MetadataResponseTopicPartition{partition(1, 3, 3), partition(-1, 3, 0)}, description{partitions: 2, replicas: 3, leaderless: 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			require.Equal(t, test.want, newDescription(kmsg.MetadataResponseTopic{Partitions: test.partitions}))
		})
	}
}
