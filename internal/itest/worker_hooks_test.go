package itest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/outboxgo/outbox/outboxops"
)

// hookLog has the calls of hooks and handlers, by the subject of their event.
type hookLog struct {
	mu    sync.Mutex
	calls map[string][]string
}

func (l *hookLog) add(subject, format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls == nil {
		l.calls = map[string][]string{}
	}
	l.calls[subject] = append(l.calls[subject], fmt.Sprintf(format, args...))
}

func (l *hookLog) of(subject string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.calls[subject])
}

// requireEventually waits for as many calls. Those of different actions come in any order: they are sorted by action.
func (l *hookLog) requireEventually(t *testing.T, subject string, want ...string) {
	t.Helper()
	for began := time.Now(); len(l.of(subject)) < len(want) && time.Since(began) < testenv.Patience; {
		time.Sleep(10 * time.Millisecond)
	}
	got := l.of(subject)
	slices.SortStableFunc(got, func(a, b string) int { return cmp.Compare(actionIn(a), actionIn(b)) })
	require.Equal(t, want, got, subject)
}

// actionIn returns the action of a call, without what the hook has quoted.
func actionIn(call string) string { return strings.Trim(strings.Fields(call)[1], `"`) }

// hooks returns hooks that note their calls, and whether they got what is said of them.
func (l *hookLog) hooks() outbox.ConsumerHooks {
	return outbox.ConsumerHooks{
		Handled: func(m outbox.Metadata, action string, took time.Duration) {
			l.add(m.Subject, "Handled %s %d %t", action, m.Attempt, took >= 0)
		},
		Repeated: func(m outbox.Metadata, action string) { l.add(m.Subject, "Repeated %s %d", action, m.Attempt) },
		Conflicted: func(m outbox.Metadata, action string, err error) {
			l.add(m.Subject, "Conflicted %s %d", action, m.Attempt)
		},
		Failed: func(m outbox.Metadata, action string, err error, retry bool) {
			l.add(m.Subject, "Failed %s %d %v, retry %t", action, m.Attempt, err, retry)
		},
		DeadLettered: func(m outbox.Metadata, action, topic string, err error) {
			l.add(m.Subject, "DeadLettered %q %d %q", action, m.Attempt, topic)
		},
		Unknown: func(m outbox.Metadata) { l.add(m.Subject, "Unknown %s %s", m.Type, m.Topic()) },
	}
}

// Each hook is called for what its documentation says, in this order, with the action and the attempt.
func TestWorkerHooks(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	log := new(hookLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.Hooks = time.Millisecond, 1, log.hooks()
	cfg.Retry.MaxOutage = -1
	conflict := true
	counted := outbox.OncePer(outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, s step, m outbox.Metadata) error {
		switch {
		case s.Account == "retried" && m.Attempt == 1, s.Account == "dead":
			return errTest
		case s.Account == "permanent":
			return outbox.Permanent(errTest)
		case s.Account == "conflict" && conflict:
			conflict = false
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '40001'; END $$`)
			return err
		}
		return nil
	}), func(s step, _ outbox.Metadata) (string, string) { return "Account", s.Account })
	f.commit(step{"bad", 1})
	testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET payload = '{"account": 7}'`))
	f.exec(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
	        VALUES (gen_random_uuid(), 'bank.account.unheard.v1', 'bank', 'Account', 'unknown', '{}', 'application/json', now())`)
	f.start(cfg, counted, outbox.HandleNoTx("SENT", func(_ context.Context, s step, m outbox.Metadata) error {
		if s.Account == "sent" && m.Attempt == 1 {
			return errTest
		}
		return nil
	}))
	log.requireEventually(t, "unknown", "Unknown bank.account.unheard.v1 account-events")
	deadly := `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 1 AND last_error_code = 'undecodable'`
	f.eventually(deadly, 2)
	log.requireEventually(t, "bad", `DeadLettered "COUNTED" 1 ""`, `DeadLettered "SENT" 1 ""`)
	for account, want := range map[string][]string{
		"done":      {"Handled COUNTED 1 true", "Handled SENT 1 true"},
		"conflict":  {"Conflicted COUNTED 1", "Handled COUNTED 1 true", "Handled SENT 1 true"},
		"retried":   {"Failed COUNTED 1 no luck, retry true", "Handled COUNTED 2 true", "Handled SENT 1 true"},
		"dead":      {"Failed COUNTED 1 no luck, retry true", "Failed COUNTED 2 no luck, retry false", `DeadLettered "COUNTED" 2 ""`, "Handled SENT 1 true"},
		"permanent": {"Failed COUNTED 1 no luck, retry false", `DeadLettered "COUNTED" 1 ""`, "Handled SENT 1 true"},
		"sent":      {"Handled COUNTED 1 true", "Failed SENT 1 no luck, retry true", "Handled SENT 2 true"},
	} {
		f.commit(step{account, 1})
		log.requireEventually(t, account, want...)
	}
	f.commit(step{"done", 2})
	log.requireEventually(t, "done", "Handled COUNTED 1 true", "Repeated COUNTED 1", "Handled SENT 1 true", "Handled SENT 1 true")
}

// Hooks that panic or end their goroutine do no harm.
func TestWorkerHooksFail(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	fail := func(m outbox.Metadata) {
		if m.Subject == "b" {
			panic("hook")
		}
		runtime.Goexit()
	}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries = time.Millisecond, 7
	cfg.Retry.MaxOutage = -1
	cfg.Retry.RetriesFor = func(error) int { runtime.Goexit(); return 0 } // so MaxRetries counts
	cfg.Hooks = outbox.ConsumerHooks{
		Handled:      func(m outbox.Metadata, _ string, _ time.Duration) { fail(m) },
		Failed:       func(m outbox.Metadata, _ string, _ error, _ bool) { fail(m) },
		DeadLettered: func(m outbox.Metadata, _, _ string, _ error) { fail(m) },
		Unknown:      func(m outbox.Metadata) { fail(m) },
	}
	f.exec(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
	        VALUES (gen_random_uuid(), 'bank.account.unheard.v1', 'bank', 'Account', 'b', '{}', 'application/json', now())`)
	f.start(cfg, f.effects("COUNTED", func(s step, m outbox.Metadata) error {
		if s.N == 2 && m.Attempt < 3 || s.N == 3 {
			return errTest
		}
		return nil
	}))
	for n := 1; n <= 4; n++ {
		f.commit(step{"a", n}, step{"b", n})
	}
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 8`, 2)
	f.await(6)
}

// accountClosed is an event that the first release of a service has no handler for.
type accountClosed struct {
	Account string `json:"account"`
}

func (c accountClosed) account() string     { return c.Account }
func (accountClosed) OccurredAt() time.Time { return time.Unix(1, 0) }

// newClosingFixture returns a fixture with a second event, the closing of an account.
func newClosingFixture(t *testing.T) *workerFixture {
	t.Helper()
	f := newWorkerFixture(t)
	var err error
	f.events, err = outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account), outbox.Event("bank.account.closed.v1", "Account", accountClosed.account))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	return f
}

// A delivery of a type without a handler is for all handlers of its type once it is requeued, in a release that has
// them; in one that has none it is dead again.
func TestWorkerRequeueOfUnknownType(t *testing.T) {
	t.Parallel()
	f := newClosingFixture(t)
	log := new(hookLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Unknown, cfg.Hooks, cfg.Retry.RetryWait, cfg.Retry.MaxRetries = outbox.DeadLetterUnknown, log.hooks(), time.Millisecond, 2
	cfg.Retry.MaxOutage = -1
	_, stop := f.start(cfg, f.effects("COUNTED", nil))
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, accountClosed{"a"}, step{"a", 1}) }))
	const dead = `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND action = '' AND last_error_code = 'unknown_type' AND attempt_count = `
	f.await(1)
	f.eventually(dead+`0`, 1)
	ops, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	requeue := func() {
		id := outboxops.FailureID{Kind: outboxops.KindDelivery, Number: int64(f.count(`SELECT id FROM {schema}.event_delivery WHERE action = ''`))}
		require.NoError(t, ops.Retry(t.Context(), id, outboxops.AuditInfo{Operator: "kim", Reason: "test"}))
	}
	requeue()
	f.eventually(dead+`1`, 1)
	stop()
	log.requireEventually(t, "a", `DeadLettered "" 0 ""`, `DeadLettered "" 1 ""`, "Handled COUNTED 1 true",
		"Unknown bank.account.closed.v1 account-events", "Unknown bank.account.closed.v1 account-events")

	log = new(hookLog)
	cfg.Hooks = log.hooks()
	f.start(cfg, f.effects("COUNTED", nil),
		outbox.HandleNoTx("TOLD", func(_ context.Context, _ accountClosed, m outbox.Metadata) error {
			if m.Attempt == 2 {
				return errTest
			}
			return nil
		}),
		outbox.Handle("CLOSED", func(ctx context.Context, tx pgx.Tx, c accountClosed, m outbox.Metadata) error {
			_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('CLOSED', $1, 1)`), c.Account)
			if m.Attempt == 1 {
				return errTest
			}
			return err
		}))
	requeue()
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND action = '' AND attempt_count = 3`, 1)
	f.await(2)
	log.requireEventually(t, "a", "Failed CLOSED 1 no luck, retry true", "Handled CLOSED 2 true", "Repeated CLOSED 3",
		"Failed TOLD 2 no luck, retry true", "Handled TOLD 3 true")
}

// A requeued delivery without an action does not die for its type right after an outage of PostgreSQL, when the process
// with the handler has not renewed its row for long.
func TestUnknownTypeOutlivesAnOutage(t *testing.T) {
	t.Parallel()
	f := newClosingFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Unknown: outbox.DeadLetterUnknown}, PollInterval: 50 * time.Millisecond}
	f.start(cfg, f.effects("COUNTED", nil))
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, accountClosed{"a"}) }))
	const is = `SELECT count(*) FROM {schema}.event_delivery WHERE action = '' AND status = `
	f.eventually(is+`'DEAD'`, 1)
	f.exec(`INSERT INTO {schema}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes, works)
		VALUES ('bank', 'other', false, now() - interval '1 hour', '10 s', ARRAY['bank.account.closed.v1' || chr(10) || 'account-events' || chr(10) || 'CLOSED'], true)`)
	ops, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	id := outboxops.FailureID{Kind: outboxops.KindDelivery, Number: int64(f.count(`SELECT id FROM {schema}.event_delivery`))}
	require.NoError(t, ops.Retry(t.Context(), id, operator))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE last_attempt_at > created_at OR status = 'DEAD'`, 1)
	f.eventually(is+`'PENDING'`, 1)
	f.start(cfg, f.effects("COUNTED", nil), outbox.HandleNoTx("CLOSED", func(context.Context, accountClosed, outbox.Metadata) error { return nil }))
	f.eventually(is+`'DONE'`, 1)
}

// The log line of an event that dies because the group has no handler for its type names the event.
func TestDeadUnknownIsNamed(t *testing.T) {
	t.Parallel()
	f := newClosingFixture(t)
	var log workerLog
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Unknown: outbox.DeadLetterUnknown, Logger: log.logger()}, PollInterval: 50 * time.Millisecond}
	f.start(cfg, f.effects("COUNTED", nil))
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, accountClosed{"acc-1"}) }))
	const dead = "event is dead, the group has no handler for its type"
	require.Eventually(t, func() bool { return log.count(dead) > 0 }, testenv.Patience, 10*time.Millisecond)
	var id string
	require.NoError(t, f.db.QueryRow(t.Context(), f.sql(`SELECT event_id::text FROM {schema}.outbox`)).Scan(&id))
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, dead) {
			for _, attr := range []string{"event_id=" + id, "aggregate_type=Account", "aggregate_id=acc-1", `action=""`, "type=bank.account.closed.v1", "stream=account-events", "outbox_id="} {
				require.Contains(t, line, attr)
			}
		}
	}
	require.Equal(t, 1, log.count(dead))
}

// The first middleware is outermost. It gets the transaction of a handler that has one, and what a batch gets; what
// it returns is the handler's. A panic below comes out of next.
func TestWorkerMiddleware(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	log := new(hookLog)
	around := func(name string) outbox.Middleware {
		return func(ctx context.Context, call outbox.HandlerCall, next nextHandler) error {
			s := call.Events[0].Event.(step)
			subject := call.Action + " " + s.Account
			log.add(subject, "%s begins, tx %t, events %d", name, call.Tx != nil, len(call.Events))
			defer log.add(subject, "%s ends", name)
			switch {
			case s.Account == "skip" && name == "second":
				return nil
			case s.Account == "later" && call.Events[0].Metadata.Attempt == 1:
				return errTest
			case s.Account == "panic" && name == "second" && s.N == 1:
				panic("second")
			case s.Account == "commit" && call.Tx != nil:
				return errors.Join(next(ctx), call.Tx.Commit(ctx))
			}
			err := next(ctx)
			if panicked := new(outbox.PanicError); errors.As(err, &panicked) {
				log.add(subject, "%s sees panic %v", name, panicked.Value)
			}
			return err
		}
	}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Middleware, cfg.Retry.RetryWait, cfg.Retry.MaxRetries = []outbox.Middleware{around("first"), around("second")}, time.Millisecond, 1
	cfg.Retry.MaxOutage = -1
	f.commit(step{"fine", 1}, step{"skip", 1}, step{"later", 1}, step{"panic", 1}, step{"panic", 2}, step{"commit", 1})
	f.start(cfg, f.effects("COUNTED", nil), outbox.HandleNoTx("SENT", func(context.Context, step, outbox.Metadata) error { return nil }))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'panic' AND attempt_count = 2`, 2)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND action = 'COUNTED' AND last_error_code = 'transaction_ended'`, 1)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 9)
	require.Equal(t, "fine,later,panic", f.text(`SELECT string_agg(account, ',' ORDER BY account) FROM {schema}.effect`))
	require.Equal(t, []string{"first begins, tx false, events 1", "second begins, tx false, events 1", "second ends", "first ends"}, log.of("SENT fine"))
	require.Equal(t, []string{"first begins, tx true, events 1", "second begins, tx true, events 1", "second ends", "first ends"}, log.of("COUNTED fine")[:4])
	require.Contains(t, log.of("COUNTED panic"), "first sees panic second")
	require.NotContains(t, log.of("COUNTED panic"), "second sees panic second")
	require.Equal(t, []string{"first begins, tx false, events 1", "first ends", "first begins, tx false, events 1", "second begins, tx false, events 1", "second ends", "first ends"},
		log.of("SENT later"))
}

// Each log line about an event names the event, its aggregate and its trace. A line about the
// deliveries of a worker that is gone has no trace, because the trace was not read.
func TestWorkerLogNamesEvents(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	log := new(workerLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond, Lease: time.Second}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.SlowHandler = time.Millisecond, 1, 20*time.Millisecond
	cfg.Retry.MaxOutage = -1
	cfg.Logger = slog.New(outboxhttp.LogTrace(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	taken, release := make(chan struct{}), make(chan struct{})
	f.start(cfg, f.effects("COUNTED", nil), outbox.HandleNoTx("SENT", func(_ context.Context, s step, m outbox.Metadata) error {
		switch {
		case s.Account == "dead":
			return errTest
		case s.Account == "gone" && m.Attempt == 1:
			close(taken)
			<-release
		}
		return nil
	}))
	t.Cleanup(sync.OnceFunc(func() { close(release) })) // before the worker is stopped, which would wait for it
	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		return f.rec.Record(outbox.WithTraceID(background, "trace-1"), tx, step{"dead", 1}, step{"gone", 1})
	}))
	<-taken
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, 3)
	f.exec(`UPDATE {schema}.event_delivery SET status = 'PENDING', processed_at = NULL, next_retry_at = now() WHERE action = 'COUNTED' AND aggregate_id = 'dead'`)
	f.exec(`UPDATE {schema}.event_delivery SET locked_by = 'gone', locked_until = now() - interval '1 min' WHERE status = 'PROCESSING' AND action = 'SENT'`)
	for line, account := range map[string]string{
		"handler failed, trying again": "dead", "event is dead, an operator has to decide": "dead", "event handled already": "dead",
		"handler runs for long": "gone", "the lease of a delivery has expired": "gone",
	} {
		of := regexp.MustCompile(line + `.* aggregate_id=` + account + ` .*`)
		require.Eventually(t, func() bool { return of.MatchString(log.String()) }, testenv.Patience, 10*time.Millisecond, line)
		parts := []string{" stream=account-events ", " type=bank.account.stepped.v1 ", " event_id=", " aggregate_type=Account "}
		if line != "the lease of a delivery has expired" {
			parts = append(parts, " trace_id=trace-1 ")
		}
		for _, part := range parts {
			require.Contains(t, of.FindString(log.String()), part)
		}
	}
}
