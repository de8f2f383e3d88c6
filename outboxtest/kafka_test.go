package outboxtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

func client(t testing.TB, kafka []kgo.Opt, more ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append(append([]kgo.Opt{}, kafka...), more...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func send(c *kgo.Client, topic string, values ...string) error {
	var records []*kgo.Record
	for _, v := range values {
		records = append(records, &kgo.Record{Topic: topic, Key: []byte("key"), Value: []byte(v)})
	}
	return c.ProduceSync(background, records...).FirstErr()
}

func TestKafka(t *testing.T) {
	t.Parallel()
	kafka := outboxtest.Kafka(t, "order-events", "order-events.dlq")
	c := client(t, kafka, kgo.UnknownTopicRetries(1))
	require.NoError(t, send(c, "order-events", "1", "2", "3"))
	require.ErrorIs(t, send(c, "ordre-events", "1"), kerr.UnknownTopicOrPartition)
	topics, err := kadm.NewClient(c).ListTopics(background)
	require.NoError(t, err)
	require.Equal(t, []string{"order-events", "order-events.dlq"}, topics.Names())
	for _, topic := range topics {
		require.Len(t, topic.Partitions, 1)
	}
}

func TestKafkaWithoutTopics(t *testing.T) {
	t.Parallel()
	kafka := outboxtest.Kafka(t)
	require.NoError(t, send(client(t, kafka), "anything", "1"))
	require.EqualValues(t, 0, outboxtest.Records(background, t, kafka, "anything", 1)[0].Partition)
}

// Each test has a broker of its own, which ends with it.
func TestKafkaEnds(t *testing.T) {
	t.Parallel()
	f := new(fakeT)
	kafka := outboxtest.Kafka(f)
	c := client(t, kafka)
	require.NoError(t, c.Ping(background))
	for _, end := range f.cleanup {
		end()
	}
	require.Error(t, client(t, kafka).Ping(contextOf(t, 5*time.Second)))
	require.NoError(t, client(t, outboxtest.Kafka(t)).Ping(background))
}

// contextOf returns one that ends after d.
func contextOf(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(background, d)
	t.Cleanup(cancel)
	return ctx
}

// brokers are all that Records must be able to read.
func brokers(t *testing.T, test func(t *testing.T, kafka []kgo.Opt)) {
	t.Run("fake", func(t *testing.T) { test(t, outboxtest.Kafka(t)) })
	t.Run("real", func(t *testing.T) { test(t, testenv.KafkaOpts(testenv.RealBrokers(t))) })
}

func values(records []*kgo.Record) (values []string) {
	for _, r := range records {
		values = append(values, string(r.Value))
	}
	return values
}

func TestRecords(t *testing.T) {
	t.Parallel()
	brokers(t, func(t *testing.T, kafka []kgo.Opt) {
		topic := "test-" + uuid.NewString()
		require.Empty(t, outboxtest.Records(background, t, kafka, topic, 0), "a topic that is not there")
		sent := make(chan error)
		go func() { sent <- send(client(t, kafka), topic, "1", "2", "3") }()
		require.Equal(t, []string{"1", "2", "3"}, values(outboxtest.Records(background, t, kafka, topic, 3)), "they are waited for")
		require.NoError(t, <-sent)
		require.Equal(t, []string{"1", "2", "3"}, values(outboxtest.Records(background, t, kafka, topic, 3)), "again from the first on")
	})
}

// Topics need not begin at 0, and may have several partitions.
func TestRecordsOfPartitions(t *testing.T) {
	t.Parallel()
	brokers(t, func(t *testing.T, kafka []kgo.Opt) {
		topic := "test-" + uuid.NewString()
		c := client(t, kafka, kgo.RecordPartitioner(kgo.ManualPartitioner()))
		admin := kadm.NewClient(c)
		_, err := admin.CreateTopic(background, 3, 1, nil, topic)
		require.NoError(t, err)
		for _, r := range []kgo.Record{{Partition: 0, Value: []byte("gone")}, {Partition: 2, Value: []byte("gone")}, {Partition: 2, Value: []byte("stays")}} {
			r.Topic = topic
			require.NoError(t, c.ProduceSync(background, &r).FirstErr())
		}
		var cutOff kadm.Offsets
		for _, p := range []int32{0, 2} {
			cutOff.Add(kadm.Offset{Topic: topic, Partition: p, At: 1})
		}
		deleted, err := admin.DeleteRecords(background, cutOff)
		require.NoError(t, err)
		require.NoError(t, deleted.Error())
		require.Equal(t, []string{"stays"}, values(outboxtest.Records(background, t, kafka, topic, 1)))
	})
}

// What a transaction took back does not count, nor do the marks of transactions.
func TestRecordsOfTransactions(t *testing.T) {
	t.Parallel()
	brokers(t, func(t *testing.T, kafka []kgo.Opt) {
		topic := "test-" + uuid.NewString()
		c := client(t, kafka, kgo.TransactionalID(uuid.NewString()))
		for value, end := range map[string]kgo.TransactionEndTry{"aborted": kgo.TryAbort, "committed": kgo.TryCommit} {
			require.NoError(t, c.BeginTransaction())
			require.NoError(t, send(c, topic, value))
			require.NoError(t, c.EndTransaction(background, end))
		}
		require.Equal(t, []string{"committed"}, values(outboxtest.Records(background, t, kafka, topic, 1)))
	})
}

func TestRecordsFails(t *testing.T) {
	t.Parallel()
	kafka := outboxtest.Kafka(t)
	require.NoError(t, send(client(t, kafka), "topic", "1", "2"))
	for _, tt := range []struct {
		name, topic string
		n           int
		says        []string
	}{
		{"too few", "topic", 3, []string{"topic topic has 2 records, want 3:\n" + `  partition 0, offset 0, key "key": 1` + "\n"}},
		{"too many", "topic", 1, []string{"topic topic has 2 records, want 1:\n", `offset 1, key "key": 2`}},
		{"none wanted", "topic", 0, []string{"topic topic has 2 records, want 0:\n"}},
		{"no topic", "nowhere", 1, []string{"topic nowhere has 0 records, want 1:\n  none\n"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			says := failure(t, func(f *fakeT) { outboxtest.Records(contextOf(t, time.Second), f, kafka, tt.topic, tt.n) })
			for _, want := range tt.says {
				require.Contains(t, says, want)
			}
		})
	}
	says := failure(t, func(f *fakeT) {
		outboxtest.Records(contextOf(t, time.Second), f, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, "topic", 0)
	})
	require.Regexp(t, "^outboxtest: offsets of topic topic: ", says, "nobody knows")
	says = failure(t, func(f *fakeT) { outboxtest.Records(background, f, []kgo.Opt{kgo.RecordDeliveryTimeout(1)}, "topic", 0) })
	require.Contains(t, says, "kafka options: ")
	require.Empty(t, outboxtest.Records(contextOf(t, time.Millisecond), &fakeT{returns: true}, kafka, "topic", 3))
}
