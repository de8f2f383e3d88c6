package kafka_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A partition that returns nothing before its end, as after an unclean change of its
// leader, is an error and not the end.
func TestReadNothing(t *testing.T) {
	t.Parallel()
	topic := "nothing-" + uuid.NewString()
	client, err := kgo.NewClient(testenv.KafkaOpts(testenv.Brokers(t))...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(context.Background(), &kgo.Record{Topic: topic, Value: []byte("v")}).FirstErr())
	reader := kafka.NewReader(client)
	spans, err := reader.Spans(context.Background(), topic, nil)
	require.NoError(t, err)
	for _, s := range spans {
		s.Next = s.End
		s.End += 5
		ctx, cancel := context.WithTimeout(context.Background(), 700*time.Millisecond)
		defer cancel()
		_, err := reader.Read(ctx, &s)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "read "+s.String()+" at offset ")
	}
}
