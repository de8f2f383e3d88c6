package deadletter

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// replayFixture is a Kafka with a dead letter, and its replay.
func replayFixture(t *testing.T) (*kfake.Cluster, *Replays, *kgo.Record) {
	t.Helper()
	const topic, dlq = "orders", "orders.dlq"
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, dlq))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	record := func(topic string, headers ...string) *kgo.Record {
		r := &kgo.Record{Topic: topic, Key: []byte("k"), Value: []byte("v")}
		for i := 0; i < len(headers); i += 2 {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: headers[i], Value: []byte(headers[i+1])})
		}
		return r
	}
	dead := record(dlq, OriginalTopic, topic, OriginalPartition, "0", OriginalOffset, "17", Group, "g", Action, "A")
	require.NoError(t, client.ProduceSync(t.Context(), dead).FirstErr())
	replay := record(topic, ReplayOf, Origin(topic, 0, 17), ReplayFrom, Origin(dlq, 0, 0), ReplayGroup, "g", ReplayAction, "A")
	return cluster, NewReplays(func() (*kgo.Client, error) { return client, nil }), replay
}

// A broker that has just started may not know a dead-letter topic yet. A replay is no forged one for that. Where there
// is no topic, records do not wait for it again and again.
func TestReplayWhileTopicIsUnknown(t *testing.T) {
	t.Parallel()
	const dlq = "orders.dlq"
	cluster, replays, replay := replayFixture(t)
	unknown := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: dlq, Err: kerr.UnknownTopicOrPartition, Count: -1})
	_, err := replays.Check(t.Context(), []*kgo.Record{replay}, dlq)
	require.ErrorIs(t, err, kerr.UnknownTopicOrPartition)
	require.NotErrorIs(t, err, ErrNoReplay)
	replays.missing[dlq] = time.Now().Add(-missingPatience)
	for range 2 {
		answers, err := replays.Check(t.Context(), []*kgo.Record{replay}, dlq)
		require.NoError(t, err)
		require.ErrorIs(t, answers[0].Err, ErrNoReplay)
	}
	unknown.Remove()
	answers, err := replays.Check(t.Context(), []*kgo.Record{replay}, dlq)
	require.NoError(t, err)
	require.NoError(t, answers[0].Err)
	require.Empty(t, replays.missing, "another outage is another wait")
}

// A dead letter in a batch that cannot be decoded is none that can be looked at, so that its replay has its partition
// wait no longer.
func TestReplayOfADamagedBatch(t *testing.T) {
	t.Parallel()
	cluster, replays, replay := replayFixture(t)
	damaged := kmsg.RecordBatch{Magic: 2, NumRecords: 1, Records: []byte("damaged")}
	const lengthEnds = 12
	damaged.Length = int32(len(damaged.AppendTo(nil)) - lengthEnds)
	cluster.ControlKey(int16(kmsg.Fetch), func(request kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		fetch := request.(*kmsg.FetchRequest)
		response := fetch.ResponseKind().(*kmsg.FetchResponse)
		one := kmsg.NewFetchResponseTopicPartition()
		one.HighWatermark, one.LastStableOffset, one.RecordBatches = 1, 1, damaged.AppendTo(nil)
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic, topic.TopicID, topic.Partitions = fetch.Topics[0].Topic, fetch.Topics[0].TopicID, append(topic.Partitions, one)
		response.Topics = append(response.Topics, topic)
		return response, nil, true
	})
	answers, err := replays.Check(t.Context(), []*kgo.Record{replay}, "orders.dlq")
	require.NoError(t, err)
	require.ErrorIs(t, answers[0].Err, ErrNoReplay)
}
