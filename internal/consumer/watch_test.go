package consumer

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The lag is known while a partition has no leader: that partition still has the lag that was known.
func TestLagWithoutLeader(t *testing.T) {
	t.Parallel()
	const topic = "sales"
	s := newPartitionFixture(t, Rules{})
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	newClient := func() *kgo.Client {
		client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		require.NoError(t, err)
		t.Cleanup(client.Close)
		return client
	}
	m := &membership{workers: map[kafka.Partition]*partitionWorker{}, client: newClient()}
	for number := range int32(2) {
		at := kafka.Partition{Topic: topic, Number: number}
		m.workers[at] = newPartitionWorker(at, s.worker.reader, s, s.worker.cfg, s.worker.limits, s.worker.outages)
		m.workers[at].begin(starts.Beginning{})
	}
	send := func(client *kgo.Client, number int32, n int) {
		for range n {
			require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: number}).FirstErr())
		}
	}
	lag := func(known map[kafka.Partition]int64) int64 {
		total, ok := m.totalLag(t.Context(), known)
		require.True(t, ok)
		return total
	}
	send(m.client, 0, 1)
	send(m.client, 1, 10)
	known := map[kafka.Partition]int64{}
	require.EqualValues(t, 11, lag(known))
	testenv.WithoutLeader(t, cluster, 1)
	m.client = newClient()
	_, err = m.lags(t.Context())
	require.Error(t, err)
	require.EqualValues(t, 11, lag(known))
	send(m.client, 0, 5)
	require.EqualValues(t, 16, lag(known))
	delete(m.workers, kafka.Partition{Topic: topic, Number: 1})
	require.EqualValues(t, 6, lag(known))
	require.Len(t, known, 1)
}
