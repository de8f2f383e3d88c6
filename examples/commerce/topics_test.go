package main

import (
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

func TestMakeTopics(t *testing.T) {
	t.Parallel()
	kafka := testenv.KafkaOpts(testenv.Brokers(t))
	topic := "test-" + uuid.NewString()
	events, err := outbox.NewRegistry("commerce-api",
		outbox.Event("loopers.order.paid.v1", "Order", OrderPaidEventV1.order).Topic(topic),
		outbox.Event("loopers.order.created.v1", "Order", OrderCreatedEventV1.order).Topic(topic))
	require.NoError(t, err)
	for range 2 { // topics that are there stay as they are
		ensureTopics(t, kafka, events)
	}
	client, err := kgo.NewClient(kafka...)
	require.NoError(t, err)
	defer client.Close()
	requireTopic(t, client, topic, 3, 7*24*time.Hour)
	requireTopic(t, client, topic+".dlq", 1, 30*24*time.Hour)
}

// ensureTopics returns when the topics are there.
func ensureTopics(t *testing.T, kafka []kgo.Opt, events *outbox.Registry) {
	t.Helper()
	_, err := outboxtopics.Ensure(t.Context(), kafka, events, topics)
	require.NoError(t, err)
}

func requireTopic(t *testing.T, client *kgo.Client, topic string, partitions int, retention time.Duration) {
	t.Helper()
	admin := kadm.NewClient(client)
	require.Eventually(t, func() bool { // a new topic takes a moment to be known everywhere
		topics, err := admin.ListTopics(t.Context(), topic)
		return err == nil && topics[topic].Err == nil && len(topics[topic].Partitions) == partitions
	}, testenv.Patience, 10*time.Millisecond, "partitions of %s", topic)
	configs, err := admin.DescribeTopicConfigs(t.Context(), topic)
	require.NoError(t, err)
	values := map[string]string{}
	for _, c := range configs[0].Configs {
		values[c.Key] = c.MaybeValue()
	}
	require.Equal(t, strconv.FormatInt(retention.Milliseconds(), 10), values["retention.ms"], "retention of %s", topic)
}
