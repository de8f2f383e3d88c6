package itest

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// neverOpen is for tests in which most events fail, and are to be tried all the same.
var neverOpen = outbox.BreakerConfig{Window: 10_000}

// While a dependency of a handler is unavailable, the events of its action wait in their
// partitions: few are parked, none is dead-lettered, and one is tried now and then. Health says so.
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
			const events, openFor = 400, 300 * time.Millisecond
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{
				Retry: outbox.RetryPolicy{RetryWait: 100 * time.Millisecond, MaxRetries: 50}, Breaker: outbox.BreakerConfig{OpenFor: openFor}, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
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
			require.True(t, c.Health().Ready, "no restart helps, and other actions go on")
			began, before := time.Now(), tried.Load()
			require.Eventually(t, func() bool { return changes.has("COUNTED half-open to open; COUNTED open to half-open") }, testenv.Patience, 10*time.Millisecond)
			time.Sleep(5 * openFor) // to count what is tried meanwhile
			most := int64(2 + time.Since(began)/openFor)
			require.LessOrEqual(t, tried.Load()-before, 2*most, "one event is tried at a time")
			require.Less(t, strings.Count(s.parked(t), "COUNTED"), 60, "the others wait in their partitions")
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
		Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: 10 * time.Millisecond, MaxRetries: 200}, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
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

// A worker leaves what is owed to an action in its rows while most of its events fail: these use up no attempts.
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
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.Breaker.OpenFor, cfg.Hooks.Breaker = 50*time.Millisecond, 20, 300*time.Millisecond, changes.note
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

// Events that a handler finds early count as failures of its action, unless the window is wider
// than a run of them. Events that wait behind a failing event of their key do not count, because
// they are not tried.
func TestBreakerCountsEarlyEvents(t *testing.T) {
	t.Parallel()
	const events = 40
	for name, tt := range map[string]struct {
		breaker outbox.BreakerConfig
		key     func(n int) string
		fails   func(n, attempt int) bool
		opens   bool
	}{
		"each of its own key is early": {key: func(n int) string { return fmt.Sprint(n) }, fails: func(_, attempt int) bool { return attempt == 1 }, opens: true},
		"a wide window": {breaker: outbox.BreakerConfig{Window: 1000}, key: func(n int) string { return fmt.Sprint(n) },
			fails: func(_, attempt int) bool { return attempt == 1 }},
		"behind one that fails": {key: func(int) string { return "k" }, fails: func(n, attempt int) bool { return n == 0 && attempt <= events }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newConsumerFixture(t, 1)
			changes := new(changesOf)
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: 2 * events}, Breaker: tt.breaker, Hooks: outbox.ConsumerHooks{Breaker: changes.note}, From: outbox.FromStart}}
			c := s.consumer(t, cfg, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
				if tt.fails(e.Amount-1, m.Attempt) {
					return outbox.RetryAfter(errTest, 5*time.Millisecond)
				}
				return s.count(ctx, tx, e, m)
			}))
			var records []*kgo.Record
			for n := range events {
				r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p","amount":%d}`, n+1))
				r.Key = []byte(tt.key(n))
				records = append(records, r)
			}
			s.send(t, records...)
			testenv.Run(t, c.Run)
			if tt.opens {
				require.Eventually(t, func() bool { return changes.has("COUNTED closed to open") }, testenv.Patience, 10*time.Millisecond)
				return
			}
			require.Eventually(t, func() bool { return s.counts(t)["p"] == events*(events+1)/2 }, testenv.Patience, 10*time.Millisecond)
			require.Empty(t, changes.All())
		})
	}
}
