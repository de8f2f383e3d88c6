package itest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// tidyWorker is a worker that cleans all the time.
func tidyWorker() outbox.WorkerConfig {
	return outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 10 * time.Millisecond, Lease: time.Second,
		Retention: outbox.RetentionConfig{CursorsFor: 50 * time.Millisecond}}
}

// age makes all rows old enough to go.
func (f *workerFixture) age() {
	f.t.Helper()
	testenv.UpdateEvents(f.t, f.db, f.sql(`UPDATE {schema}.outbox SET created_at = created_at - '400 days'::interval`))
	f.exec(`UPDATE {schema}.event_delivery SET created_at = created_at - '400 days'::interval, processed_at = processed_at - '400 days'::interval,
	               resolved_at = resolved_at - '400 days'::interval`)
	f.exec(`UPDATE {schema}.event_handled SET handled_at = handled_at - '400 days'::interval`)
	f.exec(`UPDATE {schema}.outbox_audit SET created_at = created_at - '400 days'::interval`)
}

func (f *workerFixture) eventually(sql string, want int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return f.count(sql) == want }, testenv.Patience, 10*time.Millisecond, "%s is %d", sql, want)
}

// Where no relay runs, a worker removes what is not kept any longer. What is open stays, and what is
// DEAD until an operator has decided.
func TestWorkerCleans(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := tidyWorker()
	cfg.Concurrency = 1                // a note that commits behind a later one is looked at a day later
	var removed outbox.RetentionResult // only the goroutine that cleans, until it is stopped
	cfg.Hooks.RowsRemoved = func(r outbox.RetentionResult) {
		removed.Published, removed.Handled, removed.Audited, removed.Delivered = removed.Published+r.Published, removed.Handled+r.Handled, removed.Audited+r.Audited, removed.Delivered+r.Delivered
	}
	_, stop := f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		switch s.Account {
		case "dead":
			return outbox.Permanent(errTest)
		case "retried":
			return outbox.RetryAfter(errTest, time.Hour)
		}
		return nil
	}))
	f.commit(step{"a", 1}, step{"b", 1}, step{"dead", 1}, step{"dead", 2}, step{"retried", 1}, step{"retried", 2})
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 2)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`, 2)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING'`, 1)
	ops, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	dead := f.count(`SELECT min(id) FROM {schema}.event_delivery WHERE status = 'DEAD'`)
	err = ops.Resolve(t.Context(), outboxops.FailureID{Kind: outboxops.KindDelivery, Number: int64(dead)}, outboxops.AuditInfo{Operator: "kim", Reason: "not needed"})
	require.NoError(t, err)
	f.age()

	f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)
	f.eventually(`SELECT count(*) FROM {schema}.event_handled`, 0)
	f.eventually(`SELECT count(*) FROM {schema}.outbox_audit`, 0)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery`, 3)
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND resolved_at IS NULL`))
	require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('PENDING', 'PARKED')`))
	stop()
	require.Equal(t, outbox.RetentionResult{Published: 6, Handled: 2, Audited: 1, Delivered: 3}, removed)
}

// A relay may have an archive, and keeps rows as long as it says: where one has a position, workers remove nothing.
func TestWorkerLeavesCleaningToRelays(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.exec(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
	        SELECT 'default', 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system()`)
	_, stop := f.start(tidyWorker(), f.effects("COUNTED", nil))
	f.commit(step{"a", 1}, step{"b", 1})
	f.await(2)
	f.age()
	time.Sleep(200 * time.Millisecond)
	require.Equal(t, []int{2, 2, 2}, []int{f.count(`SELECT count(*) FROM {schema}.outbox`), f.count(`SELECT count(*) FROM {schema}.event_delivery`),
		f.count(`SELECT count(*) FROM {schema}.event_handled`)})
	stop()
	f.exec(`DELETE FROM {schema}.outbox_cursor WHERE relay = 'default'`)
	f.start(tidyWorker(), f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery`, 0)
}

// Events stay until all groups have them, and the log names the one that lags.
func TestWorkerKeepsWhatAnotherGroupHasNot(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	_, stop := f.startGroup("lagging", outbox.WorkerConfig{}, f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.outbox_cursor WHERE relay = 'worker:lagging'`, 1)
	stop()
	log := new(workerLog)
	cfg := tidyWorker()
	cfg.Logger = log.logger()
	f.start(cfg, f.effects("COUNTED", nil))
	f.commit(step{"a", 1})
	f.await(1)
	f.age()
	require.Eventually(t, func() bool { return log.count("lagging_group=lagging") > 0 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.outbox`))
	f.startGroup("lagging", outbox.WorkerConfig{}, f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)
	f.await(2)
}

// One process of a group cleans. When it stops, another one does.
func TestOneWorkerOfAGroupCleans(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	const holder = `SELECT count(*) FROM {schema}.outbox_lease WHERE name = 'worker:bank' AND expires_at > clock_timestamp()`
	_, stop := f.start(tidyWorker(), f.effects("COUNTED", nil))
	f.eventually(holder, 1)
	epoch := f.count(`SELECT epoch FROM {schema}.outbox_lease`)
	f.start(tidyWorker(), f.effects("COUNTED", nil))
	time.Sleep(1500 * time.Millisecond) // longer than the lease
	require.Equal(t, epoch, f.count(`SELECT epoch FROM {schema}.outbox_lease`))
	stop()
	require.Eventually(t, func() bool { return f.count(`SELECT epoch FROM {schema}.outbox_lease`) > epoch }, testenv.Patience, 10*time.Millisecond)
	f.commit(step{"a", 1})
	f.await(1)
	f.age()
	f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)
}

// A database that was restored into another cluster: what the group had is not handled again, and what it
// had not got is handled. One process moves the positions, the others wait for it.
func TestWorkerInAnotherCluster(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	_, stop := f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, f.effects("COUNTED", nil))
	f.commit(step{"a", 1}, step{"a", 2})
	f.await(2)
	stop()
	f.commit(step{"a", 3}, step{"b", 1})
	f.exec(`UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
	f.exec(`DELETE FROM {schema}.event_handled`) // a repeat would show
	log := new(workerLog)
	for range 3 {
		cfg := tidyWorker()
		cfg.Retention = outbox.RetentionConfig{}
		cfg.Logger = log.logger()
		f.start(cfg, f.effects("COUNTED", nil))
	}
	f.await(4)
	f.commit(step{"a", 4})
	f.await(5)
	f.requireOrder()
	require.Equal(t, 1, log.count("restored from another cluster"))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 5)

	// So does a worker that runs, whose connections come to a copy.
	f.exec(`UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
	f.exec(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
	        SELECT relay, last_processed_id, snapshot, highest_id, system_identifier, 1 FROM {schema}.outbox_cursor ORDER BY id DESC LIMIT 1`)
	f.commit(step{"a", 5})
	f.await(6)
	f.requireOrder()
}

// A sequence that is behind gives new events the ids of others: Run returns, for an operator.
func TestWorkerSequenceBehind(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.commit(step{"a", 1}, step{"a", 2})
	f.exec(`SELECT setval('{schema}.outbox_id_seq', 1)`)
	w, err := outbox.NewWorker(f.db, f.events, "bank", f.config(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}), f.effects("COUNTED", nil))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	require.ErrorIs(t, w.Run(ctx), outbox.ErrSequenceBehind)
	health := w.Health()
	require.False(t, health.Live)
	require.Contains(t, fmt.Sprint(health.Reasons), "outbox_id_seq")
}

// A group whose position was deleted begins in front of all events: what it has handled is a repeat.
func TestWorkerPositionDeleted(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.outbox_cursor`, 1)
	f.commit(step{"a", 1}, step{"b", 1})
	f.await(2)
	f.exec(`DELETE FROM {schema}.outbox_cursor`)
	f.commit(step{"a", 2})
	f.await(3)
	f.requireOrder()
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status <> 'DONE'`, 0)
	require.Equal(t, 5, f.count(`SELECT count(*) FROM {schema}.event_delivery`))
}

// Groups of workers are no relays.
func TestGroupsAreNoRelays(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.start(tidyWorker(), f.effects("COUNTED", nil))
	f.commit(step{"a", 1})
	f.await(1)
	f.eventually(`SELECT count(*) FROM {schema}.outbox_lease`, 1)
	inspector, err := outboxops.NewInspector(f.db, outboxops.InspectorConfig{Schema: f.schema})
	require.NoError(t, err)
	relays, err := inspector.Relays(t.Context())
	require.NoError(t, err)
	require.Empty(t, relays)
	events, err := inspector.Events(t.Context(), outboxops.EventFilter{}, outboxops.EventPage{})
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.Empty(t, events[0].AttemptedBy)
	require.Empty(t, events[0].PendingFor)

	for _, name := range []string{"worker:bank", "consumer:bank"} {
		_, err = outbox.NewRelay(f.db, nil, outbox.RelayConfig{Name: name})
		require.ErrorContains(t, err, "field Name")
	}
}

// A sequence of event_delivery that is behind loses no delivery of a worker and disturbs no order, whether the ids are
// taken or free.
func TestWorkerDeliverySequenceBehind(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var open atomic.Bool
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxRetries: 100_000, RetryWait: 20 * time.Millisecond,
		MaxRetryWait: 20 * time.Millisecond}}, PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s.Account == "a" && !open.Load() {
			return errTest
		}
		return nil
	}))
	f.commit(step{"a", 1}, step{"a", 2}, step{"b", 1})
	f.await(1)
	for n, set := range []string{`SELECT setval('{schema}.event_delivery_id_seq', 1)`,
		`UPDATE {schema}.event_delivery SET id = id + 1000 WHERE status <> 'PROCESSING'; SELECT setval('{schema}.event_delivery_id_seq', 10)`} {
		f.exec(set)
		f.commit(step{"a", 3 + n}, step{"b", 2 + n})
		f.await(2 + n)
	}
	open.Store(true)
	f.await(7)
	f.requireOrder()
}
