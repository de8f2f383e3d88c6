package deadletter_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A replay is checked while another partition of the dead-letter topic has no leader.
func TestReplayBesidePartitionWithoutLeader(t *testing.T) {
	t.Parallel()
	const topic, dlq = "orders", "orders.dlq"
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, dlq))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	opts := []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner())}
	client, err := kgo.NewClient(opts...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	header := func(name, value string) kgo.RecordHeader { return kgo.RecordHeader{Key: name, Value: []byte(value)} }
	dead := &kgo.Record{Topic: dlq, Partition: 0, Key: []byte("k"), Value: []byte("v"), Headers: []kgo.RecordHeader{
		header(deadletter.OriginalTopic, topic), header(deadletter.OriginalPartition, "0"), header(deadletter.OriginalOffset, "17"),
		header(deadletter.Group, "g"), header(deadletter.Action, "A"),
	}}
	require.NoError(t, client.ProduceSync(t.Context(), dead).FirstErr())
	testenv.WithoutLeader(t, cluster, 1)
	client, err = kgo.NewClient(opts...) // the other one knows the leader
	require.NoError(t, err)
	t.Cleanup(client.Close)

	replayOf := func(number int32, offset int64, value string) *kgo.Record {
		return &kgo.Record{Topic: topic, Key: []byte("k"), Value: []byte(value), Headers: []kgo.RecordHeader{
			header(deadletter.ReplayOf, deadletter.Origin(topic, 0, 17)), header(deadletter.ReplayFrom, deadletter.Origin(dlq, number, offset)),
			header(deadletter.ReplayGroup, "g"), header(deadletter.ReplayAction, "A"),
		}}
	}
	replays := deadletter.NewReplays(func() (*kgo.Client, error) { return client, nil })
	answers, err := replays.Check(t.Context(), []*kgo.Record{
		replayOf(3, 0, "v"), replayOf(0, 0, "v"), replayOf(0, 0, "forged"), replayOf(0, 7, "v"), replayOf(2, 0, "v"),
	}, dlq)
	require.NoError(t, err)
	require.NoError(t, answers[1].Err)
	for _, n := range []int{0, 2, 3, 4} {
		require.ErrorIs(t, answers[n].Err, deadletter.ErrNoReplay, n)
	}
	_, err = replays.Check(t.Context(), []*kgo.Record{replayOf(1, 0, "v")}, dlq)
	require.Error(t, err, "what is in a partition without a leader is not known")
	require.NotErrorIs(t, err, deadletter.ErrNoReplay)
}
