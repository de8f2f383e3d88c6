// Package contain holds back what goes wrong in functions: a [Callback] is a function of
// the host, which may panic or never return; a [Group] runs goroutines of our own, whose
// panics have to reach the caller.
package contain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// Callback calls a function of the host. The function runs in a goroutine of its own, so
// that a call can be abandoned: a goroutine cannot be ended from outside. A Callback is
// safe for concurrent use.
type Callback struct {
	name   string // of the function, in the log
	log    *slog.Logger
	limits Limits

	mu        sync.Mutex
	abandoned int           // calls that were abandoned and have not returned
	omitted   int           // calls that were not made because of them
	slow      bool          // the last call was abandoned
	waited    time.Duration // for calls whose context had ended, since one whose context had not
	panics    int           // since the last line in the log about one
	loggedAt  time.Time     // when that was
}

// Limits say how long a call is waited for.
type Limits struct {
	// Patience bounds the wait. Zero means that only the context does.
	Patience time.Duration
	// Grace bounds the wait after the context has ended. Several calls share it.
	Grace time.Duration
}

// HookLimits are those of functions that have to return quickly. Ten seconds are more than
// a hook needs that waits for a network, and fewer than a relay has for a send, so that
// a hook which hangs costs no lease. A stop waits for each hook a quarter of a second, so
// that it is over within two even if all hooks hang.
var HookLimits = Limits{Patience: 10 * time.Second, Grace: 250 * time.Millisecond}

const (
	// shortPatience replaces Patience if the call before was abandoned, so that a function which is always too slow
	// costs the relay its patience only once.
	shortPatience = 100 * time.Millisecond
	// quietFor is the shortest time between two log lines about panics of a function: it
	// may panic at every call.
	quietFor = time.Minute
)

var (
	// ErrAbandoned is the error of a call that did not return in time. It goes on.
	ErrAbandoned = errors.New("call does not return")
	// ErrOmitted is the error of a call that was not made, because an earlier one was
	// abandoned and has not returned.
	ErrOmitted = errors.New("an earlier call has not returned")
	// ErrGoexit is the error of a call that ended its goroutine.
	ErrGoexit = errors.New("call has ended its goroutine by runtime.Goexit, as FailNow of a test and testify's require do")
)

// NewCallback returns the callback of a function with a name. It does not call it.
func NewCallback(name string, log *slog.Logger, limits Limits) *Callback {
	return &Callback{name: name, log: log, limits: limits}
}

// call is one call of a function.
type call struct {
	began time.Time
	done  chan struct{} // closed when the function has returned
	err   error         // written before done is closed

	abandoned bool // under Callback.mu
}

// Call calls f and returns its error. If f panics, the error is a [*Panic], which is logged. If f
// has not returned when patience or grace is over, Call returns [ErrAbandoned]. Until f does
// return, later calls return [ErrOmitted] and call nothing. After these errors, values that f
// writes must not be read.
func (c *Callback) Call(ctx context.Context, f func() error) error {
	patience, ok := c.begin(ctx)
	if !ok {
		return ErrOmitted
	}
	one := &call{began: time.Now(), done: make(chan struct{})}
	go c.run(one, f)
	if c.wait(ctx, one, patience) || !c.abandon(one) {
		return one.err
	}
	c.log.Error("outbox: "+c.name+" does not return; it is not waited for any more, and not called again until it does",
		"after", time.Since(one.began).Round(time.Millisecond))
	return ErrAbandoned
}

// Notify is [Callback.Call] for a function that returns nothing. Errors are logged and not
// returned.
func (c *Callback) Notify(ctx context.Context, f func()) {
	_ = c.Call(ctx, func() error { f(); return nil })
}

// Inline calls f in the goroutine of the caller, and logs a panic. It is for functions that
// are called for every event, which a goroutine for each call would slow down. A call that
// does not return does not return to the caller either, and one that ends its goroutine ends
// the caller's, see [Do].
func (c *Callback) Inline(f func()) {
	err := ErrGoexit
	defer func() {
		if v := recover(); v != nil {
			err = NewPanic(v)
		}
		if err != nil {
			c.logPanic(err)
		}
	}()
	f()
	err = nil
}

// Alone is [Callback.Inline] for functions that are called seldom, in a goroutine of their
// own: a call that ends it does no harm.
func (c *Callback) Alone(f func()) {
	_ = Do(func() error { c.Inline(f); return nil }) // which logs what goes wrong
}

// begin returns how long to wait for a call. It returns false if there is to be none.
func (c *Callback) begin(ctx context.Context) (patience time.Duration, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.abandoned > 0 {
		c.omitted++
		return 0, false
	}
	if ctx.Err() == nil {
		c.waited = 0
	}
	if c.slow && c.limits.Patience > 0 {
		return shortPatience, true
	}
	return c.limits.Patience, true
}

// wait reports whether the call has returned within patience and grace.
func (c *Callback) wait(ctx context.Context, one *call, patience time.Duration) bool {
	var tooLong <-chan time.Time
	if patience > 0 {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		tooLong = timer.C
	}
	select {
	case <-one.done:
		return true
	case <-tooLong:
		return false
	case <-ctx.Done():
	}
	start := time.Now()
	grace := time.NewTimer(c.graceLeft())
	defer grace.Stop()
	defer func() { c.addWaited(time.Since(start)) }()
	select {
	case <-one.done:
		return true
	case <-tooLong:
	case <-grace.C:
	}
	return false
}

func (c *Callback) graceLeft() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(0, c.limits.Grace-c.waited)
}

func (c *Callback) addWaited(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waited += d
}

// abandon gives a call up. It returns false if the call has returned meanwhile.
func (c *Callback) abandon(one *call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-one.done:
		return false
	default:
	}
	one.abandoned, c.slow = true, true
	c.abandoned++
	return true
}

// run calls f and ends the call, also if f panics or ends the goroutine.
func (c *Callback) run(one *call, f func() error) {
	err := ErrGoexit
	defer func() {
		v := recover()
		if v != nil {
			err = NewPanic(v)
		}
		if v != nil || errors.Is(err, ErrGoexit) {
			c.logPanic(err)
		}
		c.end(one, err)
	}()
	err = f()
	CallMethods(err)
}

// end ends a call, and logs the end of one that was abandoned.
func (c *Callback) end(one *call, err error) {
	c.mu.Lock()
	one.err = err
	close(one.done)
	late, omitted := one.abandoned, c.omitted
	if late {
		c.abandoned--
		c.omitted = 0
	} else {
		c.slow = false
	}
	c.mu.Unlock()
	if late {
		c.log.Warn("outbox: "+c.name+" has returned", "after", time.Since(one.began).Round(time.Millisecond), "calls_left_out", omitted)
	}
}

// logPanic logs a panic, unless there was a line about one a short time ago.
func (c *Callback) logPanic(err error) {
	c.mu.Lock()
	c.panics++
	times, quiet := c.panics, !c.loggedAt.IsZero() && time.Since(c.loggedAt) < quietFor
	if !quiet {
		c.panics, c.loggedAt = 0, time.Now()
	}
	c.mu.Unlock()
	if quiet {
		return
	}
	var p *Panic
	args := []any{"error", err, "times", times}
	if errors.As(err, &p) {
		args = append(args, "stack", string(p.Stack))
	}
	c.log.Error("outbox: "+c.name+" has panicked", args...)
}

// Panic is the error of a function that panicked.
type Panic struct {
	// Value is what it panicked with.
	Value any
	// Stack is the stack of its goroutine, as the runtime prints it.
	Stack []byte
}

// NewPanic returns the error of a panic. A deferred function calls it with what recover
// returned.
func NewPanic(value any) *Panic { return &Panic{value, debug.Stack()} }

// Error returns the value without the stack.
func (p *Panic) Error() string { return fmt.Sprintf("panic: %v", p.Value) }

// Unwrap returns the value if it is an error.
func (p *Panic) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}
