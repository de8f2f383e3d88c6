package itest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Events that wait for a topic that is missing are in outbox_failed, and the relay calls none of
// them pending. They are alerted to like those that are, and the relay is not ready.
func TestEventsBehindMissingTopicAreAlertedTo(t *testing.T) {
	t.Parallel()
	h, _ := newPlacesFixture(t)
	missing := h.missing(t)
	box := &mailbox{}
	relay := h.plainRelay(t, outbox.RelayConfig{RetryInterval: time.Second, Alerts: outbox.AlertConfig{
		Alerter: box, Interval: 50 * time.Millisecond, StaleAfter: 2 * time.Second, StalePending: 200, ReportInterval: outbox.Forever,
	}})
	testenv.Run(t, relay.Run)
	missing.commit(t, keyed("lost", 150)...)
	missing.commit(t, numbered("lost-0", 2, 50)...)
	h.awaitStatuses(t, map[string]int{"waiting": 150, "parked": 50})
	require.True(t, relay.Health().Works, "not as old")

	a := box.await(t, outbox.AlertStale, false)
	require.Zero(t, a.Status.Pending)
	require.Contains(t, a.String(), "relay default: 200 events are not published, the oldest for ")
	require.Eventually(t, func() bool { return !relay.Health().Works }, testenv.Patience, 5*time.Millisecond)
	require.Contains(t, relay.Health().Reasons[0], "200 events are not published, the oldest for ")

	testenv.CreateTopic(t, missing.brokers, missing.topic, 1)
	h.awaitStatuses(t, map[string]int{})
	box.await(t, outbox.AlertStale, true)
	require.Eventually(t, func() bool { return relay.Health().Works }, testenv.Patience, 5*time.Millisecond)
}
