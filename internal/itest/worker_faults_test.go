package itest

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A handler that does not return holds up what it is at, and nothing else: what waits behind it in this
// process is handled by others, and Run returns.
func TestWorkerHangingHandler(t *testing.T) {
	t.Parallel()
	for _, unordered := range []bool{false, true} {
		t.Run(fmt.Sprint("unordered ", unordered), func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			release := make(chan struct{})
			t.Cleanup(func() { close(release) })
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 2, MaxPoll: 4, StopTimeout: time.Second}, Unordered: unordered, Lease: time.Second, PollInterval: 50 * time.Millisecond}
			cfg.HandlerTimeout = 500 * time.Millisecond
			var hung atomic.Int32
			w, stop := f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
				if s.Account == "hangs" && hung.Add(1) == 1 {
					<-release
				}
				return nil
			}))
			const keys, each = 40, 20 // more than fits into the queues of lanes
			f.commit(step{"hangs", 1})
			require.Eventually(t, func() bool { return hung.Load() == 1 }, testenv.Patience, time.Millisecond)
			for n := 1; n <= each; n++ {
				var steps []step
				for k := range keys {
					steps = append(steps, step{fmt.Sprint("k", k), n})
				}
				f.commit(steps...)
			}
			f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account <> 'hangs'`, keys*each)
			require.Eventually(t, func() bool { return !w.Health().Live }, testenv.Patience, 10*time.Millisecond)
			// Its lease lapses: this process gives it to its other lane, or another process takes it.
			f.start(cfg, f.effects("COUNTED", nil))
			f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account = 'hangs'`, 1)
			began := time.Now()
			stop()
			require.Less(t, time.Since(began), 3*time.Second)
		})
	}
}

// Under REPEATABLE READ and SERIALIZABLE, what is renewed while a handler runs is not in the way of
// its transaction.
func TestWorkerUnderOtherIsolation(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // PgBouncer refuses connections with such a setting
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			db := testenv.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level })
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Lease: 3 * time.Second, PollInterval: 50 * time.Millisecond}
			cfg.Retry.MaxRetries = -1
			w := f.worker(db, "bank", cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
				if s.Account == "slow" {
					time.Sleep(4 * time.Second) // longer than the lease
				}
				return nil
			}))
			testenv.Run(t, w.Run)
			for n := 1; n <= 30; n++ {
				f.commit(step{"a", n}, step{"b", n})
			}
			f.commit(step{"slow", 1}, step{"slow", 2})
			f.eventually(`SELECT count(*) FROM {schema}.effect`, 62)
			f.requireOrder()
			require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE attempt_count <> 1`))
		})
	}
}

// Under these levels rows are not renewed while a transaction has them. When it is rolled back after longer than
// their lease, they are renewed before others take them.
func TestWorkerRepeatsUnderOtherIsolation(t *testing.T) {
	testenv.Direct(t) // a setting of the session
	t.Parallel()
	f := newWorkerFixture(t)
	db := testenv.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" })
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Lease: 2 * time.Second, PollInterval: 50 * time.Millisecond}
	var calls atomic.Int32
	var repeated, renewed atomic.Bool
	w := f.worker(db, "bank", cfg, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, s step, m outbox.Metadata) error {
		if calls.Add(1) == 1 {
			time.Sleep(cfg.Lease * 3 / 2)
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = 'serialization_failure'; END $$`)
			return err
		}
		if !repeated.Swap(true) {
			// In the moment between, it may have been taken, which was another attempt.
			renewed.Store(m.Attempt > 1 || f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = $1 AND locked_until > clock_timestamp()`, s.Account) > 0)
		}
		_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('COUNTED', $1, $2)`), s.Account, s.N)
		return err
	}))
	testenv.Run(t, w.Run)
	f.commit(step{"a", 1}, step{"a", 2})
	f.await(2)
	require.True(t, renewed.Load())
}

// A handler may leave its transaction in a state in which the delivery cannot be ended. That is an
// error of its own: other events go on.
func TestWorkerHandlerChangesSettings(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	role := "outbox_test_" + f.schema[len(f.schema)-8:]
	f.exec(`CREATE ROLE ` + role)
	t.Cleanup(func() { f.exec(`DROP OWNED BY ` + role); f.exec(`DROP ROLE ` + role) })
	f.exec(`GRANT USAGE ON SCHEMA {schema} TO ` + role)
	f.exec(`CREATE FUNCTION {schema}.become() RETURNS text LANGUAGE sql AS $$ SELECT set_config('role', '` + role + `', true) $$`)
	set := map[string]string{
		"role":      `SET LOCAL ROLE ` + role,
		"function":  `SELECT {schema}.become()`,
		"timeout":   `SET LOCAL statement_timeout = 50`,
		"path":      `SET LOCAL search_path = pg_temp`,
		"lock":      `SET LOCAL lock_timeout = 1`,
		"read only": `SET TRANSACTION READ ONLY`,
		"session":   `SET LOCAL SESSION AUTHORIZATION ` + role,
	}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	cfg.Retry.MaxRetries = -1
	f.start(cfg, outbox.Handle("SET", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
		if _, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('SET', $1, $2)`), s.Account, s.N); err != nil {
			return err
		}
		sql := set[s.Account]
		if sql == "" {
			return nil
		}
		_, err := tx.Exec(ctx, f.sql(sql))
		return err
	}))
	var steps []step
	for name := range set {
		steps = append(steps, step{"before " + name, 1}, step{name, 1}, step{name, 2}, step{"behind " + name, 1})
	}
	f.commit(steps...)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, 4*len(set))
	require.Equal(t, 4*len(set)-2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`))
	require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND aggregate_id = 'read only'`))
	f.requireOrder()
}

// Pause ends a batch between two events: what handlers have done is committed, and the rest waits.
func TestWorkerPauseWithinBatch(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var steps []step
	for n := 1; n <= 50; n++ {
		steps = append(steps, step{"a", n})
	}
	f.commit(steps...)
	var mu sync.Mutex
	calls := 0
	paused := make(chan struct{})
	var w *outbox.Worker
	ready := make(chan struct{})
	w, _ = f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		<-ready
		mu.Lock()
		defer mu.Unlock()
		if calls++; s.N == 5 {
			require.NoError(t, w.Pause(w.Topics()...))
			close(paused)
		}
		return nil
	}))
	close(ready)
	<-paused
	f.eventually(`SELECT count(*) FROM {schema}.effect`, 5)
	f.commit(step{"b", 1})
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('PENDING', 'PARKED') AND attempt_count = 0`, 46)
	mu.Lock()
	require.Equal(t, 5, calls)
	mu.Unlock()
	require.NoError(t, w.Resume(w.Topics()...))
	f.await(51)
	f.requireOrder()
}
