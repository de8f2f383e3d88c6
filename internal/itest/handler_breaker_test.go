package itest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// changesOf collects the changes of breakers.
type changesOf struct{ testenv.Kept[string] }

func (c *changesOf) note(action string, from, to outbox.BreakerState) {
	c.Add(fmt.Sprintf("%s %v to %v", action, from, to))
}

func (c *changesOf) has(change string) bool {
	return strings.Contains(strings.Join(c.All(), "; "), change)
}

var errDown = errors.New("the other service is down")

// While a dependency of a handler is unavailable, the events of its action wait in their
// partitions: few are parked, none is dead-lettered, and some are tried now and then. Health says so.
// Once the dependency is back, all are handled.
func TestConsumerBreaker(t *testing.T) {
	t.Parallel()
	for name, form := range map[string]func(func(context.Context) error, *consumerFixture) outbox.Handler{
		"with a transaction": func(try func(context.Context) error, s *consumerFixture) outbox.Handler {
			return outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
				if err := try(ctx); err != nil {
					return err
				}
				return s.count(ctx, tx, e, m)
			})
		},
		"without": func(try func(context.Context) error, s *consumerFixture) outbox.Handler {
			return outbox.HandleNoTx("COUNTED", func(ctx context.Context, e sale, m outbox.Metadata) error {
				if err := try(ctx); err != nil {
					return err
				}
				return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error { return s.count(ctx, tx, e, m) })
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newConsumerFixture(t, 2)
			var down atomic.Bool
			var tried atomic.Int64
			changes := new(changesOf)
			down.Store(true)
			const events = 400
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{
				Retry: outbox.RetryPolicy{RetryWait: time.Second, MaxRetries: 50}, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
				From: outbox.FromStart,
			}}
			c := s.consumer(t, cfg, form(func(context.Context) error {
				tried.Add(1)
				if down.Load() {
					return errDown
				}
				return nil
			}, s))
			var records []*kgo.Record
			for i := range events {
				r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p-%d","amount":1}`, i%2))
				r.Partition, r.Key = int32(i%2), fmt.Appendf(nil, "key-%d", i)
				records = append(records, r)
			}
			s.send(t, records...)
			testenv.Run(t, c.Run)
			require.Eventually(t, func() bool { return changes.has("COUNTED closed to open") }, testenv.Patience, 10*time.Millisecond)
			require.Eventually(t, func() bool {
				return strings.Contains(strings.Join(c.Health().Reasons, "; "), "the breaker of action COUNTED is open")
			}, testenv.Patience, time.Millisecond)
			require.True(t, c.Health().Works, "no restart helps, and other actions go on")
			before := tried.Load()
			require.Eventually(t, func() bool { return changes.has("COUNTED half-open to open; COUNTED open to half-open") }, testenv.Patience, 10*time.Millisecond)
			require.LessOrEqual(t, tried.Load()-before, int64(50), "few events are tried") // ten, and some of the next twenty
			require.Less(t, strings.Count(s.parked(t), "COUNTED"), events/2, "the others wait in their partitions")
			down.Store(false)
			require.Eventually(t, func() bool { n := s.counts(t); return n["p-0"] == events/2 && n["p-1"] == events/2 }, testenv.Patience, 10*time.Millisecond)
			require.True(t, changes.has("COUNTED half-open to closed"))
			require.Eventually(t, func() bool {
				return !strings.Contains(s.parked(t), "PENDING") && !strings.Contains(s.parked(t), "PARKED")
			}, testenv.Patience, 10*time.Millisecond)
			require.NotContains(t, s.parked(t), "DEAD")
		})
	}
}

// An event that fails again and again is no outage: the others of its action go on.
func TestBreakerIgnoresRetries(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	changes := new(changesOf)
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{
		Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: 10 * time.Millisecond, MaxRetries: 200, MaxOutage: -1}, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
		From: outbox.FromStart,
	}}
	c := s.consumer(t, cfg, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if e.Poison != "" {
			return errDown
		}
		return s.count(ctx, tx, e, m)
	}))
	testenv.Run(t, c.Run)
	bad := s.saleRecord(uuid.NewString(), []byte(`{"product":"p","poison":"always"}`))
	bad.Key = []byte("bad")
	s.send(t, bad)
	require.Eventually(t, func() bool { return strings.HasPrefix(s.parked(t), "COUNTED DEAD") }, testenv.Patience, 10*time.Millisecond)
	s.sendTo(t, 1, 10)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 10 }, testenv.Patience, 10*time.Millisecond)
	require.Empty(t, changes.All())
}

// A worker leaves what is owed to an action in its rows while its events fail: these use up no attempts.
func TestWorkerBreaker(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var down atomic.Bool
	down.Store(true)
	changes := new(changesOf)
	const events = 300
	var steps []step
	for n := range events {
		steps = append(steps, step{fmt.Sprint("account ", n), 1})
	}
	f.commit(steps...)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.Hooks.Breaker = time.Second, 20, changes.note
	f.start(cfg, f.effects("DONE", nil), outbox.Handle("SENT", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
		if down.Load() {
			return errDown
		}
		_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('SENT', $1, $2)`), s.Account, s.N)
		return err
	}))
	require.Eventually(t, func() bool { return changes.has("SENT half-open to open") }, testenv.Patience, 10*time.Millisecond)
	f.eventually(`SELECT count(*) FROM {schema}.effect WHERE action = 'DONE'`, events)
	require.Less(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE action = 'SENT' AND last_error_code IS NOT NULL`), events/2, "the others wait")
	require.False(t, changes.has("DONE"))
	down.Store(false)
	f.eventually(`SELECT count(*) FROM {schema}.effect WHERE action = 'SENT'`, events)
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`))
}

// Different events count for a breaker. Events that wait behind a failing event of their key do not count, because they
// are not tried. An event whose handler asks for a later try says nothing about what the handler needs. Its error
// opened the breaker, and the others waited for as long as it was open.
func TestBreakerIgnoresEarlyEvents(t *testing.T) {
	t.Parallel()
	const events = 40
	early := func(int) error { return outbox.RetryAfter(errTest, 100*time.Millisecond) }
	fails := func(int) error { return errTest }
	own := func(n int) string { return fmt.Sprint(n) }
	for name, tt := range map[string]struct {
		key    func(n int) string
		failed func(n, attempt int) bool
		err    func(n int) error
		opens  bool

		maxOutage time.Duration
	}{
		"each is early":         {key: own, failed: func(_, attempt int) bool { return attempt == 1 }, err: early},
		"each fails":            {key: own, failed: func(int, int) bool { return true }, err: fails, opens: true},
		"each fails once":       {key: own, failed: func(_, attempt int) bool { return attempt == 1 }, err: fails},
		"behind one that fails": {key: func(int) string { return "k" }, failed: func(n, attempt int) bool { return n == 0 && attempt <= events }, err: fails, maxOutage: -1},
	} {
		for _, by := range []string{"consumer", "worker"} {
			t.Run(name+" "+by, func(t *testing.T) {
				t.Parallel()
				changes := new(changesOf)
				cfg := outbox.HandlerConfig{
					From: outbox.FromStart, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
					Retry: outbox.RetryPolicy{MaxRetries: 2 * events, RetryWait: 5 * time.Millisecond, MaxRetryWait: 5 * time.Millisecond, MaxOutage: tt.maxOutage},
				}
				try := func(n, attempt int) error {
					if tt.failed(n, attempt) {
						return tt.err(n)
					}
					return nil
				}
				var done func() int
				if by == "worker" {
					f := newWorkerFixture(t)
					var steps []step
					for n := range events {
						steps = append(steps, step{tt.key(n), n + 1})
					}
					f.commit(steps...)
					f.start(outbox.WorkerConfig{HandlerConfig: cfg}, f.effects("COUNTED", func(s step, m outbox.Metadata) error { return try(s.N-1, m.Attempt) }))
					done = func() int { return f.count(`SELECT count(*) FROM {schema}.effect`) }
				} else {
					s := newConsumerFixture(t, 1)
					var records []*kgo.Record
					for n := range events {
						r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p-%d","amount":%d}`, n, n+1))
						r.Key = []byte(tt.key(n))
						records = append(records, r)
					}
					s.send(t, records...)
					c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
						if err := try(e.Amount-1, m.Attempt); err != nil {
							return err
						}
						return s.count(ctx, tx, e, m)
					}))
					testenv.Run(t, c.Run)
					done = func() int { return len(s.counts(t)) }
				}
				if tt.opens {
					require.Eventually(t, func() bool { return changes.has("COUNTED closed to open") }, testenv.Patience, 10*time.Millisecond)
					return
				}
				require.Eventually(t, func() bool { return done() == events }, testenv.Patience, 10*time.Millisecond)
				require.Empty(t, changes.All())
			})
		}
	}
}

// A handler that has succeeded in a transaction counts for its breaker, also if the transaction is rolled back because
// a later event has failed. They were forgotten: a breaker opened although most calls succeeded, because each
// transaction ended with the first failure.
func TestBreakerCountsSuccessesOfFailedBatches(t *testing.T) {
	t.Parallel()
	const events, failures = 600, 0.36
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			changes := new(changesOf)
			cfg := outbox.HandlerConfig{
				From: outbox.FromStart, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
				Retry: outbox.RetryPolicy{MaxRetries: 100, RetryWait: time.Millisecond, MaxRetryWait: time.Millisecond}, Concurrency: 1,
			}
			var mu sync.Mutex
			random := rand.New(rand.NewPCG(1, 1))
			try := func() error {
				mu.Lock()
				defer mu.Unlock()
				if random.Float64() < failures {
					return errTest
				}
				return nil
			}
			var done func() int
			if by == "worker" {
				f := newWorkerFixture(t)
				var steps []step
				for n := range events {
					steps = append(steps, step{fmt.Sprint("a", n), 1})
				}
				f.commit(steps...)
				f.start(outbox.WorkerConfig{HandlerConfig: cfg}, f.effects("COUNTED", func(step, outbox.Metadata) error { return try() }))
				done = func() int { return f.count(`SELECT count(*) FROM {schema}.effect`) }
			} else {
				s := newConsumerFixture(t, 1)
				var records []*kgo.Record
				for n := range events {
					r := s.saleRecord(uuid.NewString(), oneSale)
					r.Key = fmt.Append(nil, n)
					records = append(records, r)
				}
				s.send(t, records...)
				c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
					if err := try(); err != nil {
						return err
					}
					return s.count(ctx, tx, e, m)
				}))
				testenv.Run(t, c.Run)
				done = func() int { return s.counts(t)["p"] }
			}
			require.Eventually(t, func() bool { return done() == events || len(changes.All()) > 0 }, testenv.Patience, 10*time.Millisecond)
			require.Empty(t, changes.All())
			require.Equal(t, events, done())
		})
	}
}
