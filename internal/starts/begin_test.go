package starts

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// A group that begins behind the first record commits the epoch of the leader. Without it, the client would read all of
// the partition if Kafka lost the records before.
func TestNewStartHasAnEpoch(t *testing.T) {
	t.Parallel()
	const topic = "sales"
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(3, topic))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	at := func(number int32) kafka.Partition { return kafka.Partition{Topic: topic, Number: number} }
	for number := range int32(3) {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: number}, &kgo.Record{Topic: topic, Partition: number}).FirstErr())
	}
	ends, err := kafka.ListEpochOffsets(t.Context(), client, kafka.Committed, map[kafka.Partition]int64{at(0): kafka.EndOffset})
	require.NoError(t, err)
	require.EqualValues(t, 2, ends[at(0)].Offset)
	require.GreaterOrEqual(t, ends[at(0)].Epoch, int32(0))
	m := &Member{cfg: Config{Log: slog.New(slog.DiscardHandler)}, client: client}
	decided := map[kafka.Partition]start{
		at(0): {at: 2, epoch: -1},
		at(1): {at: 0, epoch: -1},
		at(2): {at: 2, epoch: 7, known: true},
	}
	m.askEpochs(t.Context(), decided)
	require.Equal(t, map[kafka.Partition]start{
		at(0): {at: 2, epoch: ends[at(0)].Epoch},
		at(1): {at: 0, epoch: -1},
		at(2): {at: 2, epoch: 7, known: true},
	}, decided)
}
