package itest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Parked events whose retries hang delay the retry of another event by less than a second, also if it is for the same
// action. Eight of them used to delay it until the handlers of the first four had used up HandlerTimeout.
func TestHangingRetriesDelayNoOther(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleNoTx"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			s.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 40 })
			const hanging, retryWait, late = 8, 100 * time.Millisecond, time.Second
			var hang atomic.Int64
			var due, retried atomic.Pointer[time.Time]
			now := func() *time.Time { at := time.Now(); return &at }
			h := s.handler(form, "COUNTED", func(ctx context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
				switch {
				case m.Attempt == 1 && e.Product == "quick":
					due.Store(now())
					return errPlay
				case m.Attempt == 1:
					return errPlay
				case e.Product == "quick":
					retried.Store(now())
					return nil
				}
				hang.Add(1)
				<-ctx.Done()
				return ctx.Err()
			})
			cfg := s.config(t)
			cfg.HandlerTimeout, cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 20*time.Second, retryWait, retryWait
			testenv.Run(t, s.groupConsumer(t, s.group, cfg, h).Run)
			for i := range hanging {
				s.send(t, s.sale(fmt.Sprint("hangs-", i), 1))
			}
			require.Eventually(t, func() bool { return hang.Load() >= 4 }, testenv.Patience, 10*time.Millisecond)
			s.send(t, s.sale("quick", 1))
			require.Eventually(t, func() bool { return retried.Load() != nil }, testenv.Patience, 10*time.Millisecond)
			by := retried.Load().Sub(*due.Load()) - retryWait
			t.Log("the retry came too late by", by)
			require.Less(t, by, late)
		})
	}
}

// An action whose handler takes long has at most half of the lanes of a worker while another one has events.
func TestSlowActionHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleNoTx"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			const events, slow, most = 32, 3 * time.Second, 8 * time.Second
			var calling, quick atomic.Int64
			handler := func(action string, do func()) outbox.Handler {
				if form == "HandleNoTx" {
					return outbox.HandleNoTx(action, func(context.Context, step, outbox.Metadata) error { do(); return nil })
				}
				return outbox.Handle(action, func(context.Context, pgx.Tx, step, outbox.Metadata) error { do(); return nil })
			}
			f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 4}},
				handler("SLOW", func() { calling.Add(1); defer calling.Add(-1); time.Sleep(slow) }),
				handler("QUICK", func() { quick.Add(1) }))
			began := time.Now()
			for i := range events {
				f.commit(step{fmt.Sprint("a-", i), 1})
			}
			require.Eventually(t, func() bool { return quick.Load() == events }, testenv.Patience, 10*time.Millisecond)
			took := time.Since(began)
			t.Log("the other action took", took)
			require.Less(t, took, most)
			require.Positive(t, calling.Load(), "the slow action is not done")
		})
	}
}

// Slow deliveries are shared by workers within a second, or two if the first worker has claimed many of them because
// the ones before were quick. It used to keep them until it had handled its batches.
func TestSlowDeliveriesAreShared(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]int{"from the start": 0, "after quick ones": 2000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			f.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 40 })
			const events, slow, late = 80, 400 * time.Millisecond, 3 * time.Second
			var first [3]atomic.Pointer[time.Time]
			handler := func(worker int) outbox.Handler {
				return f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
					if s.Account == "quick" {
						return nil
					}
					now := time.Now()
					first[worker].CompareAndSwap(nil, &now)
					time.Sleep(slow)
					return nil
				})
			}
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 4}}
			var steps, quick []step
			for i := range events {
				steps = append(steps, step{fmt.Sprint("a-", i), 1})
			}
			for i := range before {
				quick = append(quick, step{"quick", i})
			}
			f.commit(quick...)
			f.start(cfg, handler(0))
			f.eventually(`SELECT count(*) FROM {schema}.effect`, before)
			f.commit(steps...)
			require.Eventually(t, func() bool { return first[0].Load() != nil }, testenv.Patience, time.Millisecond)
			began := time.Now()
			f.start(cfg, handler(1))
			f.start(cfg, handler(2))
			f.eventually(`SELECT count(*) FROM {schema}.effect`, before+events)
			t.Log("all are done after", time.Since(began))
			for _, worker := range []int{1, 2} {
				at := first[worker].Load()
				require.NotNil(t, at, "worker %d got none", worker)
				t.Log("a worker got its first one after", at.Sub(began))
				require.Less(t, at.Sub(began), late)
			}
			require.Equal(t, before+events, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`))
		})
	}
}
