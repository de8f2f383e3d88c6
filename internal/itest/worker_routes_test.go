package itest

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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

// A failover to a standby that lagged loses routes of a group. Its workers write them again before they take events, so
// each event is owed to each handler.
func TestRoutesSurviveAFailover(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	routes := func(n int) {
		f.eventually(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes)`, n)
	}
	_, stop := f.start(cfg, f.effects("COUNTED", nil))
	routes(1)
	f.exec(`CREATE TABLE {schema}.standby AS SELECT routes, routes_version FROM {schema}.event_subscription`)
	f.start(cfg, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	routes(2)
	stop()
	f.start(cfg, f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.event_member`, 2) // it knows the new handler before it takes events
	f.commit(step{"a", 1})
	f.await(2)

	// The first events behind the failover come with it. All workers knew the handler.
	const steps = 20
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), f.sql(`UPDATE {schema}.event_subscription SET (routes, routes_version) = (SELECT routes, routes_version FROM {schema}.standby)`))
		require.NoError(t, err)
		for n := range steps {
			require.NoError(t, f.rec.Record(t.Context(), tx, step{"a", n + 2}))
		}
		return nil
	}))
	f.await(2 + 2*steps)

	// A third release starts behind the next one, with the version that the second had.
	f.exec(`UPDATE {schema}.event_subscription SET (routes, routes_version) = (SELECT routes, routes_version FROM {schema}.standby)`)
	f.start(cfg, f.effects("COUNTED", nil), f.effects("TRACED", nil))
	routes(3)
	for n := range steps {
		f.commit(step{"b", n + 1})
	}
	f.await(2 + 2*steps + 3*steps)
	f.requireOrder()
}

// PostgreSQL was away for more than an hour, so no worker could confirm its handlers. The first ones that confirm
// theirs afterwards do not take the others for gone. What was confirmed long before the outage still ages.
func TestRoutesOutliveAnOutage(t *testing.T) {
	t.Parallel()
	f, log := newWorkerFixture(t), new(workerLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}, PollInterval: 20 * time.Millisecond}
	stored := func(action string) {
		t.Helper()
		f.eventually(fmt.Sprintf(`SELECT count(*) FROM {schema}.event_subscription, jsonb_each(routes) AS r
			WHERE r.key LIKE '%%%s' AND r.value::bigint > extract(epoch FROM now() - interval '1 min')`, action), 1)
	}
	_, hold := f.start(cfg, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	stored("SUMMED")
	hold() // it is there again some seconds after the others
	f.exec(`UPDATE {schema}.event_subscription SET routes = (SELECT jsonb_object_agg(key, value::bigint - 61 * 60) FROM jsonb_each(routes))
		|| jsonb_build_object('bank.account.stepped.v1' || chr(10) || 'account-events' || chr(10) || 'OLD', extract(epoch FROM now() - interval '122 min')::bigint)`)
	f.start(cfg, f.effects("COUNTED", nil))
	stored("COUNTED")
	f.start(cfg, f.effects("COUNTED", nil), f.effects("TRACED", nil))
	stored("TRACED")
	f.commit(step{"a", 1})
	f.await(2)
	require.Equal(t, 1, log.count("has had this handler for an hour"), log.String())
	require.Equal(t, 1, log.count("action=OLD"), log.String())
	f.start(cfg, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	f.await(3)
}

// A handler that no worker has had for an hour is forgotten, and the log says which one.
func TestForgottenRouteIsLogged(t *testing.T) {
	t.Parallel()
	f, log := newWorkerFixture(t), new(workerLog)
	f.exec(`INSERT INTO {schema}.event_subscription (consumer_group, routes) VALUES ('bank', jsonb_build_object(
		'bank.account.stepped.v1' || chr(10) || 'account-events' || chr(10) || 'GONE', extract(epoch FROM now() - interval '61 min')::bigint,
		'bank.account.stepped.v1' || chr(10) || 'account-events' || chr(10) || 'STAYS', extract(epoch FROM now() - interval '59 min')::bigint,
		'bank.account.stepped.v1' || chr(10) || 'account-events' || chr(10) || 'RECENT', extract(epoch FROM now() - interval '11 min')::bigint))`)
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Logger: log.logger()}}, f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes) AS k WHERE k LIKE '%STAYS' OR k LIKE '%COUNTED'`, 2)
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes) AS k WHERE k LIKE '%GONE'`))
	const line = "has had this handler for an hour"
	require.Eventually(t, func() bool { return log.count(line) > 0 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 1, log.count(line), log.String())
	require.Regexp(t, `level=WARN .*type=bank.account.stepped.v1 stream=account-events action=GONE`, log.String())
}

// Workers of a group that gets its events from Kafka wait, and store their routes. The first worker of the group that
// takes events once it is back may be of an older release, and owes events to the handlers of all of them.
func TestWaitingWorkersStoreTheirRoutes(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	_, stop := f.start(cfg, f.effects("COUNTED", nil))
	f.commit(step{"a", 1})
	f.await(1)
	stop()
	f.exec(`UPDATE {schema}.event_subscription SET state = 'left', relay = 'relay'`)
	f.start(cfg, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes)`, 2)
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.event_delivery`), "it takes no events")
}

// blocked returns a handler whose calls wait for a release, and a channel that has a value when one has begun.
func (f *workerFixture) blocked(action string) (handler outbox.Handler, began <-chan struct{}, release func()) {
	called, goOn := make(chan struct{}, 1), make(chan struct{})
	return f.effects(action, func(step, outbox.Metadata) error {
		select {
		case called <- struct{}{}:
		default:
		}
		<-goOn
		return nil
	}), called, sync.OnceFunc(func() { close(goOn) })
}

// A worker that is ready has stored its handlers, also if all its lanes have had deliveries from the beginning. From
// then on, an older worker of the group makes deliveries for its new handler, too. It made none, and the events behind
// its position were lost for the new handler.
func TestReadyWorkerHasStoredItsRoutes(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1}, PollInterval: 20 * time.Millisecond}
	var steps []step
	for n := range 20 {
		steps = append(steps, step{fmt.Sprint("a", n), 1})
	}
	f.commit(steps...)
	old, oldBegan, releaseOld := f.blocked("SLOW")
	defer releaseOld()
	f.start(cfg, old)
	<-oldBegan
	latest, latestBegan, releaseLatest := f.blocked("SLOW")
	defer releaseLatest()
	w, _ := f.start(cfg, latest, f.effects("NEW", nil))
	<-latestBegan
	require.Eventually(t, func() bool { return w.Health().Ready }, testenv.Patience, time.Millisecond)
	require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes)`))

	releaseOld()
	f.commit(step{"new", 1})
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE action = 'SLOW' AND aggregate_id = 'new'`, 1)
	releaseLatest()
	f.eventually(`SELECT count(*) FROM {schema}.effect WHERE action = 'NEW' AND account = 'new'`, 1)
}

// While another session keeps a worker from storing its handlers, the worker is not ready and says why.
func TestWorkerWithoutRoutesIsNotReady(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	lock, err := f.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = lock.Rollback(t.Context()) }()
	_, err = lock.Exec(t.Context(), f.sql(`LOCK TABLE {schema}.event_subscription IN SHARE MODE`))
	require.NoError(t, err)
	w, _ := f.start(outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil))
	require.Eventually(t, func() bool {
		h := w.Health()
		return h.Live && !h.Ready && strings.Contains(fmt.Sprint(h.Reasons), "its handlers are not stored yet")
	}, testenv.Patience, time.Millisecond)
	require.NoError(t, lock.Rollback(t.Context()))
	require.Eventually(t, func() bool { h := w.Health(); return h.Ready && h.Works }, testenv.Patience, time.Millisecond)
}
