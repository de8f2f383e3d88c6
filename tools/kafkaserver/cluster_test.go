package kafkaserver_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/tools/internal/long"
	"github.com/outboxgo/outbox/tools/kafkaserver"
)

const patience = time.Minute

// A cluster goes on without a controller that has crashed, takes it back at its address, and leaves nothing behind. The
// module faults stops and freezes its nodes.
func TestCluster(t *testing.T) {
	long.Test(t)
	if testing.Short() {
		t.Skip("-short: needs a real Kafka")
	}
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	began := time.Now()
	c, err := kafkaserver.StartCluster(t.Context(), kafkaserver.Config{Progress: t.Output()})
	require.NoError(t, err)
	t.Logf("ready in %v", time.Since(began))
	t.Cleanup(func() { require.NoError(t, c.Stop()) })
	require.Equal(t, []int32{1, 2, 3}, c.IDs())
	producer, err := kgo.NewClient(kgo.SeedBrokers(c.Brokers()...), kgo.DefaultProduceTopic("kept"))
	require.NoError(t, err)
	defer producer.Close()
	requireReplicas(t, producer)
	produce := func(value string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		require.NoError(t, producer.ProduceSync(ctx, kgo.StringRecord(value)).FirstErr(), value)
	}

	first := controller(t, c, 0)
	require.NoError(t, c.Node(first).Kill())
	requireGone(t, c.Node(first).PID())
	controller(t, c, first)
	produce("after the crash of the controller")
	address := c.Node(first).Brokers()
	require.NoError(t, c.Node(first).Restart(t.Context()))
	require.Equal(t, address, c.Node(first).Brokers())

	producer.Close()
	began = time.Now()
	require.NoError(t, c.Stop())
	t.Logf("stopped in %v", time.Since(began))
	for _, id := range c.IDs() {
		requireGone(t, c.Node(id).PID())
		require.ErrorIs(t, c.Node(id).Restart(t.Context()), kafkaserver.ErrStopped)
	}
	entries, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, entries)
}

// controller waits until a node other than one is the controller, and returns which.
func controller(t *testing.T, c *kafkaserver.Cluster, other int32) (id int32) {
	t.Helper()
	require.Eventually(t, func() bool {
		var err error
		id, err = c.Controller(t.Context())
		return err == nil && id != other
	}, patience, 50*time.Millisecond)
	return id
}

// requireReplicas creates a topic by the cluster's defaults, and requires that every partition
// has its replicas in sync.
func requireReplicas(t *testing.T, client *kgo.Client) {
	t.Helper()
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = "kept", -1, -1
	create := kmsg.NewPtrCreateTopicsRequest()
	create.Topics = append(create.Topics, topic)
	created, err := create.RequestWith(t.Context(), client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(created.Topics[0].ErrorCode))
	describe := kmsg.NewPtrMetadataRequest()
	describe.Topics = []kmsg.MetadataRequestTopic{{Topic: kmsg.StringPtr("kept")}}
	require.Eventually(t, func() bool {
		response, err := describe.RequestWith(t.Context(), client)
		require.NoError(t, err)
		if len(response.Topics[0].Partitions) == 0 { // the broker has not heard of it
			return false
		}
		for _, p := range response.Topics[0].Partitions {
			require.Len(t, p.Replicas, 3)
			if len(p.ISR) < 3 {
				return false
			}
		}
		return true
	}, patience, 50*time.Millisecond)
}
