package itest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

type nextHandler = func(context.Context) error

// A middleware gets the events, all those of a batch, and the transaction if there is one. The
// handler gets its context. It is not called for repeats or for dead events.
func TestMiddleware(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	type mark struct{}
	var mu sync.Mutex
	var called []string
	around := func(ctx context.Context, call outbox.HandlerCall, next nextHandler) error {
		err := next(context.WithValue(ctx, mark{}, call.Action))
		mu.Lock()
		defer mu.Unlock()
		called = append(called, fmt.Sprint(call.Action, " in transaction: ", call.Tx != nil, ", error: ", err))
		for _, e := range call.Events {
			called = append(called, fmt.Sprint(call.Action, " ", e.Metadata.ID, " ", e.Event.(sale).Amount))
		}
		return err
	}
	marked := func(ctx context.Context, action string) { require.Equal(t, action, ctx.Value(mark{})) }
	s.send(t, s.saleRecord("1", oneSale), s.saleRecord("2", oneSale), s.saleRecord("1", oneSale))
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Middleware: []outbox.Middleware{around}, From: outbox.FromStart}},
		outbox.HandleBatch("ALL", func(ctx context.Context, tx pgx.Tx, es []outbox.Received[sale]) error { marked(ctx, "ALL"); return nil }),
		outbox.HandleNoTx("BAD", func(ctx context.Context, e sale, m outbox.Metadata) error {
			marked(ctx, "BAD")
			return outbox.Permanent(errors.New("bad"))
		})).Run)
	want := []string{
		"ALL in transaction: true, error: <nil>", "ALL 1 1", "ALL 2 1",
		"BAD in transaction: false, error: bad", "BAD 1 1", "BAD in transaction: false, error: bad", "BAD 2 1",
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		mu.Lock()
		defer mu.Unlock()
		assert.Equal(c, want, called)
	}, testenv.Patience, 10*time.Millisecond)
}

// A middleware may set in the transaction what the handler needs. It is the handler's transaction:
// the settings are gone for the next, and only the consumer ends it.
func TestMiddlewareInTransaction(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	tenant := func(ctx context.Context, call outbox.HandlerCall, next nextHandler) error {
		if _, err := call.Tx.Exec(ctx, `SELECT set_config('shop.tenant', $1, true)`, call.Events[0].Event.(sale).Product); err != nil {
			return err
		}
		return next(ctx)
	}
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		var of string
		if err := tx.QueryRow(ctx, `SELECT current_setting('shop.tenant')`).Scan(&of); err != nil || of != e.Product {
			return fmt.Errorf("tenant %s of %s: %w", of, e.Product, err)
		}
		return s.count(ctx, tx, e, m)
	})
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}, Middleware: []outbox.Middleware{tenant}, From: outbox.FromStart}}
	s.sendSales(t, 10, nil)
	s.send(t, s.saleRecord(uuid.NewString(), []byte(`{"product":"q","amount":1}`)))
	testenv.Run(t, s.consumer(t, cfg, h).Run)
	require.Eventually(t, func() bool { c := s.counts(t); return c["p"] == 10 && c["q"] == 1 }, testenv.Patience, 10*time.Millisecond, "%v", s.counts(t))

	cfg.Middleware = []outbox.Middleware{func(ctx context.Context, call outbox.HandlerCall, next nextHandler) error {
		return errors.Join(next(ctx), call.Tx.Commit(ctx))
	}}
	require.ErrorIs(t, s.groupConsumer(t, "commits", cfg, outbox.Handle("COUNTED", s.count)).Deliver(background, s.saleRecord(uuid.NewString(), oneSale)), outbox.ErrHandlerTx)
	require.Equal(t, 10, s.counts(t)["p"])
}

// A middleware that returns nil without calling next has skipped the event for good: it is
// noted as done. With an error the event is tried again.
func TestMiddlewareSkips(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var skip, repeats, failures atomic.Int32
	closed := errors.New("closed")
	gate := func(ctx context.Context, call outbox.HandlerCall, next nextHandler) error {
		switch {
		case call.Events[0].Metadata.ID == "skip":
			skip.Add(1)
			return nil
		case call.Events[0].Metadata.ID == "later" && call.Events[0].Metadata.Attempt == 1:
			return closed
		}
		return next(ctx)
	}
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Middleware: []outbox.Middleware{gate}, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond}, Hooks: outbox.ConsumerHooks{
		Repeated: func(outbox.Metadata, string) { repeats.Add(1) },
		Failed: func(_ outbox.Metadata, _ string, err error, _ bool) {
			if errors.Is(err, closed) {
				failures.Add(1)
			}
		},
	}, From: outbox.FromStart}}
	c := s.consumer(t, cfg, outbox.Handle("COUNTED", s.count))
	testenv.Run(t, c.Run)
	s.send(t, s.saleRecord("skip", oneSale))
	require.Eventually(t, func() bool { return s.relayFixture.count(t, "event_handled") == 1 }, testenv.Patience, 10*time.Millisecond)
	s.send(t, s.saleRecord("skip", oneSale), s.saleRecord("later", oneSale))
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, []int32{1, 1, 1}, []int32{skip.Load(), repeats.Load(), failures.Load()})
	require.Equal(t, 2, s.relayFixture.count(t, "event_handled"))
}

// To call next twice, or not to wait for it, is an error, and nothing is committed.
func TestMiddlewareMisuse(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	for want, m := range map[string]outbox.Middleware{
		"next is called twice": func(ctx context.Context, _ outbox.HandlerCall, next nextHandler) error {
			err := next(ctx)
			_ = next(ctx)
			return err
		},
		"it has returned before next has": func(ctx context.Context, _ outbox.HandlerCall, next nextHandler) error {
			began := make(chan struct{})
			go func() { _ = next(context.WithValue(ctx, started{}, began)) }()
			<-began
			return nil
		},
	} {
		group := "g-" + uuid.NewString()
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Middleware: []outbox.Middleware{m}, From: outbox.FromStart}}
		c := s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			if began, ok := ctx.Value(started{}).(chan struct{}); ok {
				close(began)
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.2)`); err != nil {
					return err
				}
			}
			return s.count(ctx, tx, e, m)
		}))
		require.EqualError(t, c.Deliver(background, s.saleRecord(uuid.NewString(), oneSale)), "middleware of handler COUNTED: "+want)
	}
	require.Zero(t, s.counts(t)["p"])
	require.Zero(t, s.relayFixture.count(t, "event_handled"))

	_, err := outbox.NewConsumer(s.db, nil, s.events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Middleware: []outbox.Middleware{nil}}},
		outbox.Handle("COUNTED", s.count))
	require.ErrorContains(t, err, "field Middleware: number 0 must not be nil")
}

// started is the key of a channel that a handler closes when it begins.
type started struct{}
