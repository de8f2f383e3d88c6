package testenv

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// WithoutLeader has a fake cluster say from now on that the partitions with a number have no leader. Clients that know
// the leaders find out when they ask again.
func WithoutLeader(t testing.TB, cluster *kfake.Cluster, number int32) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrMetadataRequest()
	request.Topics = nil // all
	all, err := request.RequestWith(t.Context(), client)
	require.NoError(t, err)
	for i := range all.Topics {
		LoseLeader(&all.Topics[i], number)
	}
	cluster.ControlKey(int16(kmsg.Metadata), func(request kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		return AnswerMetadata(request, all), nil, true
	})
}

// LoseLeader makes a description of a topic say that a partition has no leader.
func LoseLeader(topic *kmsg.MetadataResponseTopic, number int32) {
	for i := range topic.Partitions {
		if p := &topic.Partitions[i]; p.Partition == number {
			p.Leader, p.ErrorCode = -1, kerr.LeaderNotAvailable.Code
		}
	}
}

// AnswerMetadata returns what a description says of the topics that a request asks for. The answer is a new one: the
// last one may still be on its way.
func AnswerMetadata(request kmsg.Request, all *kmsg.MetadataResponse) kmsg.Response {
	answer, asked := *all, request.(*kmsg.MetadataRequest).Topics
	if asked != nil {
		answer.Topics = slices.DeleteFunc(slices.Clone(all.Topics), func(has kmsg.MetadataResponseTopic) bool {
			return !slices.ContainsFunc(asked, func(t kmsg.MetadataRequestTopic) bool {
				return t.Topic != nil && *t.Topic == *has.Topic || t.Topic == nil && t.TopicID == has.TopicID
			})
		})
	}
	answer.SetVersion(request.GetVersion())
	return &answer
}
