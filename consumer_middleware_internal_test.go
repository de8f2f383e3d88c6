package outbox

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

type middlewareNext = func(context.Context) error

var middlewarePlays = []struct {
	name       string
	middleware Middleware
	handler    string // the play of event b
	want       []string
}{
	{"it calls next", func(ctx context.Context, _ HandlerCall, next middlewareNext) error { return next(ctx) }, "", []string{"a1 b1: committed"}},
	{"it returns the error of next", func(ctx context.Context, _ HandlerCall, next middlewareNext) error { return next(ctx) }, "pp",
		[]string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "dead letter b after 1: permanent"}},
	{"it calls nothing, and returns nil: done, and noted", func(context.Context, HandlerCall, middlewareNext) error { return nil }, "", []string{": committed"}},
	{"it calls nothing, and returns an error: failed", func(_ context.Context, c HandlerCall, _ middlewareNext) error { return Permanent(errPlayed) }, "",
		[]string{": rolled back", "dead letter a after 1: permanent", ": rolled back", "dead letter b after 1: permanent"}},
	{"it does not want an error", func(ctx context.Context, _ HandlerCall, next middlewareNext) error { _ = next(ctx); return nil }, "-", []string{"a1 b1: committed"}},
	{"it wants an error", func(ctx context.Context, _ HandlerCall, next middlewareNext) error {
		return errors.Join(next(ctx), Permanent(errPlayed))
	}, "",
		[]string{"a1: rolled back", "dead letter a after 1: permanent", "b1: rolled back", "dead letter b after 1: permanent"}},
	{"it calls next twice", func(ctx context.Context, _ HandlerCall, next middlewareNext) error {
		_ = next(ctx)
		_ = next(ctx)
		return nil
	}, "",
		[]string{"a1: rolled back", "dead letter a after 1: handler", "b1: rolled back", "dead letter b after 1: handler"}},
	{"it does not wait for next", func(ctx context.Context, _ HandlerCall, next middlewareNext) error {
		began, end := make(chan struct{}), make(chan struct{})
		go func() {
			_ = next(testContext{ctx, func() { close(began); <-end; time.Sleep(time.Second) }})
		}()
		<-began
		defer close(end)
		return nil
	}, "", []string{"a1: rolled back", "dead letter a after 1: handler", "b1: rolled back", "dead letter b after 1: handler"}},
	{"it panics", func(context.Context, HandlerCall, middlewareNext) error { panic("no such tenant") }, "",
		[]string{": rolled back", "dead letter a after 1: panic", ": rolled back", "dead letter b after 1: panic"}},
	{"it ends its goroutine", func(context.Context, HandlerCall, middlewareNext) error { runtime.Goexit(); return nil }, "",
		[]string{": rolled back", "dead letter a after 1: goexit", ": rolled back", "dead letter b after 1: goexit"}},
}

// testContext runs a function when a handler begins.
type testContext struct {
	context.Context
	begin func()
}

// What becomes of two events that arrive together, by what a middleware does.
func TestMiddlewarePlays(t *testing.T) {
	t.Parallel()
	for _, tt := range middlewarePlays {
		synctest.Test(t, func(t *testing.T) {
			var s *partitionFixture
			cfg := ConsumerConfig{HandlerConfig: HandlerConfig{MaxRetries: -1, Middleware: []Middleware{tt.middleware}}}
			s = newPartitionFixture(t, cfg, Handle("ACTED", func(ctx context.Context, _ pgx.Tx, e played, m Metadata) error {
				if c, ok := ctx.(testContext); ok {
					c.begin()
				}
				return s.handle(ctx, e, m)
			}))
			s.handlers["b"] = tt.handler
			s.worker.handle(s.arrive("a", "b"))
			require.Equal(t, tt.want, s.log, tt.name)
			require.EqualValues(t, 2, s.worker.next.Offset, tt.name)
		})
	}
}

// The first middleware is outermost. Each gets as an error what is next panics with.
func TestMiddlewareOrder(t *testing.T) {
	t.Parallel()
	var seen []string
	around := func(name string) Middleware {
		return func(ctx context.Context, c HandlerCall, next middlewareNext) (err error) {
			seen = append(seen, fmt.Sprint(name, " ", c.Action, " ", c.Events[0].Event.(played).Name))
			defer func() { seen = append(seen, fmt.Sprint(name, " ", err)) }()
			return next(ctx)
		}
	}
	s := newPartitionFixture(t, ConsumerConfig{HandlerConfig: HandlerConfig{MaxRetries: -1, Middleware: []Middleware{around("first"), around("second")}}})
	s.handlers["a"] = "!"
	s.worker.handle(s.arrive("a"))
	require.Equal(t, []string{"first ACTED a", "second ACTED a", "second panic: played", "first panic: played"}, seen)
	s.handlers["b"], seen = "x", nil
	s.worker.handle(s.arrive("b"))
	require.Equal(t, []string{"first ACTED b", "second ACTED b", "second <nil>", "first <nil>"}, seen, "deferred functions run")
	require.Contains(t, s.log, "dead letter b after 1: goexit")
}

// A call without middleware costs no allocation more than the handler itself.
func TestNoMiddlewareNoAllocation(t *testing.T) {
	h := &handler{action: "ACTED", one: func(context.Context, pgx.Tx, arrival) error { return nil }}
	p, arrivals, ctx := &processor{}, []arrival{{event: played{"a"}}}, t.Context()
	require.Zero(t, testing.AllocsPerRun(100, func() { require.NoError(t, p.callInMiddleware(ctx, h, nil, arrivals)) }))
}
