package itest

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// While a release is rolled out, processes that do not know its new handler make deliveries, too. None of
// its events is skipped.
func TestWorkersOfTwoReleases(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil))
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.event_subscription`) == 1 }, testenv.Patience, 10*time.Millisecond)
	f.commit(step{"before", 1})
	f.await(1)

	_, stop := f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes)`) == 2
	}, testenv.Patience, 10*time.Millisecond)
	const steps = 200
	for n := 1; n <= steps; n++ {
		f.commit(step{fmt.Sprint("a", n%3), (n-1)/3 + 1})
	}
	f.await(1 + 2*steps)
	f.requireOrder()

	// The new release is stopped: what only it handles waits for it.
	stop()
	f.commit(step{"waits", 1}, step{"waits", 2})
	f.await(1 + 2*steps + 2)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE action = 'SUMMED' AND status IN ('PENDING', 'PARKED')`) == 2
	}, testenv.Patience, 10*time.Millisecond)
	f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	f.await(1 + 2*steps + 4)
	f.requireOrder()

	// In the end, no events are owed to a handler that no worker has any more.
	f.exec(`UPDATE {schema}.event_subscription SET routes = routes || jsonb_build_object('bank.account.stepped.v1' || chr(10) || 'account-events' || chr(10) || 'GONE', 1), routes_version = routes_version + 1`)
	f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil))
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes)`) == 2
	}, testenv.Patience, 10*time.Millisecond)
}
