package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// step is an event of an account: the n-th.
type step struct {
	Account string `json:"account"`
	N       int    `json:"n"`
}

func (s step) account() string       { return s.Account }
func (s step) OccurredAt() time.Time { return time.Now() }

// workerFixture is a schema with outbox and a table of effects, in which steps are recorded.
type workerFixture struct {
	t      *testing.T
	db     *pgxpool.Pool
	schema string
	events *outbox.Registry
	rec    *outbox.Recorder

	mu   sync.Mutex
	wake []func()
}

func newWorkerFixture(t *testing.T) *workerFixture {
	t.Helper()
	db, schema := testenv.Migrated(t)
	f := &workerFixture{t: t, db: db, schema: schema}
	f.exec(`CREATE TABLE {schema}.effect (id bigserial, action text, account text, n int)`)
	var err error
	f.events, err = outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	return f
}

// workerLog is what workers log.
type workerLog struct{ testenv.Buffer }

func (l *workerLog) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// count returns how many lines hold a text.
func (l *workerLog) count(text string) int { return strings.Count(l.String(), text) }

var errTest = errors.New("no luck")

func (f *workerFixture) sql(sql string) string { return pg.InSchema(sql, f.schema) }

func (f *workerFixture) exec(sql string, args ...any) {
	f.t.Helper()
	_, err := f.db.Exec(context.Background(), f.sql(sql), args...)
	require.NoError(f.t, err)
}

func (f *workerFixture) commit(steps ...step) {
	f.t.Helper()
	require.NoError(f.t, pgx.BeginFunc(f.t.Context(), f.db, func(tx pgx.Tx) error {
		events := make([]outbox.DomainEvent, len(steps))
		for i, s := range steps {
			events[i] = s
		}
		return f.rec.Record(f.t.Context(), tx, events...)
	}))
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, wake := range f.wake {
		wake()
	}
}

// start runs a worker until the test ends or stop is called, which waits for it.
func (f *workerFixture) start(cfg outbox.WorkerConfig, handlers ...outbox.Handler) (w *outbox.Worker, stop func()) {
	f.t.Helper()
	return f.startGroup("bank", cfg, handlers...)
}

func (f *workerFixture) startGroup(group string, cfg outbox.WorkerConfig, handlers ...outbox.Handler) (w *outbox.Worker, stop func()) {
	f.t.Helper()
	w = f.worker(f.db, group, cfg, handlers...)
	return w, testenv.Run(f.t, w.Run)
}

// worker returns one that is woken at each commit.
func (f *workerFixture) worker(db *pgxpool.Pool, group string, cfg outbox.WorkerConfig, handlers ...outbox.Handler) *outbox.Worker {
	f.t.Helper()
	w, err := outbox.NewWorker(db, f.events, group, f.config(cfg), handlers...)
	require.NoError(f.t, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wake = append(f.wake, w.Waker().Wake)
	return w
}

func (f *workerFixture) config(cfg outbox.WorkerConfig) outbox.WorkerConfig {
	cfg.Schema = f.schema
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return cfg
}

// effects is a handler that writes an effect in its transaction.
func (f *workerFixture) effects(action string, check func(step, outbox.Metadata) error) outbox.Handler {
	return outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, s step, m outbox.Metadata) error {
		if check != nil {
			if err := check(s, m); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.effect (action, account, n) VALUES ($1, $2, $3)`, f.schema), action, s.Account, s.N)
		return err
	})
}

// await waits until as many effects are there.
func (f *workerFixture) await(n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) >= n }, testenv.Patience, 10*time.Millisecond)
	require.Equal(f.t, n, f.count(`SELECT count(*) FROM {schema}.effect`))
}

func (f *workerFixture) count(sql string, args ...any) (n int) {
	f.t.Helper()
	require.NoError(f.t, f.db.QueryRow(context.Background(), pg.InSchema(sql, f.schema), args...).Scan(&n))
	return n
}

// requireOrder checks that of each account and action every step has an effect, in order.
func (f *workerFixture) requireOrder() {
	f.t.Helper()
	require.Zero(f.t, f.count(`SELECT count(*) FROM (SELECT n, row_number() OVER (PARTITION BY account, action ORDER BY id) AS nth FROM {schema}.effect) AS e WHERE n <> nth`))
}

func TestWorkerHandles(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	w, _ := f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, f.effects("COUNTED", nil), f.effects("SUMMED", nil))
	const accounts, steps = 7, 50
	for n := 1; n <= steps; n++ {
		for a := range accounts {
			f.commit(step{fmt.Sprint("a", a), n})
		}
	}
	f.await(2 * accounts * steps)
	f.requireOrder()
	require.Equal(t, 2*accounts*steps, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1 AND locked_by IS NULL`))
	require.Equal(t, 2*accounts*steps, f.count(`SELECT count(*) FROM {schema}.event_handled`))
	require.True(t, w.Health().Works, w.Health().Reasons)
}

// A backlog that is larger than what is read at once is drained in order, by several workers.
func TestWorkerBacklog(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	const accounts, steps = 40, 100
	for n := 1; n <= steps; n++ {
		var all []step
		for a := range accounts {
			all = append(all, step{fmt.Sprint("a", a), n})
		}
		f.commit(all...)
	}
	for range 3 {
		f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, f.effects("COUNTED", nil))
	}
	f.await(accounts * steps)
	f.requireOrder()
}

func TestWorkerRetries(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	errNo := errors.New("no")
	var mu sync.Mutex
	attempts := map[int]int{}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries = 10*time.Millisecond, 2
	cfg.Retry.MaxOutage = -1
	f.start(cfg, f.effects("COUNTED", func(s step, m outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		attempts[s.N]++
		switch {
		case s.N == 3:
			return errNo
		case s.N == 5:
			return outbox.Permanent(errNo)
		case s.N == 2 && m.Attempt < 3:
			return errNo
		}
		return nil
	}))
	f.commit(step{"a", 1}, step{"a", 2}, step{"a", 3}, step{"a", 4}, step{"a", 5}, step{"a", 6})
	f.await(4)
	require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`) == 2 }, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, []int{3, 1}, []int{
		f.count(`SELECT attempt_count FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'handler'`),
		f.count(`SELECT attempt_count FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'permanent'`)})
	require.Zero(t, f.count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (ORDER BY id) AS before FROM {schema}.effect) AS e WHERE n < before`))
}

// An operator has a key wait at a dead delivery that later ones have passed, while a worker
// handles the key, and lets it go on. Other workers and keys do as they did.
func TestOperatorHoldsKeyOfWorkers(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	handler := f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s == (step{"a", 2}) {
			return outbox.Permanent(errTest)
		}
		return nil
	})
	f.start(cfg, handler)
	f.commit(step{"a", 1}, step{"a", 2}, step{"a", 3}, step{"b", 1})
	f.await(3)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	dead, err := failures.List(t.Context(), outboxops.FailureFilter{}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Len(t, dead, 1)
	require.NoError(t, failures.Hold(t.Context(), dead[0].ID, kim))
	f.commit(step{"a", 4}, step{"a", 5}, step{"b", 2})
	f.await(4)
	const parked = `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PARKED'`
	f.eventually(parked, 2)
	f.start(cfg, handler)
	f.commit(step{"a", 6}, step{"b", 3})
	f.await(5)
	f.eventually(parked, 3)
	require.Never(t, func() bool { return f.count(parked) != 3 }, 300*time.Millisecond, 20*time.Millisecond)
	require.NoError(t, failures.Release(t.Context(), dead[0].ID, kim))
	f.await(8)
	require.Zero(t, f.count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY account ORDER BY id) AS before FROM {schema}.effect) AS e WHERE n < before`))
	unresolved, err := failures.Unresolved(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, unresolved[0].Failures, "it is dead as before")
}

func TestWorkerNoTx(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var mu sync.Mutex
	seen := map[string][]int{}
	handler := outbox.HandleNoTx("PUSHED", func(_ context.Context, s step, m outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		seen[s.Account] = append(seen[s.Account], s.N)
		return nil
	})
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, handler, f.effects("COUNTED", nil))
	for n := 1; n <= 100; n++ {
		f.commit(step{"a", n}, step{"b", n})
	}
	f.await(200)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`) == 400
	}, 10*time.Second, 10*time.Millisecond)
	for _, steps := range seen {
		require.Len(t, steps, 100)
		require.IsIncreasing(t, steps)
	}
}

// RetriesFor may allow more tries than MaxRetries, for an outage of something that the handler
// needs. A process that is killed meanwhile costs an event no more than one of those tries.
func TestWorkerIsGoneAfterManyRetries(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var attempts atomic.Int64
	waiting, release := make(chan struct{}), make(chan struct{})
	handler := outbox.HandleNoTx("SENT", func(_ context.Context, s step, m outbox.Metadata) error {
		attempts.Store(int64(m.Attempt))
		switch {
		case m.Attempt < 6:
			return errors.New("outage")
		case m.Attempt == 6:
			close(waiting)
			<-release // as if its process had gone
		}
		return nil
	})
	f.start(outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetries: 2, RetriesFor: func(error) int { return math.MaxInt }, MaxOutage: -1}, From: outbox.FromStart}, PollInterval: 10 * time.Millisecond, Lease: 3 * time.Second,
	}, handler)
	t.Cleanup(func() { close(release) }) // before the worker is stopped, which would wait for it
	f.commit(step{"a", 1})
	<-waiting
	f.exec(`UPDATE {schema}.event_delivery SET locked_by = 'gone', locked_until = now() - interval '1 min'`)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`) == 1
	}, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`))
	require.EqualValues(t, 7, attempts.Load())
}
