package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/stretchr/testify/require"
)

type middlewareNext = func(context.Context) error

var middlewarePlays = []struct {
	name       string
	middleware handling.Middleware
	handler    string // the play of event b
	want       []string
}{
	{"it calls next", func(ctx context.Context, _ handling.HandlerCall, next middlewareNext) error { return next(ctx) }, "", []string{"a1 b1: committed"}},
	{"it returns the error of next", func(ctx context.Context, _ handling.HandlerCall, next middlewareNext) error { return next(ctx) }, "pp",
		[]string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "dead letter b after 1: permanent"}},
	{"it calls nothing, and returns nil: done, and noted", func(context.Context, handling.HandlerCall, middlewareNext) error { return nil }, "", []string{": committed"}},
	{"it calls nothing, and returns an error: failed", func(_ context.Context, c handling.HandlerCall, _ middlewareNext) error {
		return handling.Permanent(errPlayed)
	}, "",
		[]string{": rolled back", "dead letter a after 1: permanent", ": rolled back", "dead letter b after 1: permanent"}},
	{"it does not want an error", func(ctx context.Context, _ handling.HandlerCall, next middlewareNext) error {
		_ = next(ctx)
		return nil
	}, "-", []string{"a1 b1: committed"}},
	{"it wants an error", func(ctx context.Context, _ handling.HandlerCall, next middlewareNext) error {
		return errors.Join(next(ctx), handling.Permanent(errPlayed))
	}, "",
		[]string{"a1: rolled back", "dead letter a after 1: permanent", "b1: rolled back", "dead letter b after 1: permanent"}},
	{"it calls next twice", func(ctx context.Context, _ handling.HandlerCall, next middlewareNext) error {
		_ = next(ctx)
		_ = next(ctx)
		return nil
	}, "",
		[]string{"a1: rolled back", "dead letter a after 1: handler", "b1: rolled back", "dead letter b after 1: handler"}},
	{"it does not wait for next", func(ctx context.Context, _ handling.HandlerCall, next middlewareNext) error {
		began, end := make(chan struct{}), make(chan struct{})
		go func() {
			_ = next(testContext{ctx, func() { close(began); <-end; time.Sleep(time.Second) }})
		}()
		<-began
		defer close(end)
		return nil
	}, "", []string{"a1: rolled back", "dead letter a after 1: handler", "b1: rolled back", "dead letter b after 1: handler"}},
	{"it panics", func(context.Context, handling.HandlerCall, middlewareNext) error { panic("no such tenant") }, "",
		[]string{": rolled back", "dead letter a after 1: panic", ": rolled back", "dead letter b after 1: panic"}},
	{"it ends its goroutine", func(context.Context, handling.HandlerCall, middlewareNext) error { runtime.Goexit(); return nil }, "",
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
			cfg := Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: -1}, Middleware: []handling.Middleware{tt.middleware}}}
			s = newPartitionFixture(t, cfg, handle("ACTED", func(ctx context.Context, _ pgx.Tx, e played, m envelope.Received) error {
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
	around := func(name string) handling.Middleware {
		return func(ctx context.Context, c handling.HandlerCall, next middlewareNext) (err error) {
			seen = append(seen, fmt.Sprint(name, " ", c.Action, " ", c.Arrivals[0].Event.(played).Name))
			defer func() { seen = append(seen, fmt.Sprint(name, " ", err)) }()
			return next(ctx)
		}
	}
	s := newPartitionFixture(t, Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: -1}, Middleware: []handling.Middleware{around("first"), around("second")}}})
	s.handlers["a"] = "!"
	s.worker.handle(s.arrive("a"))
	require.Equal(t, []string{"first ACTED a", "second ACTED a", "second panic: played", "first panic: played"}, seen)
	s.handlers["b"], seen = "x", nil
	s.worker.handle(s.arrive("b"))
	require.Equal(t, []string{"first ACTED b", "second ACTED b", "second <nil>", "first <nil>"}, seen, "deferred functions run")
	require.Contains(t, s.log, "dead letter b after 1: goexit")
}
