package itest

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// workerStops are what a handler does while its worker stops, for each form, and what becomes of its event.
var workerStops = []struct {
	name, form string
	handler    func(ctx context.Context, release <-chan struct{}) error
	own        string
	attempts   int
}{
	{"ends in time", "one", endsInTime, "DONE", 1},
	{"ends in time", "batch", endsInTime, "DONE", 1},
	{"ends in time", "no tx", endsInTime, "DONE", 1},
	{"ends with its context", "one", endsWithContext, "PENDING", 0},
	{"ends with its context", "batch", endsWithContext, "PENDING", 0},
	{"ends with its context", "no tx", endsWithContext, "PENDING", 0},
	{"ends with its context, and has no error", "one", ignoresContext, "PENDING", 0},
	{"ends with its context, and has no error", "batch", ignoresContext, "PENDING", 0},
	{"ends with its context, and has no error", "no tx", ignoresContext, "DONE", 1},
	{"does not end", "one", endsNever, "PROCESSING", 1},
	{"does not end", "batch", endsNever, "PROCESSING", 1},
	{"does not end", "no tx", endsNever, "PROCESSING", 1},
}

func endsInTime(ctx context.Context, _ <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(200 * time.Millisecond):
		return nil
	}
}

func endsWithContext(ctx context.Context, _ <-chan struct{}) error { <-ctx.Done(); return ctx.Err() }
func ignoresContext(ctx context.Context, _ <-chan struct{}) error  { <-ctx.Done(); return nil }
func endsNever(_ context.Context, release <-chan struct{}) error   { <-release; return nil }

// A handler that ends in time is committed. One that does not is rolled back, and its event is given back, unless it
// ignores its context: then that event alone waits for the end of its lease. Nothing that came with it does, and
// nothing loses an attempt that was not made: here an event has only one.
func TestWorkerStops(t *testing.T) {
	t.Parallel()
	for _, tt := range workerStops {
		t.Run(tt.form+" "+tt.name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1, StopTimeout: 2 * time.Second}, Lease: time.Minute, PollInterval: 50 * time.Millisecond}
			cfg.Retry.MaxRetries = -1
			called, release := make(chan struct{}), make(chan struct{})
			handler := f.formOf(tt.form, func(ctx context.Context, s step) error {
				if s == (step{"a", 1}) {
					close(called)
					return tt.handler(ctx, release)
				}
				return nil
			})
			f.commit(step{"a", 1}, step{"a", 2}, step{"a", 3}, step{"b", 1}, step{"c", 1}, step{"d", 1}, step{"e", 1}, step{"f", 1}, step{"g", 1}, step{"h", 1})
			_, stop := f.start(cfg, handler)
			t.Cleanup(func() { close(release) })
			<-called
			began := time.Now()
			stop()
			require.Less(t, time.Since(began), 2*time.Second+500*time.Millisecond)
			const own = ` FROM {schema}.event_delivery WHERE position = 1`
			require.Equal(t, tt.own, f.text(`SELECT status`+own))
			require.Equal(t, tt.attempts, f.count(`SELECT attempt_count`+own))
			withIt := f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'PROCESSING')`)
			if tt.form != "batch" {
				require.Equal(t, tt.attempts, withIt)
			}
			require.Equal(t, 10-max(1, withIt), f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE position > 1 AND status IN ('PENDING', 'PARKED') AND attempt_count = 0 AND locked_by IS NULL`))
			done := f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`)
			require.Equal(t, done, f.count(`SELECT count(*) FROM {schema}.effect`))

			if tt.own == "PROCESSING" && tt.form == "batch" {
				return // all are dead then
			}
			cfg.Lease = time.Second
			f.exec(`UPDATE {schema}.event_delivery SET locked_until = now() WHERE status = 'PROCESSING'`)
			f.start(cfg, f.formOf(tt.form, func(context.Context, step) error { return nil }))
			dead := 0
			if tt.own == "PROCESSING" {
				dead = 1
			}
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 10-dead)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'stale'`, dead)
			require.Zero(t, f.count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY account ORDER BY id) AS before FROM {schema}.effect) AS e WHERE n <= before`))
		})
	}
}

// formOf returns a handler of a form that calls do for each event, and then writes an effect, in its transaction
// or without one.
func (f *workerFixture) formOf(form string, do func(context.Context, step) error) outbox.Handler {
	effect := f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('COUNTED', $1, $2)`)
	one := func(ctx context.Context, tx pgx.Tx, s step) error {
		if err := do(ctx, s); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, effect, s.Account, s.N)
		return err
	}
	switch form {
	case "one":
		return outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error { return one(ctx, tx, s) })
	case "batch":
		return outbox.HandleBatch("COUNTED", func(ctx context.Context, tx pgx.Tx, all []outbox.Received[step]) error {
			for _, r := range all {
				if err := one(ctx, tx, r.Event); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return outbox.HandleNoTx("COUNTED", func(ctx context.Context, s step, _ outbox.Metadata) error {
		if err := do(ctx, s); err != nil {
			return err
		}
		_, err := f.db.Exec(context.WithoutCancel(ctx), effect, s.Account, s.N)
		return err
	})
}

// Events that came with an event whose handler hangs are released when that handler is abandoned.
// They are not to blame, and lose no attempt.
func TestWorkerHangingHandlerCostsOthersNothing(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	release := make(chan struct{})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 2, StopTimeout: time.Second}, Lease: 3 * time.Second, PollInterval: 50 * time.Millisecond}
	cfg.Retry.MaxRetries, cfg.HandlerTimeout = -1, time.Second
	var steps []step
	for _, account := range []string{"a", "b", "hangs", "c", "d"} {
		for n := 1; n <= 5; n++ {
			steps = append(steps, step{account, n})
		}
	}
	f.commit(steps...)
	f.start(cfg, f.formOf("one", func(_ context.Context, s step) error {
		if s == (step{"hangs", 3}) {
			<-release
		}
		return nil
	}))
	t.Cleanup(func() { close(release) })
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 24)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'stale'`, 1)
	require.Equal(t, 24, f.count(`SELECT count(*) FROM {schema}.effect`))
	require.Zero(t, f.count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY account ORDER BY id) AS before FROM {schema}.effect) AS e WHERE n <= before`))
}

// JSON that is stored in a kilobyte may print ten megabytes. A worker holds no more of it than of other payloads,
// however many such events are recorded at once.
func TestWorkerMemoryOfCompactEvents(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it measures the memory of the process.
	f := newWorkerFixture(t)
	const events = 40
	steps := make([]step, events)
	for i := range steps {
		steps[i] = step{fmt.Sprint("a", i), 1}
	}
	f.commit(steps...)
	testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET payload = payload || jsonb_build_object('x', (SELECT jsonb_agg(1e131071) FROM generate_series(1, 76)))`))
	require.Less(t, f.count(`SELECT max(pg_column_size(payload)) FROM {schema}.outbox`), 4096)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	before, largest := heap(), uint64(0)
	f.start(cfg, f.effects("COUNTED", nil))
	require.Eventually(t, func() bool {
		largest = max(largest, heap())
		return f.count(`SELECT count(*) FROM {schema}.effect`) == events
	}, 2*testenv.Patience, 20*time.Millisecond)
	t.Logf("%d MB more than before", (largest-before)>>20)
	require.Less(t, largest-before, uint64(200<<20), "of 400 MB")
}

// A payload that does not fit with others is read when its handler is at it: all are handled, in order, by few
// lanes as by many.
func TestWorkerLargePayloads(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newWorkerFixture(t)
	const accounts, each, size = 4, 5, 10_000_000
	for n := 1; n <= each; n++ {
		var steps []step
		for a := range accounts {
			steps = append(steps, step{string(rune('a' + a)), n})
		}
		f.commit(append(steps, step{"small", n})...)
	}
	// Most are compressed in their rows.
	testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET payload = NULL, content_type = 'text/plain',
		payload_bytes = convert_to(concat_ws(' ', aggregate_id, payload->>'n', CASE WHEN id % 10 <> 1 THEN repeat('x', $1::int)
		ELSE (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 1 + $1::int / 32)) END), 'UTF8') WHERE aggregate_id <> 'small'`), size)
	require.Equal(t, accounts*each, f.count(`SELECT count(*) FROM {schema}.outbox WHERE length(payload_bytes) >= $1`, size))
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Codecs = []outbox.Codec{{ContentType: "text/plain", Encode: outbox.JSON().Encode, Decode: func(_ context.Context, data []byte, event any) error {
		s := event.(*step)
		_, err := fmt.Fscan(bytes.NewReader(data[:20]), &s.Account, &s.N)
		return err
	}}}
	w := f.worker(f.db, "bank", cfg, f.effects("COUNTED", nil))
	require.NoError(t, w.Pause())
	testenv.Run(t, w.Run)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('PENDING', 'PARKED')`, (accounts+1)*each)
	require.NoError(t, w.Resume()) // so that all are claimed together
	f.eventually(`SELECT count(*) FROM {schema}.effect`, (accounts+1)*each)
	f.requireOrder()
	require.Equal(t, (accounts+1)*each, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`))
}
