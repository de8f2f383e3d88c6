package itest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// What is wrong with one topic delays no other one. Like those of relay_stop_test.go, these
// tests have a real broker and the options of franz-go as they are.

// A missing topic does not change the latency of another topic.
func TestMissingTopicDelaysNoOther(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	missing := h.missing(t)
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{}).Run)
	h.commit(t, numbered("first", 1, 1)...)
	for i := range 4 {
		missing.commit(t, keyed(fmt.Sprintf("lost-%d", i), 10)...)
		good := keyed(fmt.Sprintf("good-%d", i), 10)
		h.commit(t, good...)
		requireArrivalWithin(t, 5*time.Second, reader, good...)
	}
	h.awaitStatuses(t, map[string]int{"waiting": 40})
}

// A topic that is made after its events is used within seconds, and not after RetryInterval only.
func TestNewTopicIsUsedWithinSeconds(t *testing.T) {
	t.Parallel()
	h, _ := newPlacesFixture(t)
	missing := h.missing(t)
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{RetryInterval: time.Hour}).Run)
	lost := keyed("lost", 10)
	missing.commit(t, lost...)
	h.awaitStatuses(t, map[string]int{"waiting": 10})
	testenv.CreateTopic(t, missing.brokers, missing.topic, 3)
	requireArrivalWithin(t, 15*time.Second, missing.follow(t), lost...)
}

// Each event is for another partition of a topic that has too few replicas. Finding out that a partition accepts
// nothing delays no other topic, and does not open the breaker, because Kafka works.
func TestPartitionsWithoutReplicasDelayNoOther(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	h, reader := newPlacesFixture(t)
	short := h.elsewhere(t, "short-"+uuid.NewString())
	require.NoError(t, absent.CreateTopic(background, h.brokers, short.topic, 40, map[string]string{"min.insync.replicas": "2"}))
	relay := h.plainRelay(t, outbox.RelayConfig{Breaker: outbox.BreakerConfig{Window: 4}})
	testenv.Run(t, relay.Run)
	const rounds = 12
	var waiting []oracle.Event
	for i := range rounds {
		waiting = append(waiting, keyed(fmt.Sprintf("short-%d", i), 1)...)
		short.commit(t, waiting[i])
		good := keyed(fmt.Sprintf("good-%d", i), 1)
		h.commit(t, good...)
		requireArrivalWithin(t, 5*time.Second, reader, good...)
	}
	h.awaitStatuses(t, map[string]int{"waiting": rounds})
	require.Equal(t, outbox.BreakerClosed, relay.Health().Breaker)
	short.setTopic(t, "min.insync.replicas", "1")
	requireArrival(t, short.follow(t), waiting...)
	h.awaitStatuses(t, map[string]int{})
}

// A retry that is due is sent, however many others wait for a topic that is missing.
func TestMissingTopicDelaysNoRetry(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	missing := h.missing(t)
	h.setTopic(t, "max.message.bytes", "2000")
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{RetryInterval: time.Second}).Run)
	missing.commit(t, keyed("lost", 1000)...)
	h.awaitStatuses(t, map[string]int{"waiting": 1000})
	bad := poison("bad", 1)
	h.commit(t, bad)
	h.awaitStatuses(t, map[string]int{"waiting": 1000, "failed": 1})
	h.setTopic(t, "max.message.bytes", "1000000")
	requireArrivalWithin(t, 15*time.Second, reader, bad)
}

// When a topic is there, all that has waited for it is due at once, and sent in the order
// of each key.
func TestRecoveredTopicIsDrained(t *testing.T) {
	t.Parallel()
	h, _ := newPlacesFixture(t)
	missing := h.missing(t)
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{RetryInterval: time.Second}).Run)
	const keys, versions = 2000, 3
	all := make([][]oracle.Event, keys)
	for i := range all {
		all[i] = numbered(fmt.Sprintf("key-%d", i), 1, versions)
	}
	for version := range versions {
		var events []oracle.Event
		for i := range all {
			events = append(events, all[i][version])
		}
		missing.commit(t, events...)
	}
	h.awaitStatuses(t, map[string]int{"waiting": keys, "parked": keys * (versions - 1)})
	testenv.CreateTopic(t, missing.brokers, missing.topic, 3)
	began := time.Now()
	there := missing.follow(t)
	requireArrival(t, there, slices.Concat(all...)...)
	t.Logf("drained after %v", time.Since(began))
	require.Less(t, time.Since(began), 30*time.Second)
	h.awaitStatuses(t, map[string]int{})
	arrived, err := there.Arrived()
	require.NoError(t, err)
	require.Len(t, arrived, keys*versions, "each once")
	last := map[string]int64{}
	for _, e := range arrived {
		require.Equal(t, last[e.Key]+1, e.Version, "%s", e.Key)
		last[e.Key] = e.Version
	}
}

// requireArrivalWithin is requireArrival with a deadline that is part of what is tested.
func requireArrivalWithin(t *testing.T, d time.Duration, reader *oracle.Reader, events ...oracle.Event) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, e := range events {
			if !reader.Has(e.ID) {
				return false
			}
		}
		return true
	}, d, 5*time.Millisecond, "events did not arrive within %v", d)
}
