package itest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// Each group gets all events, also if the handlers of another group, with the same name for its
// action, fail for ever.
func TestWorkersOfManyGroups(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	const accounts, steps = 20, 30
	var failed atomic.Int64
	failing := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	failing.Retry = outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: 20 * time.Millisecond, RetriesFor: func(error) int { return 1 << 20 }, MaxOutage: -1}
	w, _ := f.startGroup("failing", failing, f.effects("COUNTED", func(step, outbox.Metadata) error { failed.Add(1); return errTest }))
	works := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	for range 2 {
		f.startGroup("bank", works, f.effects("COUNTED", nil))
		f.startGroup("shop", works, f.effects("SUMMED", nil), f.effects("SHOWN", nil))
	}
	before := 0
	require.Eventually(t, func() bool {
		f.commit(step{"before", 1})
		before++
		return failed.Load() > 0
	}, testenv.Patience, 10*time.Millisecond)
	f.eventually(`SELECT count(*) FROM {schema}.effect`, 3*before)
	f.exec(`DELETE FROM {schema}.effect`)
	for n := 1; n <= steps; n++ {
		var all []step
		for a := range accounts {
			all = append(all, step{fmt.Sprint("a", a), n})
		}
		f.commit(all...)
	}
	f.eventually(`SELECT count(*) FROM {schema}.effect`, 3*accounts*steps)
	f.requireOrder()
	require.Equal(t, 3*accounts*steps, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND aggregate_id <> 'before'`))
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE attempt_count <> 1 AND status = 'DONE'`))

	// Of the group that fails, each key is at its first event.
	f.eventually(`SELECT count(DISTINCT order_key) FROM {schema}.event_delivery WHERE consumer_group = 'failing' AND attempt_count > 3`, accounts+1)
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery AS d WHERE consumer_group = 'failing' AND attempt_count > 0
		AND EXISTS (SELECT FROM {schema}.event_delivery AS b WHERE b.order_key = d.order_key AND b.consumer_group = d.consumer_group AND b.id < d.id)`))
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE consumer_group = 'failing' AND status IN ('DONE', 'DEAD')`))
	require.True(t, w.Health().Works, w.Health().Reasons)
}

// A key with thousands of followers is handled in order and once, by workers that share it and fail at some
// of its events, and holds up no other key.
func TestWorkersOfAHotKey(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newWorkerFixture(t)
	const followers, others = 2100, 50
	var steps []step
	for n := 1; n <= followers; n++ {
		steps = append(steps, step{"hot", n})
	}
	f.commit(steps...)
	release := make(chan struct{})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	cfg.Retry.RetryWait = time.Millisecond
	for range 3 {
		f.start(cfg, f.effects("COUNTED", func(s step, m outbox.Metadata) error {
			if s.Account == "hot" {
				<-release
				if s.N%300 == 7 && m.Attempt == 1 {
					return errTest
				}
			}
			return nil
		}))
	}
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery`, followers)
	for n := 1; n <= others; n++ {
		f.commit(step{"calm", n})
	}
	f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account = 'calm'`, others)
	close(release)
	f.eventually(`SELECT count(*) FROM {schema}.effect`, followers+others)
	f.requireOrder()
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, followers+others-followers/300)
	require.Equal(t, followers/300, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 2`))
}

// Events of transactions that commit late, behind others with higher ids, are handled, whether the position is
// between windows or within one.
func TestWorkerHandlesLateCommits(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	begin := func(s ...step) pgx.Tx {
		tx, err := f.db.Begin(t.Context())
		require.NoError(t, err)
		for _, one := range s {
			require.NoError(t, f.rec.Record(t.Context(), tx, one))
		}
		return tx
	}
	const late = 5
	var open []pgx.Tx
	for i := range late {
		open = append(open, begin(step{fmt.Sprint("late", i), 1}, step{fmt.Sprint("late", i), 2}))
	}
	for n := 1; n <= 30; n++ {
		f.commit(step{"a", n})
	}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	for range 2 {
		f.start(cfg, f.effects("COUNTED", nil))
	}
	f.eventually(`SELECT count(*) FROM {schema}.effect`, 30)
	want := 30
	for i, tx := range open[:late-1] { // each of them while others go on
		rolledBack := begin(step{"never", 1})
		require.NoError(t, rolledBack.Rollback(t.Context()))
		require.NoError(t, tx.Commit(t.Context()))
		f.commit(step{"b", i + 1})
		want += 3
		f.eventually(`SELECT count(*) FROM {schema}.effect`, want)
	}
	// The last one commits while a backlog is paged that began before and ends behind it.
	const backlog = 3000
	var steps []step
	for n := 1; n <= backlog; n++ {
		steps = append(steps, step{fmt.Sprint("c", n%50), (n-1)/50 + 1})
	}
	f.commit(steps...)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.outbox_cursor WHERE window_snapshot IS NOT NULL`) > 0
	}, testenv.Patience, time.Millisecond)
	require.NoError(t, open[late-1].Commit(t.Context()))
	want += backlog + 2
	f.eventually(`SELECT count(*) FROM {schema}.effect`, want)
	f.requireOrder()
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, want)
}

// A relay and a group of workers on the same outbox each get all events, and rows stay until both have them.
func TestWorkerBesideRelay(t *testing.T) {
	t.Parallel()
	f := newMoveFixture(t)
	f.retention = outbox.RetentionConfig{PublishedFor: time.Nanosecond}
	opts := slices.Clone(f.opts)
	f.startRelay("default")
	f.eventually(`SELECT count(*) FROM {schema}.outbox_cursor WHERE relay = 'default'`, 1)
	for range 2 {
		f.startWorker()
	}
	f.eventually(`SELECT count(*) FROM {schema}.outbox_cursor WHERE relay = 'worker:bank'`, 1)
	stop := f.record()
	time.Sleep(time.Second)
	stop()
	f.backlog(2000)
	f.requireExact()
	f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)

	client, err := kgo.NewClient(append(opts, kgo.ConsumeTopics(must(f.events.Topic("bank.account.stepped.v1"))), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	seen := map[string]int{}
	for n := 0; n < 10*f.n+f.m; {
		fetches := client.PollFetches(ctx)
		require.NoError(t, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			n++
			seen[string(r.Key)]++
		})
	}
	require.Len(t, seen, 11)
	for account, n := range seen {
		if account == "backlog" {
			require.Equal(t, f.m, n)
		} else {
			require.Equal(t, f.n, n, account)
		}
	}
	inspector := must(outboxops.NewInspector(f.db, outboxops.InspectorConfig{Schema: f.schema}))
	require.Len(t, must(inspector.Relays(t.Context())), 1)
}

// A worker does all its work with few connections. With two, its handlers have one more for themselves.
func TestWorkerWithFewConnections(t *testing.T) {
	t.Parallel()
	for most := range int32(3) {
		most++
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = most })
			const accounts, steps = 5, 40
			log := new(workerLog)
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, StopTimeout: 2 * time.Second}, PollInterval: 20 * time.Millisecond, Lease: 3 * time.Second,
				Retention: outbox.RetentionConfig{PublishedFor: time.Nanosecond}}
			cfg.Retry.RetryWait, cfg.Logger = time.Millisecond, log.logger()
			look := func() error {
				if most == 1 {
					return nil
				}
				_, err := db.Exec(context.Background(), `SELECT 1`)
				return err
			}
			var pushed atomic.Int64
			w := f.worker(db, "bank", cfg, f.effects("COUNTED", func(s step, m outbox.Metadata) error {
				if s.N%20 == 3 && m.Attempt == 1 {
					return errTest
				}
				return look()
			}), outbox.HandleNoTx("PUSHED", func(context.Context, step, outbox.Metadata) error { pushed.Add(1); return look() }))
			stop := testenv.Run(t, w.Run)
			for n := 1; n <= steps; n++ {
				for a := range accounts {
					f.commit(step{fmt.Sprint("a", a), n})
				}
			}
			f.eventually(`SELECT count(*) FROM {schema}.effect`, accounts*steps)
			f.requireOrder()
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 2*accounts*steps)
			require.EqualValues(t, accounts*steps, pushed.Load())
			f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)
			require.True(t, w.Health().Works, w.Health().Reasons)
			began := time.Now()
			stop()
			require.Less(t, time.Since(began), 2500*time.Millisecond)
			require.Zero(t, log.count("level=ERROR"), log.String())
			require.Zero(t, log.count("could not be renewed"), log.String())
		})
	}
}

// A worker works in every mode in which pgx runs statements, also those that PgBouncer needs.
func TestWorkerInEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			var archived atomic.Int64
			log := new(workerLog)
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond, Lease: 6 * time.Second,
				Retention: outbox.RetentionConfig{PublishedFor: time.Nanosecond, CursorsFor: time.Nanosecond,
					Archive: func(_ context.Context, _ pgx.Tx, rows []outbox.ArchivedEvent) error {
						archived.Add(int64(len(rows)))
						return nil
					}}}
			cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.HoldDead, cfg.Logger = time.Millisecond, 1, true, log.logger()
			cfg.Retry.MaxOutage = -1
			db := testenv.PoolIn(t, mode)
			handler := f.effects("COUNTED", func(s step, m outbox.Metadata) error {
				switch {
				case s.Account == "dead", s.Account == "again" && m.Attempt == 1:
					return errTest
				case s.Account == "slow":
					time.Sleep(2500 * time.Millisecond) // its lease is renewed
				}
				return nil
			})
			const accounts, steps = 40, 30
			for n := 1; n <= steps; n++ {
				var all []step
				for a := range accounts {
					all = append(all, step{fmt.Sprint("a", a), n})
				}
				f.commit(all...)
			}
			w := f.worker(db, "bank", cfg, handler, outbox.HandleNoTx("PUSHED", func(context.Context, step, outbox.Metadata) error { return nil }))
			testenv.Run(t, w.Run)
			f.commit(step{"dead", 1}, step{"dead", 2}, step{"again", 1}, step{"again", 2}, step{"slow", 1})
			f.eventually(`SELECT count(*) FROM {schema}.effect`, accounts*steps+3)
			f.requireOrder()
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE held AND status = 'DEAD' AND attempt_count = 2 AND last_error_message = 'no luck'`, 1)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 2*(accounts*steps+5)-2)
			require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 2`))
			f.eventually(`SELECT count(*) FROM {schema}.outbox`, 0)
			require.EqualValues(t, accounts*steps+5, archived.Load())

			// What a worker had that is gone.
			f.exec(`UPDATE {schema}.event_delivery SET status = 'PROCESSING', processed_at = NULL, locked_by = 'gone', locked_until = now() - interval '1 min'
				WHERE action = 'PUSHED' AND aggregate_id = 'a1' AND position < 100`)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND last_error_code = 'stale'`,
				f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE action = 'PUSHED' AND aggregate_id = 'a1' AND position < 100`))
			require.True(t, w.Health().Works, w.Health().Reasons)
			require.Zero(t, log.count("outbox: PostgreSQL fails"), log.String())
		})
	}
}

// A worker whose group gets no events from outbox says why: it was moved to Kafka, comes back, or is starting.
func TestHealthSaysWhyAGroupGetsNoEvents(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	w, _ := f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil))
	f.commit(step{"a", 1})
	f.await(1)
	for _, is := range []struct{ set, reason string }{
		{"state = 'left', relay = 'relay'", "the group was moved to Kafka: only what was open is handled"},
		{"state = 'returning', relay = 'relay'", "the group comes back from Kafka: new events wait until its consumers have handled what Kafka has for them"},
		{"state = 'starting', relay = NULL, started = 7", "the group is starting: new events wait until outbox group start has ended, which makes the earlier deliveries"},
		{"state = 'active', relay = NULL, started = NULL", ""},
	} {
		f.exec(`UPDATE {schema}.event_subscription SET ` + is.set)
		require.Eventually(t, func() bool { return strings.Join(w.Health().Reasons, "; ") == is.reason }, testenv.Patience/4, 10*time.Millisecond,
			"%s: %v", is.set, w.Health().Reasons)
		require.True(t, w.Health().Works)
	}
}
