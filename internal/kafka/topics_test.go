package kafka_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A topic gets more partitions while one of them is bad. The partition of a key is predicted
// by the new number, after a while.
func TestTopicsRefresh(t *testing.T) {
	t.Parallel()
	const age = 200 * time.Millisecond
	name := "refresh-" + uuid.NewString()
	testenv.CreateTopic(t, testenv.Brokers(t), name, 1)
	client, err := kgo.NewClient(kgo.SeedBrokers(testenv.Brokers(t)...), kgo.MetadataMaxAge(age), kgo.MetadataMinAge(age))
	require.NoError(t, err)
	defer client.Close()
	topics, ctx := kafka.TopicsOf(client), context.Background()
	require.Empty(t, topics.Learn(ctx, slices.Values([]string{name})))
	key := []byte("b") // in another one of 7 partitions
	require.EqualValues(t, 0, topics.Partition(name, key).Number)

	request := kmsg.NewPtrCreatePartitionsRequest()
	request.Topics = []kmsg.CreatePartitionsRequestTopic{{Topic: name, Count: 7}}
	request.TimeoutMillis = 5000
	response, err := request.RequestWith(ctx, client)
	require.NoError(t, err)
	require.Zero(t, response.Topics[0].ErrorCode)
	require.Eventually(t, func() bool {
		topics.Refresh(ctx, []string{name})
		return topics.Partition(name, key).Number != 0
	}, testenv.Patience, age/4)
}
