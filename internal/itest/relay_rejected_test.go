package itest

import (
	"bytes"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Kafka rejects a request, and good events in it, before the relay has passed all events of the
// batch to the client. The later ones must not be accepted before the rejected ones are sent again.
func TestRejectionWhileEventsAreHandedOver(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "cleanup.policy", "compact") // it takes no record without a key
	reader := h.follow(t)
	good := numbered("a", 1, 2)
	poison := oracle.Event{ID: "00000000-0000-0000-0000-00000000000b", Key: "b", Version: 1, Filler: "loses its key"}
	h.commit(t, good[0], poison, good[1])
	cfg := quick
	cfg.Schema, cfg.Logger, cfg.RetryInterval = h.schema, slog.New(slog.DiscardHandler), time.Hour
	slow := &slowHandOver{poison: poison, first: good[0], last: good[1], rejected: make(chan struct{})}
	relay, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), kgo.WithHooks(slow)), cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	requireArrival(t, reader, good...)
	requireFirstsInOrder(t, reader, good)
}

// slowHandOver is a hook that holds the last event until Kafka has rejected the first one.
type slowHandOver struct {
	poison, first, last oracle.Event
	rejected            chan struct{}
	once                sync.Once
}

// OnProduceRecordBuffered implements [kgo.HookProduceRecordBuffered]. It is called before the
// client has the record.
func (s *slowHandOver) OnProduceRecordBuffered(r *kgo.Record) {
	switch {
	case bytes.Contains(r.Value, []byte(s.poison.ID)):
		r.Key = nil
	case bytes.Contains(r.Value, []byte(s.last.ID)):
		select {
		case <-s.rejected:
		case <-time.After(2 * time.Second): // it is not sent before the client has all of them
		}
	}
}

// OnProduceRecordUnbuffered implements [kgo.HookProduceRecordUnbuffered].
func (s *slowHandOver) OnProduceRecordUnbuffered(r *kgo.Record, err error) {
	if err != nil && bytes.Contains(r.Value, []byte(s.first.ID)) {
		s.once.Do(func() { close(s.rejected) })
	}
}

// By default an event that is too large is retried ten times. Then there are no more retries, and
// the row stays with its payload, for an operator's decision (T23).
func TestDeadAfterTenRetries(t *testing.T) {
	t.Parallel()
	h, _ := newPoisonedFixture(t)
	var rejected atomic.Int32
	cfg := quick
	cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait, cfg.Logger = time.Millisecond, time.Millisecond, slog.New(slog.DiscardHandler)
	cfg.Hooks.Rejected = func(outbox.FailedEvent) { rejected.Add(1) }
	testenv.Run(t, h.relay(t, cfg).Run)
	for n := range 2 { // while the second is tried, there was the time to try the first
		h.commit(t, poison(fmt.Sprint("bad-", n), 1))
		h.awaitStatuses(t, map[string]int{"dead": n + 1})
	}
	require.EqualValues(t, 2*10, rejected.Load(), "at first, and at nine retries; the tenth was the last")
	var whole int
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT count(*) FROM {s}.outbox_failed WHERE retry_count = 10 AND length(payload::text) > 5000`)).Scan(&whole))
	require.Equal(t, 2, whole)
}
