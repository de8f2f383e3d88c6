package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// Topics that have failed and work again are remembered for an hour, for tries that began before.
func TestGoodPartitionsAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		bad := NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler)))
		topic := func(i int) kafka.Partition {
			return kafka.Partition{Topic: fmt.Sprint("topic-", i), Number: kafka.Unassigned}
		}
		fail := func(i int, began time.Time) { bad.Fail(topic(i), began, "unknown_topic", errors.New("unknown")) }
		const topics = 3_000
		for i := range topics {
			fail(i, time.Now())
		}
		require.Len(t, bad.Names(false), topics)
		began := time.Now()
		time.Sleep(time.Second)
		for i := range topics {
			bad.Accept(topic(i), time.Now())
		}
		fail(0, began)
		require.Empty(t, bad.Names(false), "the try began before the topic was good")
		time.Sleep(goodFor + time.Minute)
		fail(0, time.Now())
		require.True(t, bad.Accept(topic(0), time.Now()))
		require.Len(t, bad.accepted, 1)
		require.False(t, bad.Failing())
	})
}
