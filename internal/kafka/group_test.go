package kafka_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Kafka 4.4 answers a commit with the ids of topics only.
func TestRefusedCommitNamesTheTopic(t *testing.T) {
	t.Parallel()
	brokers, topic := testenv.Brokers(t), "test-"+uuid.NewString()
	testenv.CreateTopic(t, brokers, topic, 1)
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	require.NoError(t, err)
	defer client.Close()
	err = kafka.CommitGroupOffsets(t.Context(), client, "group-"+uuid.NewString(), map[kafka.Partition]int64{{Topic: topic, Number: 7}: 1})
	require.ErrorContains(t, err, topic+"/7")
}
