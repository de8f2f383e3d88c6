package itest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// trialRules open the breaker of an action after ten events have failed for a second, and permit trials soon after. A
// trial that is lost stays under way for longer than the test waits, because handlers have two minutes.
func trialRules(changes *changesOf) outbox.HandlerConfig {
	return outbox.HandlerConfig{
		From: outbox.FromStart, HandlerTimeout: 2 * time.Minute, StopTimeout: 2 * time.Second, Hooks: outbox.ConsumerHooks{Breaker: changes.note},
		Retry: outbox.RetryPolicy{MaxRetries: 1000, RetryWait: 50 * time.Millisecond, MaxRetryWait: 50 * time.Millisecond},
	}
}

// trialStages are what a handler of a trial does.
type trialStages struct {
	down   atomic.Bool // all calls fail
	trial  atomic.Bool // the next call is the trial that is to be lost
	begun  chan struct{}
	during func(context.Context) error // the trial
}

func newTrialStages(during func(context.Context) error) *trialStages {
	s := &trialStages{begun: make(chan struct{}), during: during}
	s.down.Store(true)
	return s
}

func (s *trialStages) call(ctx context.Context) error {
	if s.trial.CompareAndSwap(true, false) {
		close(s.begun)
		return s.during(ctx)
	}
	if s.down.Load() {
		return errDown
	}
	return nil
}

// lose waits until the breaker has opened and a trial has failed, so that the next call is a trial. It returns when
// this trial, which is to be lost, has begun. Later calls succeed.
func (s *trialStages) lose(t *testing.T, changes *changesOf) {
	t.Helper()
	require.Eventually(t, func() bool { return changes.has("half-open to open") }, testenv.Patience, time.Millisecond)
	s.trial.Store(true)
	select {
	case <-s.begun:
	case <-time.After(testenv.Patience):
		t.Fatal("no trial was made")
	}
	s.down.Store(false)
}

// awaitsEnd is a handler that returns with its context.
func awaitsEnd(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// A trial that does not reach its end permits the next one: the consumer or the worker is stopped in it and runs again,
// the trial is given up because its handler does not return, or meets a conflict of transactions. Such a trial stayed
// under way, and the events of its action stood still for twice HandlerTimeout.
func TestTrialsAreNotLost(t *testing.T) {
	t.Parallel()
	const events = 20
	conflict := func(context.Context) error { return &pgconn.PgError{Code: "40001"} }
	for name, tt := range map[string]struct {
		during func(context.Context) error
		again  bool // Run is called again
	}{
		"stopped":              {during: awaitsEnd, again: true},
		"meets a conflict":     {during: conflict},
		"fails for good":       {during: func(context.Context) error { return outbox.Permanent(errTest) }},
		"asks for a later try": {during: func(context.Context) error { return outbox.RetryAfter(errTest, time.Millisecond) }},
		"panics":               {during: func(context.Context) error { panic("played") }},
	} {
		t.Run(name+" worker", func(t *testing.T) {
			t.Parallel()
			f, changes := newWorkerFixture(t), new(changesOf)
			stages := newTrialStages(tt.during)
			var steps []step
			for n := range events {
				steps = append(steps, step{fmt.Sprint("a", n), 1})
			}
			f.commit(steps...)
			w := f.worker(f.db, "bank", outbox.WorkerConfig{HandlerConfig: trialRules(changes), PollInterval: 20 * time.Millisecond},
				outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
					if err := stages.call(ctx); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('COUNTED', $1, $2)`), s.Account, s.N)
					return err
				}))
			stop := testenv.Run(t, w.Run)
			stages.lose(t, changes)
			if tt.again {
				stop()
				testenv.Run(t, w.Run)
			}
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, events)
		})
		for _, inPlace := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " consumer, in place ", inPlace), func(t *testing.T) {
				t.Parallel()
				partitions := 1
				if inPlace { // the first event of each partition fails again and again, and counts once
					partitions = 12
				}
				s, changes := newConsumerFixture(t, int32(partitions)), new(changesOf)
				stages := newTrialStages(tt.during)
				var records []*kgo.Record
				for n := range events {
					r := s.saleRecord(uuid.NewString(), oneSale)
					r.Key, r.Partition = fmt.Append(nil, n), int32(n%partitions)
					records = append(records, r)
				}
				s.send(t, records...)
				handler := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
					if err := stages.call(ctx); err != nil {
						return err
					}
					return s.count(ctx, tx, e, m)
				})
				if inPlace {
					handler = outbox.RetryInPlace(handler)
				}
				c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: trialRules(changes)}, handler)
				stop := testenv.Run(t, c.Run)
				stages.lose(t, changes)
				if tt.again {
					stop()
					testenv.Run(t, c.Run)
				}
				done := func() int {
					var dead int
					require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT count(*) FROM {s}.event_delivery WHERE status = 'DEAD'`)).Scan(&dead))
					return s.counts(t)["p"] + dead
				}
				require.Eventually(t, func() bool { return done() == events }, testenv.Patience, 10*time.Millisecond)
			})
		}
	}
}

// A row that has no attempt left is claimed only for its dead letter. As the trial of an action, it used up the trial
// without an outcome.
func TestTrialOfRowWithoutAttempts(t *testing.T) {
	t.Parallel()
	s, changes := newConsumerFixture(t, 1), new(changesOf)
	const events = 12 // which open the breaker; all are parked
	stages := newTrialStages(nil)
	var records []*kgo.Record
	for n := range events {
		r := s.saleRecord(uuid.NewString(), oneSale)
		r.Key = fmt.Append(nil, n)
		records = append(records, r)
	}
	s.send(t, records...)
	cfg := trialRules(changes)
	cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 2*time.Second, 2*time.Second // in which the row is changed
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if err := stages.call(ctx); err != nil {
			return err
		}
		return s.count(ctx, tx, e, m)
	}))
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return changes.has("closed to open") }, testenv.Patience, time.Millisecond)
	_, err := s.db.Exec(background, s.sql(`UPDATE {s}.event_delivery SET max_attempts = attempt_count, next_retry_at = now() - interval '1 hour'
		WHERE id = (SELECT id FROM {s}.event_delivery WHERE status = 'PENDING' ORDER BY id LIMIT 1)`))
	require.NoError(t, err)
	stages.down.Store(false)
	require.Eventually(t, func() bool { return s.counts(t)["p"] == events-1 }, testenv.Patience, 10*time.Millisecond)
}

// A handler that does not return gives back its slot when it is given up. When such handlers had all slots for
// transactions, no other event of the process was handled any more.
func TestWorkerGoesOnBesideHangingHandler(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 3 }) // two of them for transactions
	release := make(chan struct{})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, HandlerTimeout: time.Second, Concurrency: 4, StopTimeout: time.Second}, PollInterval: 50 * time.Millisecond}
	cfg.Retry.MaxRetries = 100
	f.commit(step{"hangs a", 1}, step{"hangs b", 1})
	w := f.worker(db, "bank", cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s.N == 1 {
			<-release
		}
		return nil
	}))
	testenv.Run(t, w.Run)
	t.Cleanup(func() { close(release) }) // before the worker is stopped, which would wait for it
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PROCESSING'`, 2)
	f.commit(step{"goes on", 2})
	f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account = 'goes on'`, 1)
}
