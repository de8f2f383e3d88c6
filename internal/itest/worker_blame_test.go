package itest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// nilError panics in its methods where it is a nil pointer.
type nilError struct{ err error }

func (e *nilError) Error() string { return e.err.Error() }

func failWith(err error) func(context.Context, pgx.Tx) error {
	return func(context.Context, pgx.Tx) error { return err }
}

func runSQL(sql string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, sql); return err }
}

func ignoreSQL(sql ...string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		for _, one := range sql {
			_, _ = tx.Exec(ctx, one)
		}
		return nil
	}
}

// handlerFailures are what a handler may do, and what the row of its event says then.
var handlerFailures = []struct {
	name, code, message string
	needsTx             bool
	do                  func(context.Context, pgx.Tx) error
}{
	{"panics", "panic", "panic: played", false, func(context.Context, pgx.Tx) error { panic("played") }},
	{"ends its goroutine", "goexit", "has ended its goroutine", false, func(context.Context, pgx.Tx) error { runtime.Goexit(); return nil }},
	{"returns a nil pointer", "panic", "which may be a nil pointer", false, func(context.Context, pgx.Tx) error { var err *nilError; return err }},
	{"has an error with NUL", "handler", "before", false, failWith(errors.New("before\x00behind"))},
	{"has an error that is no UTF-8", "handler", "before", false, failWith(errors.New("before\xff\xfebehind"))},
	{"has a long error", "handler", "bytes)", false, failWith(errors.New(strings.Repeat("ä\x00", 100_000)))},
	{"makes up a code", "postgres_", "made up", false, failWith(&pgconn.PgError{Code: "\x00\xff", Message: "made up"})},
	{"calls Commit", "transaction_ended", "must not commit", true, func(ctx context.Context, tx pgx.Tx) error { _ = tx.Commit(ctx); return nil }},
	{"calls Rollback", "transaction_ended", "must not commit", true, func(ctx context.Context, tx pgx.Tx) error { _ = tx.Rollback(ctx); return nil }},
	{"commits", "transaction_ended", "must not commit", true, runSQL("COMMIT")},
	{"commits and begins", "transaction_ended", "must not commit", true, ignoreSQL("COMMIT", "BEGIN")},
	{"rolls back", "transaction_ended", "must not commit", true, runSQL("ROLLBACK")},
	{"rolls back and begins", "transaction_ended", "must not commit", true, ignoreSQL("ROLLBACK", "BEGIN")},
	{"prepares", "transaction_ended", "must not commit", true, runSQL("PREPARE TRANSACTION 'outbox_test'")},
	{"leaves it aborted", "handler", "has left its transaction aborted", true, ignoreSQL("SELECT 1/0")},
	{"leaves rows open", "handler", "has left rows", true, func(ctx context.Context, tx pgx.Tx) error {
		_, _ = tx.Query(ctx, "SELECT generate_series(1, 100)")
		return nil
	}},
	{"fails at the commit", "postgres_23505", "later", true, runSQL(`INSERT INTO {schema}.later VALUES (1), (1)`)},
	{"ends its session", "postgres_57P01", "terminating", true, runSQL("SELECT pg_terminate_backend(pg_backend_pid())")},
}

// Whatever a handler does, in each form, is an attempt on its event: nothing of it is committed, the process
// lives, and what is behind it, of its key and of others, is handled.
func TestWorkerHandlerFails(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.exec(`CREATE TABLE {schema}.later (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)`)
	failing := map[string]func(context.Context, pgx.Tx) error{}
	var steps []step
	var inTx, withoutTx int
	for _, tt := range handlerFailures {
		steps = append(steps, step{"before " + tt.name, 1}, step{tt.name, 1}, step{tt.name, 2})
		inTx++
		if failing[tt.name] = tt.do; !tt.needsTx {
			withoutTx++
		}
	}
	effect := func(ctx context.Context, tx pgx.Tx, action string, s step) error {
		_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ($1, $2, $3)`), action, s.Account, s.N)
		if do := failing[s.Account]; do != nil && s.N == 1 && err == nil {
			return do(ctx, schemaTx{tx, f})
		}
		return err
	}
	handlers := []outbox.Handler{
		outbox.Handle("ONE", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
			return effect(ctx, tx, "ONE", s)
		}),
		outbox.HandleBatch("MANY", func(ctx context.Context, tx pgx.Tx, all []outbox.Received[step]) (err error) {
			for _, r := range all {
				// Behind one that has begun a transaction of its own, another one could commit that.
				if err = effect(ctx, tx, "MANY", r.Event); err != nil || failing[r.Event.Account] != nil && r.Event.N == 1 {
					break
				}
			}
			return err
		}),
		outbox.HandleNoTx("NO_TX", func(ctx context.Context, s step, _ outbox.Metadata) error {
			for _, tt := range handlerFailures {
				if s == (step{tt.name, 1}) && !tt.needsTx {
					return tt.do(ctx, nil)
				}
			}
			return nil
		}),
	}
	var mu sync.Mutex
	failed := map[string]int{}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Retry = outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: time.Millisecond, MaxRetries: 1, MaxOutage: -1}
	cfg.Hooks.Failed = func(m outbox.Metadata, action string, _ error, _ bool) {
		mu.Lock()
		defer mu.Unlock()
		failed[action+" "+m.Subject]++
	}
	f.commit(steps...)
	f.start(cfg, handlers...)

	const dead = `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`
	f.eventually(dead, 2*inTx+withoutTx)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 3*len(steps)-(2*inTx+withoutTx))
	for _, tt := range handlerFailures {
		n := 2
		if !tt.needsTx {
			n = 3
		}
		require.Equal(t, n, f.count(dead+` AND attempt_count = 2 AND aggregate_id = $1 AND last_error_message LIKE '%' || $2 || '%' AND starts_with(last_error_code, $3)`,
			tt.name, tt.message, tt.code), "%s: %s", tt.name, f.text(`SELECT string_agg(concat_ws(' ', action, attempt_count, last_error_code, last_error_message), '; ') FROM {schema}.event_delivery WHERE status = 'DEAD' AND aggregate_id = $1`, tt.name))
	}
	require.Equal(t, 2*(len(steps)-inTx), f.count(`SELECT count(*) FROM {schema}.effect`), "too many: %s", f.text(`SELECT string_agg(concat_ws(' ', action, account, n), '; ')
		FROM {schema}.effect WHERE n = 1 AND NOT starts_with(account, 'before ') OR (action, account, n) IN (SELECT action, account, n FROM {schema}.effect GROUP BY 1, 2, 3 HAVING count(*) > 1)`))
	require.Equal(t, 2*(len(steps)-inTx), f.count(`SELECT count(*) FROM {schema}.event_handled`))
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, failed, 2*inTx+withoutTx)
	for what, n := range failed {
		require.Equal(t, 2, n, what)
	}
}

// schemaTx puts the schema of a fixture into statements.
type schemaTx struct {
	pgx.Tx
	f *workerFixture
}

func (tx schemaTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return tx.Tx.Exec(ctx, tx.f.sql(sql), args...)
}

// text returns a text, "" for NULL.
func (f *workerFixture) text(sql string, args ...any) (s string) {
	f.t.Helper()
	require.NoError(f.t, f.db.QueryRow(context.Background(), f.sql(`SELECT coalesce((`+sql+`), '')`), args...).Scan(&s))
	return s
}

// Any number of retries may be asked for: of all events, of those of a stream, or after an error. An event that is
// tried for ever is not dead when its process ends.
func TestWorkerRetriesForEver(t *testing.T) {
	t.Parallel()
	const stream = "account-events"
	always := func(n int) func(error) int { return func(error) int { return n } }
	for name, cfg := range map[string]outbox.WorkerConfig{
		"all":                      {HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: math.MaxInt}}},
		"32 bits":                  {HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: math.MaxInt32}}},
		"stream":                   {Streams: map[string]outbox.RetryPolicy{stream: {MaxRetries: math.MaxInt}}},
		"error":                    {HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: 1, RetriesFor: always(math.MaxInt)}}},
		"error beyond all":         {HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: math.MaxInt32 - 1, RetriesFor: always(math.MaxInt)}}},
		"as usual after the error": {HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: math.MaxInt, RetriesFor: always(5)}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			cfg.From, cfg.Retry.RetryWait, cfg.PollInterval, cfg.Lease = outbox.FromStart, time.Millisecond, 10*time.Millisecond, time.Second
			cfg.Retry.MaxOutage = -1
			var attempts atomic.Int64
			waiting, release := make(chan struct{}), make(chan struct{})
			f.start(cfg, outbox.HandleNoTx("SENT", func(_ context.Context, _ step, m outbox.Metadata) error {
				switch attempts.Store(int64(m.Attempt)); {
				case m.Attempt < 4:
					return errTest
				case m.Attempt == 4:
					close(waiting)
					<-release // as if its process had gone
				}
				return nil
			}))
			t.Cleanup(func() { close(release) }) // before the worker is stopped, which would wait for it
			f.commit(step{"a", 1})
			<-waiting
			f.exec(`UPDATE {schema}.event_delivery SET locked_by = 'gone', locked_until = now() - interval '1 min', last_attempt_at = now()`) // it has begun
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND max_attempts >= attempt_count`, 1)
			require.EqualValues(t, 5, attempts.Load())
		})
	}
}

// What PostgreSQL rolls back for a deadlock or a serialization failure is repeated, and is no attempt until there have
// been ten: also where it is the first of several events that share a transaction. If it goes on, it is one.
func TestWorkerConflicts(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 5} { // events that arrive together
		t.Run(fmt.Sprint(n, " events"), func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			var calls, conflicts, failed atomic.Int64
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1}, PollInterval: 50 * time.Millisecond}
			cfg.Retry.RetryWait, cfg.Retry.MaxRetries = time.Millisecond, 1
			cfg.Retry.MaxOutage = -1
			cfg.Hooks.Conflicted = func(outbox.Metadata, string, error) { conflicts.Add(1) }
			cfg.Hooks.Failed = func(outbox.Metadata, string, error, bool) { failed.Add(1) }
			handler := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, s step, m outbox.Metadata) error {
				var err error
				switch n := calls.Add(1); {
				case s.Account == "often" && n <= 8, s.Account == "always":
					_, err = tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '`+[]string{"40P01", "40001"}[n%2]+`'; END $$`)
				case s.Account == "later":
					_, err = tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '40001'; END $$`)
					err = outbox.RetryAfter(err, 0)
				}
				if err == nil {
					_, err = tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('COUNTED', $1, $2)`), s.Account, s.N)
				}
				return err
			})
			f.start(cfg, handler)
			play := func(account string) {
				steps := []step{{account, 1}}
				for i := 1; i < n; i++ {
					steps = append(steps, step{fmt.Sprint(account, i), 1})
				}
				f.commit(steps...)
			}
			play("often")
			f.await(n)
			require.EqualValues(t, n, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`))
			require.Zero(t, failed.Load())
			require.Positive(t, conflicts.Load())

			calls.Store(0)
			play("always")
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 2 AND starts_with(last_error_code, 'postgres_40')`, 1)
			f.await(2*n - 1)
			require.EqualValues(t, 2, failed.Load())
			require.Greater(t, calls.Load(), int64(20), "ten conflicts are no attempt")
			require.Less(t, calls.Load(), int64(40), "not as fast as PostgreSQL answers")

			calls.Store(0)
			play("later")
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND aggregate_id = 'later' AND attempt_count = 2`, 1)
			require.EqualValues(t, 4, failed.Load(), "the handler knows better")
		})
	}
}

// While PostgreSQL is away, whatever handlers are at is no attempt: it is handled when PostgreSQL is back.
func TestWorkerOutageDuringHandlers(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cable := &brokenDialer{}
	log := new(workerLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Retry.MaxRetries, cfg.Logger, cfg.Retry.RetryWait = -1, log.logger(), time.Millisecond
	var failed, broken atomic.Int64
	// What a handler without a transaction meets is an attempt if PostgreSQL is back before the worker looks.
	errOwn := errors.New("of a handler without a transaction")
	cfg.Retry.RetriesFor = func(err error) int {
		if errors.Is(err, errOwn) {
			return 10
		}
		return 0
	}
	cfg.Hooks.Failed = func(_ outbox.Metadata, _ string, err error, _ bool) {
		if !errors.Is(err, errOwn) {
			failed.Add(1)
		}
	}
	db := testenv.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DialFunc = cable.dial })
	pull := func(s step) {
		if s.N == 3 && broken.Add(1) == 1 {
			cable.breakAll()
		}
	}
	w := f.worker(db, "bank", cfg,
		outbox.Handle("ONE", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
			pull(s)
			_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('ONE', $1, $2)`), s.Account, s.N)
			return err
		}),
		outbox.HandleBatch("MANY", func(ctx context.Context, tx pgx.Tx, all []outbox.Received[step]) error {
			for _, r := range all {
				if _, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('MANY', $1, $2)`), r.Event.Account, r.Event.N); err != nil {
					return err
				}
			}
			return nil
		}),
		outbox.HandleNoTx("NO_TX", func(ctx context.Context, s step, _ outbox.Metadata) error {
			pull(s)
			if _, err := db.Exec(ctx, "SELECT 1"); err != nil {
				return fmt.Errorf("%w: %w", errOwn, err)
			}
			return nil
		}))
	f.commit(step{"a", 1}, step{"a", 2}, step{"a", 3}, step{"a", 4}, step{"b", 1})
	testenv.Run(t, w.Run)
	require.Eventually(t, func() bool { return log.count("PostgreSQL fails") > 0 }, testenv.Patience, time.Millisecond)
	require.Eventually(t, func() bool { return !w.Health().Works }, testenv.Patience, time.Millisecond)
	cable.broken.Store(false)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND (attempt_count = 1 OR action = 'NO_TX')`, 15)
	f.await(10)
	f.requireOrder()
	require.Zero(t, failed.Load())
	require.Eventually(t, func() bool { return w.Health().Works }, testenv.Patience, 10*time.Millisecond)
}

// An error in an outage is no attempt, and says when the event is tried again: not before, and others do not wait for
// it.
func TestWorkerRetryAfterInOutage(t *testing.T) {
	t.Parallel()
	for _, with := range []string{"alone", "first", "later"} { // in a common transaction
		t.Run(with, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			cable := &brokenDialer{}
			log := new(workerLog)
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1}, PollInterval: 50 * time.Millisecond}
			cfg.Retry.MaxRetries, cfg.Logger = -1, log.logger()
			var failed, calls atomic.Int64
			cfg.Hooks.Failed = func(outbox.Metadata, string, error, bool) { failed.Add(1) }
			steps := map[string][]step{
				"alone": {{"postponed", 1}}, "first": {{"postponed", 1}, {"postponed", 2}, {"a", 1}, {"b", 1}}, "later": {{"a", 1}, {"postponed", 1}, {"postponed", 2}, {"b", 1}},
			}[with]
			w := f.worker(testenv.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DialFunc = cable.dial }), "bank", cfg,
				outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
					if s == (step{"postponed", 1}) {
						calls.Add(1)
						cable.breakAll()
					}
					_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('COUNTED', $1, $2)`), s.Account, s.N)
					if err != nil && s.Account == "postponed" {
						err = outbox.RetryAfter(err, 3*time.Hour)
					}
					return err
				}))
			f.commit(steps...)
			testenv.Run(t, w.Run)
			require.Eventually(t, func() bool {
				if cable.rejected.Load() > 0 && log.count("PostgreSQL fails") > 0 && cable.broken.Load() { // each outage was noticed
					cable.broken.Store(false)
				}
				return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING' AND attempt_count = 0 AND aggregate_id = 'postponed' AND next_retry_at > now() + interval '2 h'`) == 1
			}, testenv.Patience, 10*time.Millisecond)
			f.commit(step{"c", 1})
			f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account <> 'postponed'`, max(1, len(steps)-1))
			require.Zero(t, f.count(`SELECT count(*) FROM {schema}.effect WHERE account = 'postponed'`))
			require.Zero(t, failed.Load())
			require.LessOrEqual(t, calls.Load(), map[string]int64{"alone": 1, "first": 1, "later": 2}[with])
		})
	}
}

// A delivery that is dead for an error of a kind in RetryDeadAfter has its attempts again after a while, in front of
// the later ones of its key that wait. Others, and what an operator has resolved, stay dead.
func TestRetryDeadAfterOfDeliveries(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var back atomic.Bool
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond, Lease: time.Second}
	cfg.Retry.MaxRetries, cfg.HoldDead = -1, true
	cfg.RetryDeadAfter = map[string]time.Duration{"timeout": 200 * time.Millisecond}
	f.commit(step{"late", 1}, step{"late", 2}, step{"wrong", 1}, step{"closed", 1})
	_, stop := f.start(cfg, f.effects("DONE", func(s step, _ outbox.Metadata) error {
		switch {
		case s.Account == "wrong":
			return errors.New("wrong")
		case s.N == 1 && !back.Load():
			return context.DeadlineExceeded
		}
		return nil
	}))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND aggregate_id = 'wrong'`, 1)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND aggregate_id = 'closed' AND put_back`, 1)
	stop()
	f.exec(`UPDATE {schema}.event_delivery SET status = 'DEAD', processed_at = now(), resolved_by = 'kim', resolved_at = now() WHERE aggregate_id = 'closed'`)
	back.Store(true)
	f.start(cfg, f.effects("DONE", nil))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND aggregate_id = 'late'`, 2)
	require.Zero(t, f.count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY account ORDER BY id) AS before FROM {schema}.effect) AS e WHERE n <= before`))
	require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`))
}
