package starts

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The topic gets partitions after the client has asked for them, and before it is watched: its member stores where the
// group begins first. The client itself asks again after five minutes.
func TestPartitionsAddedBeforeWatch(t *testing.T) {
	t.Parallel()
	const topic = "sales"
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumeTopics(topic), kgo.MetadataMinAge(10*time.Millisecond))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	log := slog.New(slog.DiscardHandler)
	m := NewMember(Config{Topics: []string{topic}, Log: log, Outages: outage.NewLogs(log)})
	defer m.end()
	m.client = client
	require.Eventually(t, func() bool { return m.knows(topic, 0) }, testenv.Patience, time.Millisecond)
	add := kmsg.NewPtrCreatePartitionsRequest()
	add.Topics = []kmsg.CreatePartitionsRequestTopic{{Topic: topic, Count: 3}}
	_, err = add.RequestWith(t.Context(), client)
	require.NoError(t, err)

	began := time.Now()
	var found map[string]topicInfo
	require.Eventually(t, func() bool {
		found, err = m.describe(t.Context(), m.cfg.Topics)
		return err == nil && len(found[topic].partitions) == 3
	}, testenv.Patience, time.Millisecond)
	require.False(t, m.knows(topic, 2))
	m.compare(began, found)
	require.Eventually(t, func() bool { return m.knows(topic, 2) }, testenv.Patience/6, time.Millisecond)
}
