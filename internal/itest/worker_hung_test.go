package itest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A handler that returns after it was given up, and before the lease of its event ends, has used up an attempt, as one
// that does not return. Its event was released without an attempt, and so hung for ever. Hooks hear of each attempt. An
// event that came with it loses no attempt, unless it was in the same call.
func TestHandlerReturnsAfterItWasGivenUp(t *testing.T) {
	t.Parallel()
	const hangs = 1800 * time.Millisecond // it is given up after HandlerTimeout and a second
	for name, form := range map[string]string{"one": "one", "batch": "batch", "no tx": "no tx", "no tx, expiring": "no tx", "codec": "one"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, log := newWorkerFixture(t), new(workerLog)
			cfg := outbox.WorkerConfig{
				HandlerConfig: outbox.HandlerConfig{
					From: outbox.FromStart, Concurrency: 1, HandlerTimeout: 200 * time.Millisecond, SlowHandler: 100 * time.Millisecond, Logger: log.logger(),
				},
				Lease: time.Minute, PollInterval: 20 * time.Millisecond,
			}
			cfg.Retry = outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: time.Millisecond, MaxRetries: 1}
			var calls, failed, dead atomic.Int64
			cfg.Hooks.Failed = func(m outbox.Metadata, _ string, _ error, _ bool) {
				if m.Subject == "hangs" {
					failed.Add(1)
				}
			}
			cfg.Hooks.DeadLettered = func(outbox.Metadata, string, string, error) { dead.Add(1) }
			hang := func(ctx context.Context, s step) error {
				if s.Account != "hangs" {
					return nil
				}
				calls.Add(1)
				time.Sleep(hangs)
				return ctx.Err()
			}
			inHandler := hang
			if name == "codec" {
				inHandler = func(context.Context, step) error { return nil }
			}
			cfg.Codecs = []outbox.Codec{{ContentType: "text/plain", Encode: outbox.JSON().Encode, Decode: func(ctx context.Context, data []byte, event any) error {
				if err := json.Unmarshal(data, event); err != nil {
					return err
				}
				_ = hang(ctx, *event.(*step))
				return nil
			}}}
			var events []outbox.DomainEvent
			for _, account := range []string{"hangs", "a", "b"} {
				var event outbox.DomainEvent = step{account, 1}
				if name == "no tx, expiring" {
					event = outbox.With(event, outbox.EventOptions{Expires: time.Now().Add(time.Hour)})
				}
				events = append(events, event)
			}
			require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, events...) }))
			if name == "codec" {
				testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET payload = NULL, content_type = 'text/plain', payload_bytes = convert_to(payload::text, 'UTF8')`))
			}
			f.start(cfg, f.formOf(form, inHandler))
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND aggregate_id = 'hangs' AND attempt_count = 2
				AND last_error_message LIKE '%was given up'`, 1)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 2)
			require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.effect`))
			require.Equal(t, []int64{2, 2, 1}, []int64{calls.Load(), failed.Load(), dead.Load()})
			require.Zero(t, log.count("has expired"), log.String())
			if form != "batch" { // any event of the call may have caused the hang
				require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count <> 1`))
			}
		})
	}
}

// The call of a batch was given up and has returned. The events of other actions that the worker claimed with it have
// not caused the hang, and lose no attempt.
func TestHungBatchCostsNoOtherAction(t *testing.T) {
	t.Parallel()
	f, hangs := newWorkerFixture(t), atomic.Bool{}
	hangs.Store(true)
	cfg := outbox.WorkerConfig{Lease: time.Minute, PollInterval: 20 * time.Millisecond, HandlerConfig: outbox.HandlerConfig{
		From: outbox.FromStart, Concurrency: 1, HandlerTimeout: 200 * time.Millisecond, SlowHandler: 100 * time.Millisecond, Logger: new(workerLog).logger(),
		Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: time.Millisecond, MaxRetries: 3},
	}}
	var events []outbox.DomainEvent
	for n := range 5 {
		events = append(events, step{strconv.Itoa(n), 1})
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, events...) }))
	f.start(cfg, f.formOf("batch", func(ctx context.Context, _ step) error {
		if hangs.Swap(false) {
			time.Sleep(1800 * time.Millisecond) // it is given up after HandlerTimeout and a second
		}
		return ctx.Err()
	}), outbox.Handle("OTHER", func(context.Context, pgx.Tx, step, outbox.Metadata) error { return nil }))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 10)
	require.Positive(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE action = 'COUNTED' AND attempt_count = 2`))
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE action = 'OTHER' AND attempt_count <> 1`))
}

// The hang of one call is one failure for the breaker of its action, however many events the call has.
func TestHungBatchCountsOnceInItsBreaker(t *testing.T) {
	t.Parallel()
	f, hangs, opened := newWorkerFixture(t), atomic.Bool{}, atomic.Int64{}
	hangs.Store(true)
	cfg := outbox.WorkerConfig{Lease: time.Minute, PollInterval: 20 * time.Millisecond, HandlerConfig: outbox.HandlerConfig{
		From: outbox.FromStart, Concurrency: 1, MaxPoll: 200, HandlerTimeout: 200 * time.Millisecond, SlowHandler: 100 * time.Millisecond, Logger: new(workerLog).logger(),
		Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetryWait: time.Millisecond, MaxRetries: 3},
	}}
	cfg.Hooks.Breaker = func(string, outbox.BreakerState, outbox.BreakerState) { opened.Add(1) }
	var events []outbox.DomainEvent
	for n := range 2000 {
		events = append(events, step{strconv.Itoa(n), 1})
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, events...) }))
	const storm = 100 // failures of so many events open a breaker at once
	f.start(cfg, outbox.HandleBatch("COUNTED", func(_ context.Context, _ pgx.Tx, all []outbox.Received[step]) error {
		if len(all) >= storm && hangs.Swap(false) {
			time.Sleep(1800 * time.Millisecond) // it is given up after HandlerTimeout and a second
		}
		if !hangs.Load() { // no success, and no failure that counts
			return outbox.RetryAfter(errors.New("later"), time.Hour)
		}
		return nil
	}))
	f.eventually(fmt.Sprintf(`SELECT (count(*) >= %d)::int FROM {schema}.event_delivery WHERE last_error_message LIKE '%%was given up'`, storm), 1)
	require.Zero(t, opened.Load())
}
