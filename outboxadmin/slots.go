package outboxadmin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/outboxgo/outbox/internal/wait"
)

// The page shares its pool with the service. Its requests wait for slots. There are as many slots as
// connections that the page may use, Config.MaxConns. A request has at most one connection at a time.

const (
	// maxViews and maxActs bound the requests that wait, run, or are being answered, and so the memory that
	// they use.
	maxViews, maxActs = 32, 16
	// maxWait bounds how long a request waits for a slot.
	maxWait = 5 * time.Second
	// retryAfter is when to come again, in seconds.
	retryAfter = "2"
	// abandonedFor is how long PostgreSQL may go on with a statement after its request has ended. A
	// statement that is cancelled costs the pool its connection, so clients that come and go must
	// not cancel theirs at once.
	abandonedFor = time.Second
)

var errBusy = &problem{http.StatusServiceUnavailable, "Too much is asked at once",
	"This page uses few connections, so that the service is not slowed down. Try again in a moment."}

// slots limit requests and connections. The capacity of each channel is the limit.
type slots struct {
	views, acts chan struct{} // requests
	viewing     chan struct{} // connections for views: all but one, which is left to actions
	all         chan struct{} // connections
}

func newSlots(conns int) *slots {
	return &slots{
		views: make(chan struct{}, maxViews), acts: make(chan struct{}, maxActs),
		viewing: make(chan struct{}, max(1, conns-1)), all: make(chan struct{}, conns),
	}
}

// enter counts a request, until exit is called, or returns false if there are too many.
func (s *slots) enter(rt route) (exit func(), ok bool) {
	line := s.views
	switch {
	case rt.asks == nothing:
		return func() {}, true
	case rt.method == http.MethodPost:
		line = s.acts
	}
	select {
	case line <- struct{}{}:
		return func() { <-line }, true
	default:
		return nil, false
	}
}

// slot is the right of one request to one connection. Its goroutine alone uses it.
type slot struct {
	places []chan struct{} // in the order in which they are taken
	held   int
}

// take waits until a slot is free, at most maxWait.
func (s *slots) take(ctx context.Context, rt route) (*slot, error) {
	mine := &slot{places: []chan struct{}{s.viewing, s.all}}
	if rt.method == http.MethodPost {
		mine.places = mine.places[1:]
	}
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	if !mine.begin(ctx) {
		return nil, errBusy
	}
	return mine, nil
}

func (s *slot) begin(ctx context.Context) bool {
	for _, place := range s.places {
		select {
		case place <- struct{}{}:
			s.held++
		case <-ctx.Done():
			s.end()
			return false
		}
	}
	return true
}

func (s *slot) end() {
	for ; s.held > 0; s.held-- {
		<-s.places[s.held-1]
	}
}

// work is the use of PostgreSQL by a request. It ends after some time, and then the server cancels the
// statement.
type work struct {
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timeout time.Duration
	timer   *time.Timer
	slot    *slot
	parent  func() bool // stops watching for a client that goes away
}

func newWork(parent context.Context, timeout time.Duration, slot *slot) *work {
	w := &work{timeout: timeout, slot: slot}
	w.ctx, w.cancel = context.WithCancelCause(context.WithoutCancel(parent))
	w.timer = time.AfterFunc(timeout, func() { w.cancel(context.DeadlineExceeded) })
	w.parent = context.AfterFunc(parent, func() {
		wait.Sleep(w.ctx, abandonedFor)
		w.cancel(context.Cause(parent))
	})
	return w
}

func (w *work) end() {
	w.timer.Stop()
	w.parent()
	w.cancel(nil)
}

// pause lets those that wait go first, between two parts of a long action, and gives the
// next part its own time.
func (w *work) pause() {
	w.timer.Stop()
	w.slot.end()
	if w.slot.begin(w.ctx) { // if not, the action ends, because so does its context
		w.timer.Reset(w.timeout)
	}
}

// explain adds to an error that the time was over, if this caused the error.
func (w *work) explain(err error) error {
	if err != nil && errors.Is(context.Cause(w.ctx), context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	return err
}
