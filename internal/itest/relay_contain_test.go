package itest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// failing calls do for everything of the host that a relay calls, with its name.
func failing(cfg outbox.RelayConfig, do func(name string)) outbox.RelayConfig {
	cfg.Hooks = outbox.RelayHooks{
		Leading:     func(bool) { do("Hooks.Leading") },
		Sent:        func(outbox.SentBatch) { do("Hooks.Sent") },
		Breaker:     func(_, _ outbox.BreakerState, _ float64) { do("Hooks.Breaker") },
		Rejected:    func(outbox.FailedEvent) { do("Hooks.Rejected") },
		Dead:        func(outbox.FailedEvent) { do("Hooks.Dead") },
		RowsRemoved: func(outbox.RetentionResult) { do("Hooks.RowsRemoved") },
	}
	cfg.Alerts = outbox.AlertConfig{Alerter: alerterFunc(func() { do("Alerter") }), Interval: 10 * time.Millisecond, DeadThreshold: 1}
	cfg.Retention.Archive = func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error {
		do("Retention.Archive")
		return nil
	}
	return cfg
}

type alerterFunc func()

func (f alerterFunc) Alert(context.Context, outbox.Alert) error { f(); return nil }

// impossible records an event that cannot become a record.
func (h *relayFixture) impossible(t *testing.T) {
	t.Helper()
	h.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (gen_random_uuid(), 'nonsense', 's', 'a', 'k', '{}', 'application/json', now())`)
}

// names returns the functions of the host that lines of a log are about.
func names(log string, what string) map[string]int {
	found := map[string]int{}
	for line := range strings.Lines(log) {
		_, rest, ok := strings.Cut(line, `level=ERROR msg="outbox: `)
		if name, _, cut := strings.Cut(rest, " "+what); ok && cut {
			found[name]++
		}
	}
	return found
}

// Functions of the host that panic: the relay goes on, and logs each with its stack.
func TestHostPanics(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := tidy()
	cfg.Retry.MaxRetries = 2
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	h.impossible(t)
	first := numbered("a", 1, 5)
	h.commit(t, first...)
	cfg = failing(cfg, func(name string) { panic("no " + name) })
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, first...)
	require.Eventually(t, func() bool { return h.count(t, "outbox_failed") == 1 }, testenv.Patience, 5*time.Millisecond)
	h.update(t, aged)
	want := map[string]int{"Hooks.Leading": 1, "Hooks.Sent": 1, "Hooks.Rejected": 1, "Hooks.Dead": 1, "Hooks.RowsRemoved": 1, "Alerter": 1, "Retention.Archive": 1}
	require.Eventually(t, func() bool { return len(names(log.String(), "has panicked")) == len(want) }, testenv.Patience, 5*time.Millisecond, log)
	second := numbered("a", 6, 5)
	h.commit(t, second...)
	requireArrival(t, reader, second...)
	stop()
	require.Equal(t, want, names(log.String(), "has panicked"))
	require.Contains(t, log.String(), "relay_contain_test.go", "the stack")
	require.NotZero(t, h.count(t, "outbox"), "what was not archived stays")
}

// A hook of the breaker that panics does so in a goroutine of franz-go.
func TestHookOfTheBreakerPanics(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	h.commit(t, numbered("a", 1, 10)...)
	var calls atomic.Int32
	stop := testenv.Run(t, h.unreachableRelay(t, outbox.RelayConfig{PollInterval: 10 * time.Millisecond, Breaker: outbox.BreakerConfig{OpenFor: 50 * time.Millisecond},
		Hooks: outbox.RelayHooks{Breaker: func(_, _ outbox.BreakerState, _ float64) {
			calls.Add(1)
			panic("no metrics")
		}}}).Run)
	require.Eventually(t, func() bool { return calls.Load() > 3 }, testenv.Patience, 5*time.Millisecond)
	stop()
}

// Functions of the host that never return: a stop takes less than two seconds.
func TestHostHangsAtAStop(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	cfg := tidy()
	cfg.Retry.MaxRetries = 2
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	release := make(chan struct{})
	defer close(release)
	var mu sync.Mutex
	called := map[string]bool{}
	var hangs atomic.Bool
	cfg = failing(cfg, func(name string) {
		if hangs.Load() {
			mu.Lock()
			called[name] = true
			mu.Unlock()
			<-release
		}
	})
	hasCalled := func(name string) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return called[name]
		}
	}
	first := numbered("a", 1, 5)
	h.commit(t, first...)
	ctx, cancel := context.WithCancel(background)
	ended := make(chan error, 1)
	go func() { ended <- h.relay(t, cfg).Run(ctx) }()
	require.Eventually(t, func() bool { return h.relayStatus(t, "default").Pending == 0 }, testenv.Patience, 5*time.Millisecond)
	hangs.Store(true)
	h.update(t, aged)
	h.impossible(t)
	for _, name := range []string{"Retention.Archive", "Hooks.Sent"} {
		require.Eventually(t, hasCalled(name), testenv.Patience, 5*time.Millisecond, name)
	}
	start := time.Now()
	cancel()
	require.NoError(t, <-ended)
	require.Less(t, time.Since(start), 2*time.Second)
	require.Empty(t, h.relayStatus(t, "default").Holder, "the lease was released")
	require.Equal(t, 1, names(log.String(), "does not return")["Hooks.Sent"], log)
	require.Equal(t, 1, names(log.String(), "does not return")["Retention.Archive"], log)
	require.Eventually(t, func() bool { return h.openTransactions(t) == 0 }, testenv.Patience, 5*time.Millisecond, "that of the archive is rolled back")
}

// openTransactions counts those that hold a lock on the fixture's outbox.
func (h *relayFixture) openTransactions(t *testing.T) (n int) {
	t.Helper()
	sql := h.sql(`SELECT count(DISTINCT pid) FROM pg_locks WHERE relation = '{s}.outbox'::regclass AND mode = 'RowExclusiveLock'`)
	require.NoError(t, h.db.QueryRow(background, sql).Scan(&n))
	return n
}

// A hook and an Alerter that never return, while the relay runs: it waits once, goes on
// relaying, and does not call them again until they return.
func TestHostHangsWhileRelaying(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := quick
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	release, calls := make(chan struct{}), atomic.Int32{}
	cfg.Hooks.Sent = func(outbox.SentBatch) {
		if calls.Add(1) == 1 {
			<-release
		}
	}
	testenv.Run(t, h.relay(t, cfg).Run)
	start := time.Now()
	for i := range 5 {
		events := numbered("a", 1+10*i, 10)
		h.commit(t, events...)
		requireArrival(t, reader, events...)
	}
	require.Less(t, time.Since(start), 15*time.Second)
	require.Equal(t, int32(1), calls.Load())
	require.Eventually(t, func() bool { return names(log.String(), "does not return")["Hooks.Sent"] == 1 }, testenv.Patience, 5*time.Millisecond)
	close(release)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "Hooks.Sent has returned") }, testenv.Patience, 5*time.Millisecond)
	require.Contains(t, log.String(), "calls_left_out=")
	more := numbered("a", 51, 1)
	h.commit(t, more...)
	requireArrival(t, reader, more...)
	require.Eventually(t, func() bool { return calls.Load() >= 2 }, testenv.Patience, 5*time.Millisecond, "it is called again")
}

// produceHook is called by franz-go for each record, in the goroutine of Run.
type produceHook func()

func (h produceHook) OnProduceRecordBuffered(*kgo.Record) { h() }

// renewalTracer is called by pgx before the lease is renewed, in the goroutine that does.
type renewalTracer func()

func (r renewalTracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	if bytes.Contains(debug.Stack(), []byte("lease.(*Store).Renew(")) {
		r()
	}
	return ctx
}

func (renewalTracer) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

func (renewalTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (renewalTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A panic of ours reaches the caller of Run with its stack, wherever it begins, and another
// process leads at once.
func TestRunPanics(t *testing.T) {
	t.Parallel()
	bug := errors.New("a bug")
	crash := func() { panic(bug) }
	for name, parts := range map[string]func(h *relayFixture) (*pgxpool.Pool, []kgo.Opt){
		"in the session": func(h *relayFixture) (*pgxpool.Pool, []kgo.Opt) {
			return h.db, append(testenv.KafkaOpts(h.brokers), kgo.WithHooks(produceHook(crash)))
		},
		"beside the session": func(h *relayFixture) (*pgxpool.Pool, []kgo.Opt) {
			return testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = renewalTracer(crash) }), testenv.KafkaOpts(h.brokers)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			cfg := quick
			cfg.Schema = h.schema
			cfg.DeliveryTimeout, cfg.Lease = 2*time.Second, 10*time.Second
			db, opts := parts(h)
			r, err := outbox.NewRelay(db, opts, cfg)
			require.NoError(t, err)
			crashed := make(chan any, 1)
			go func() {
				defer func() { crashed <- recover() }()
				_ = r.Run(background)
			}()
			require.Eventually(t, func() bool { return r.Health().Leading }, testenv.Patience, time.Millisecond)
			standby := h.relay(t, cfg)
			testenv.Run(t, standby.Run)
			events := numbered("a", 1, 10)
			h.commit(t, events...)
			err, ok := (<-crashed).(error)
			at := time.Now()
			require.True(t, ok)
			require.ErrorIs(t, err, bug)
			require.Contains(t, err.Error(), "relay_contain_test.go", "the stack")
			require.False(t, r.Health().Live)
			require.Contains(t, strings.Join(r.Health().Reasons, " "), "panic: a bug")
			require.Eventually(t, func() bool { return standby.Health().Leading }, testenv.Patience, time.Millisecond)
			require.Less(t, time.Since(at), time.Second, "within a poll")
			requireArrival(t, h.follow(t), events...)

			ctx, cancel := context.WithTimeout(background, 100*time.Millisecond)
			defer cancel()
			require.NoError(t, r.Run(ctx), "it may run again")
		})
	}
}

// The work of a relay hangs, because a hook of franz-go does: its lease is released, and a stop
// returns an error. When the work ends after all, the relay may run again.
func TestRunHangs(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	cfg := quick
	cfg.Schema, cfg.DeliveryTimeout, cfg.Lease = h.schema, time.Second, 1600*time.Millisecond
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	release, hangs := make(chan struct{}), atomic.Int32{}
	opts := append(testenv.KafkaOpts(h.brokers), kgo.WithHooks(produceHook(func() {
		hangs.Add(1)
		<-release
	})))
	r, err := outbox.NewRelay(h.db, opts, cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	require.Eventually(t, func() bool { return r.Health().Leading }, testenv.Patience, time.Millisecond)
	standby := h.relay(t, cfg)
	testenv.Run(t, standby.Run)
	events := numbered("a", 1, 10)
	h.commit(t, events...)
	require.Eventually(t, func() bool { return standby.Health().Leading }, testenv.Patience, 5*time.Millisecond)
	requireArrival(t, h.follow(t), events...)
	awaitHealth(t, r, false, false, "Run has not gone on for", "the lease was given up")
	require.False(t, r.Health().Leading)
	require.Equal(t, 1, strings.Count(log.String(), "Run does not go on"), log)

	start := time.Now()
	cancel()
	require.ErrorIs(t, <-ended, outbox.ErrHangs)
	require.Less(t, time.Since(start), 2*time.Second)
	require.ErrorIs(t, r.Run(background), outbox.ErrRunning)
	close(release)
	require.Eventually(t, func() bool {
		again, cancel := context.WithTimeout(background, 10*time.Millisecond)
		defer cancel()
		return r.Run(again) == nil
	}, testenv.Patience, 5*time.Millisecond)
	require.LessOrEqual(t, hangs.Load(), int32(10), "records that it had taken, and no others")
}

// A hook of franz-go that ends the goroutine, as a test does that fails in it, ends Run.
func TestRunIsEnded(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	h.commit(t, numbered("a", 1, 1)...)
	cfg := quick
	cfg.Schema = h.schema
	r, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), kgo.WithHooks(produceHook(runtime.Goexit))), cfg)
	require.NoError(t, err)
	require.ErrorContains(t, r.Run(background), "runtime.Goexit")
	require.Empty(t, h.relayStatus(t, "default").Holder, "the lease was released")
}
