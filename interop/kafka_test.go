package interop

import (
	"context"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/google/uuid"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// newTopic makes a topic of the test's own, with one partition: what is sent to
// it comes in order.
func newTopic(t *testing.T, brokers []string) string {
	t.Helper()
	admin, err := sarama.NewClusterAdmin(brokers, sarama.NewConfig())
	require.NoError(t, err)
	defer func() { require.NoError(t, admin.Close()) }()
	topic := "interop-" + uuid.NewString()
	require.NoError(t, admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false))
	return topic
}

// consume reads a topic from its start with the client of the SDK's binding.
func consume(t *testing.T, brokers []string, topic string) <-chan *sarama.ConsumerMessage {
	t.Helper()
	consumer, err := sarama.NewConsumer(brokers, sarama.NewConfig())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, consumer.Close()) })
	partition, err := consumer.ConsumePartition(topic, 0, sarama.OffsetOldest)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, partition.Close()) })
	return partition.Messages()
}

func next(t *testing.T, messages <-chan *sarama.ConsumerMessage) *sarama.ConsumerMessage {
	t.Helper()
	select {
	case message := <-messages:
		return message
	case <-time.After(testenv.Patience):
		t.Fatal("nothing came")
		return nil
	}
}

// fetch returns the first n records of a topic, as our own client reads them.
func fetch(t *testing.T, brokers []string, topic string, n int) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(topic))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, fetches.Err())
		records = append(records, fetches.Records()...)
	}
	require.Len(t, records, n)
	return records
}
