package itest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// records returns the first n records of the fixture's topic.
func (h *relayFixture) records(t testing.TB, n int) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(h.brokers), kgo.ConsumeTopics(h.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err())
		records = append(records, fetches.Records()...)
	}
	return records
}

// The hook tells of each event where Kafka has it, and the time of its record.
func TestSentHookHasPlaces(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	const events = 50
	for i := range events {
		h.commit(t, numbered(fmt.Sprint(i), 1, 1)...)
	}
	var mu sync.Mutex
	sent := map[string]string{}
	place := func(partition int32, offset int64, at time.Time) string {
		return fmt.Sprintf("%d/%d at %d", partition, offset, at.UnixMilli())
	}
	cfg := quick
	cfg.Hooks.Sent = func(b outbox.SentBatch) {
		mu.Lock()
		defer mu.Unlock()
		for e := range b.All() {
			sent[e.ID()] = place(e.Partition(), e.Offset(), e.SentAt())
		}
	}
	testenv.Run(t, h.relay(t, cfg).Run)
	read := map[string]string{}
	for _, r := range h.records(t, events) {
		read[eventIDOf(r)] = place(r.Partition, r.Offset, r.Timestamp)
	}
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(sent) == events
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, read, sent)
}
