package itest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Deliveries of a worker that is gone are handled one at a time, and at once: the worker waited for
// its next poll before each of them, so that those of one process that was killed took minutes.
func TestWorkerHandlesSuspectsAtOnce(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	const accounts = 60
	for a := range accounts {
		f.commit(step{fmt.Sprint("a", a), 1})
	}
	counted := f.effects("COUNTED", nil)
	_, stop := f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, counted)
	f.await(accounts)
	stop()
	f.exec(`DELETE FROM {schema}.effect`)
	f.exec(`DELETE FROM {schema}.event_handled`)
	f.exec(`UPDATE {schema}.event_delivery SET status = 'PENDING', last_error_code = 'stale', processed_at = NULL`)
	began := time.Now()
	f.start(outbox.WorkerConfig{PollInterval: time.Second}, counted)
	f.await(accounts)
	require.Less(t, time.Since(began), accounts/2*time.Second)
	require.Equal(t, accounts, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 2`))
}

// A lane that loses its delivery while it waits for others to end their transactions gives its turn
// back. It kept it, and after as many losses as the pool has connections nothing was handled any more.
func TestWorkerGoesOnBehindLostDelivery(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 2 }) // one of them for a transaction
	const lease = time.Second
	called, release := make(chan struct{}, 1), make(chan struct{})
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Lease: lease, PollInterval: 50 * time.Millisecond}, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s.Account == "first" {
			called <- struct{}{}
			<-release
		}
		return nil
	}))
	f.commit(step{"first", 1})
	<-called
	f.commit(step{"second", 1})
	const second = `FROM {schema}.event_delivery WHERE aggregate_id = 'second' AND status = 'PROCESSING'`
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) `+second) == 1 }, 20*time.Second, 10*time.Millisecond)
	f.exec(`UPDATE {schema}.event_delivery SET locked_by = 'another worker' WHERE aggregate_id = 'second'`)
	time.Sleep(2 * lease)
	close(release)
	f.await(2)
}

// Deliveries of a worker that has ended in an outage of their handlers are trials, too. Otherwise an action whose only
// deliveries are of that kind would have none, and its breaker would stay open.
func TestSuspectsAreTrials(t *testing.T) {
	t.Parallel()
	f, changes, down := newWorkerFixture(t), new(changesOf), new(atomic.Bool)
	const accounts = 12
	for a := range accounts {
		f.commit(step{fmt.Sprint("a", a), 1})
	}
	cfg := outbox.WorkerConfig{HandlerConfig: trialRules(changes), PollInterval: 20 * time.Millisecond}
	down.Store(true)
	f.start(cfg, f.effects("COUNTED", func(step, outbox.Metadata) error {
		if down.Load() {
			return errDown
		}
		return nil
	}))
	require.Eventually(t, func() bool { return changes.has("half-open to open") }, testenv.Patience, time.Millisecond)
	require.Eventually(t, func() bool { // between two trials, and no trial begins before the handler works again
		tx, err := f.db.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(t.Context()) }()
		tag, err := tx.Exec(t.Context(), f.sql(`UPDATE {schema}.event_delivery SET last_error_code = 'stale' WHERE status = 'PENDING'`))
		require.NoError(t, err)
		if tag.RowsAffected() < accounts {
			return false
		}
		down.Store(false)
		return tx.Commit(t.Context()) == nil
	}, testenv.Patience, time.Millisecond)
	f.await(accounts)
}

// A suspect that hangs or is slow keeps no others waiting that have used up no attempt. One that has begun before when
// its process ended waits: it may be the one that ends processes, and each end counts for the slow one, too.
func TestSlowSuspectHoldsUpNoFreshOnes(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	const accounts = 60
	var steps []step
	for a := range accounts {
		steps = append(steps, step{fmt.Sprint("a", a), 1})
	}
	f.commit(steps...)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: time.Minute}
	f.insertDue(cfg, accounts)
	f.exec(`UPDATE {schema}.event_delivery SET last_error_code = 'stale', attempt_count = CASE aggregate_id WHEN 'a1' THEN 1 ELSE 0 END,
		next_retry_at = now() - CASE aggregate_id WHEN 'a0' THEN interval '2 min' WHEN 'a1' THEN interval '1 min' ELSE '0' END`)
	began, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s.Account == "a0" {
			close(began)
			<-goOn
		}
		return nil
	}))
	<-began
	f.eventually(`SELECT count(*) FROM {schema}.effect`, accounts-2)
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING' AND aggregate_id = 'a1' AND attempt_count = 1`))
	release()
	f.await(accounts)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = CASE aggregate_id WHEN 'a1' THEN 2 ELSE 1 END`, accounts)
}
