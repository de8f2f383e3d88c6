package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/outboxgo/outbox/internal/check"
)

// BreakerConfig tunes the circuit breaker of a [Relay], which sends nothing for a while
// when Kafka fails. An event that Kafka rejects is no failure, because Kafka answered.
// The zero value is ready for production.
type BreakerConfig struct {
	// Window is how many of the last outcomes count, at most 10,000. Zero means 10.
	Window int
	// MinCalls is how many outcomes must be known before the breaker can open, at most
	// Window. Zero means 5.
	MinCalls int
	// FailureRate is the share of failures that opens the breaker, above 0 and at
	// most 1. Zero means 0.5.
	FailureRate float64
	// OpenFor is how long an open breaker lets nothing through; after that it is
	// half-open. Zero means 30 s.
	OpenFor time.Duration
	// Trials is how many calls a half-open breaker lets through, at most 10,000. When
	// all of them succeed the breaker closes, when one fails it opens again. Zero means 3.
	Trials int
}

const (
	defaultWindow      = 10
	defaultMinCalls    = 5
	defaultFailureRate = 0.5
	defaultOpenFor     = 30 * time.Second
	defaultTrials      = 3
	maxBreakerCalls    = 10_000
)

func (c BreakerConfig) withDefaults() BreakerConfig {
	c.Window = cmp.Or(c.Window, defaultWindow)
	c.MinCalls = cmp.Or(c.MinCalls, defaultMinCalls)
	c.FailureRate = cmp.Or(c.FailureRate, defaultFailureRate)
	c.OpenFor = cmp.Or(c.OpenFor, defaultOpenFor)
	c.Trials = cmp.Or(c.Trials, defaultTrials)
	return c
}

// validate checks a configuration with its defaults. given is without them.
func (c BreakerConfig) validate(given BreakerConfig) error {
	errs := []error{
		check.NotNegative("Breaker.Window", c.Window),
		check.NotAbove("Breaker.Window", c.Window, maxBreakerCalls),
		check.NotNegative("Breaker.MinCalls", c.MinCalls),
		check.NotNegative("Breaker.OpenFor", c.OpenFor),
		check.NotNegative("Breaker.Trials", c.Trials),
		check.NotAbove("Breaker.Trials", c.Trials, maxBreakerCalls),
		check.InOrder(check.Field[int]{Name: "Breaker.MinCalls", Value: c.MinCalls, Given: given.MinCalls},
			check.Field[int]{Name: "Breaker.Window", Value: c.Window, Given: given.Window}),
	}
	if !(c.FailureRate > 0 && c.FailureRate <= 1) { // nor NaN
		errs = append(errs, fmt.Errorf("field Breaker.FailureRate is %v: must be above 0 and at most 1", c.FailureRate))
	}
	return errors.Join(errs...)
}

// BreakerState is the state of a circuit breaker.
type BreakerState int

const (
	// BreakerClosed lets everything through.
	BreakerClosed BreakerState = iota
	// BreakerHalfOpen lets trial calls through.
	BreakerHalfOpen
	// BreakerOpen lets nothing through.
	BreakerOpen
)

// String returns closed, half-open or open.
func (s BreakerState) String() string {
	switch s {
	case BreakerClosed:
		return "closed"
	case BreakerHalfOpen:
		return "half-open"
	case BreakerOpen:
		return "open"
	}
	return fmt.Sprintf("unknown state: %d", int(s))
}

// breakerStateOf translates a state of the machine.
func breakerStateOf(s gobreaker.State) BreakerState {
	switch s {
	case gobreaker.StateHalfOpen:
		return BreakerHalfOpen
	case gobreaker.StateOpen:
		return BreakerOpen
	case gobreaker.StateClosed:
	}
	return BreakerClosed
}

// breaker decides whether a call may be tried, from the outcomes of earlier calls.
//
// gobreaker keeps the state: its generations exclude late outcomes, and its requests are
// the trial calls. This file decides when to open, for two reasons. The windows of
// gobreaker are periods of time. And it calls ReadyToTrip after failures only, but a
// success, too, can be the call that brings the number of outcomes to MinCalls. So the
// decision is made in IsSuccessful, which gobreaker calls after each outcome that counts:
// classify returns false for the outcome that opens the breaker.
//
// A breaker may be used by any number of goroutines.
type breaker struct {
	cfg     BreakerConfig
	changed func(from, to BreakerState, failureRate float64)

	// steady means that the breaker is closed and its window full of successes, so that
	// one more success changes nothing. Only a failure ends that, so steady is false in
	// every other state.
	steady     atomic.Bool
	generation atomic.Uint64 // counts changes of state

	mu        sync.Mutex // of all below; machine has a lock of its own inside it
	machine   *gobreaker.TwoStepCircuitBreaker[struct{}]
	current   BreakerState // what machine was last seen in
	last      window
	trialsAt  time.Time     // when it was opened, plus OpenFor
	changes   []stateChange // for which changed has not been called yet
	notifying bool          // a goroutine is calling changed, without mu
}

type stateChange struct {
	from, to    BreakerState
	failureRate float64 // of the last outcomes, in the state before
}

// newBreaker returns a closed breaker. It calls changed after each change of state, from
// one goroutine at a time and in the order of the changes, with the share of failures among
// the last outcomes, 0 if it was not closed; changed may call the breaker.
// The change to half-open happens when a method of the breaker is called.
func newBreaker(cfg BreakerConfig, changed func(from, to BreakerState, failureRate float64)) *breaker {
	b := &breaker{cfg: cfg, changed: changed, last: window{failed: make([]bool, cfg.Window)}}
	b.machine = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: uint32(cfg.Trials),
		// gobreaker waits until more than Timeout has passed, and takes 0 for a minute.
		Timeout:       max(cfg.OpenFor-1, 1),
		IsExcluded:    func(err error) bool { return errors.Is(err, errCallCancelled) },
		IsSuccessful:  b.classify,
		ReadyToTrip:   func(gobreaker.Counts) bool { return true }, // classify has decided
		OnStateChange: b.onChange,
	})
	return b
}

// The outcomes of calls that are not successful, as gobreaker gets them.
var (
	errCallFailed    = errors.New("call failed")
	errCallCancelled = errors.New("call cancelled")
)

// classify takes the outcome of a call that was begun in the current state, and returns
// whether the breaker can stay in this state. machine calls it under mu.
func (b *breaker) classify(err error) bool {
	if b.current == BreakerHalfOpen {
		return err == nil
	}
	b.last.add(err != nil)
	b.steady.Store(b.last.calls == b.cfg.Window && b.last.failures == 0)
	return b.last.calls < b.cfg.MinCalls || b.last.failureRate() < b.cfg.FailureRate
}

// onChange is called by machine, under mu and under the lock of machine. Asking machine
// for its state here would deadlock.
func (b *breaker) onChange(_ string, from, to gobreaker.State) {
	b.current = breakerStateOf(to)
	b.generation.Add(1)
	rate := b.last.failureRate()
	b.last.clear()
	if to == gobreaker.StateOpen {
		b.trialsAt = time.Now().Add(b.cfg.OpenFor)
	}
	b.changes = append(b.changes, stateChange{breakerStateOf(from), breakerStateOf(to), rate})
}

// unlock releases mu and calls changed. While one goroutine does that, the others leave
// their changes to it: otherwise one could overtake another between mu and changed.
func (b *breaker) unlock() {
	for !b.notifying && len(b.changes) > 0 {
		c := b.changes[0]
		b.changes = b.changes[1:]
		b.notifying = true
		b.mu.Unlock()
		b.changed(c.from, c.to, c.failureRate)
		b.mu.Lock()
		b.notifying = false
	}
	b.mu.Unlock()
}

// state returns the present state. An open breaker becomes half-open by time alone.
func (b *breaker) state() BreakerState {
	b.mu.Lock()
	defer b.unlock()
	return breakerStateOf(b.machine.State())
}

// wait returns how long an open breaker stays open, and 0 in any other state. If a
// half-open breaker allows nothing, other goroutines use the trial calls, and it is not
// known for how long.
func (b *breaker) wait() time.Duration {
	b.mu.Lock()
	defer b.unlock()
	if breakerStateOf(b.machine.State()) != BreakerOpen {
		return 0
	}
	return time.Until(b.trialsAt)
}

// allow asks for permission for n calls. It grants all of them when closed, the trial
// calls that are left when half-open, none when open. Each call that was granted needs an
// outcome; release the permit when all outcomes are reported.
// A nil breaker grants everything and learns nothing.
func (b *breaker) allow(n int) *permit {
	if b == nil {
		return &permit{granted: n}
	}
	p := &permit{breaker: b}
	if n <= 0 {
		return p
	}
	b.mu.Lock()
	defer b.unlock()
	done, err := b.machine.Allow()
	if err != nil { // open, or out of trial calls: there is no other error
		return p
	}
	p.done, p.generation, p.granted = done, b.generation.Load(), n
	if b.current == BreakerHalfOpen {
		p.trial, p.granted = true, 1
		for p.granted < n {
			// done knows nothing but the generation, so one serves for all. A closed
			// breaker does not even count requests, and is asked only once.
			if _, err := b.machine.Allow(); err != nil {
				break
			}
			p.granted++
		}
	}
	p.unreported.Store(int64(p.granted))
	return p
}

// permit lets calls be tried. It may be used by several goroutines.
type permit struct {
	breaker    *breaker
	granted    int // calls, from the first that was asked for
	trial      bool
	generation uint64
	done       func(error)
	unreported atomic.Int64 // calls without an outcome; negative after too many
}

// holds reports whether the breaker is still in the state in which it gave p. If not,
// calls that have not begun should not begin.
func (p *permit) holds() bool {
	return p.breaker == nil || p.breaker.generation.Load() == p.generation
}

// callResult is how a call ended, as far as the breaker is concerned.
type callResult int

const (
	callSucceeded callResult = iota // Kafka answered, even if it rejected the event
	callFailed                      // Kafka was unavailable
	callCancelled                   // does not count, and gives the permission back
)

// report takes the outcome of one call. It does not count if the breaker has
// changed since p was given, or if all calls have an outcome already.
func (p *permit) report(o callResult) {
	b := p.breaker
	switch {
	case b == nil, p.unreported.Add(-1) < 0:
		return
	case o == callSucceeded && b.steady.Load():
		return
	case o == callCancelled && !p.trial:
		return
	}
	var err error
	switch o {
	case callFailed:
		err = errCallFailed
	case callCancelled:
		err = errCallCancelled
	case callSucceeded:
	}
	b.mu.Lock()
	defer b.unlock()
	p.done(err)
}

// release gives back the calls that have no outcome. It may be called again.
func (p *permit) release() {
	for p.breaker != nil && p.unreported.Load() > 0 {
		p.report(callCancelled)
	}
}

// window holds the last outcomes. Its size is the length of failed.
type window struct {
	failed          []bool // a ring; its oldest is at next, once it is full
	next            int
	calls, failures int
}

func (w *window) add(failed bool) {
	if w.calls == len(w.failed) {
		w.drop()
	}
	w.failed[w.next] = failed
	w.next = (w.next + 1) % len(w.failed)
	w.calls++
	if failed {
		w.failures++
	}
}

// drop takes the oldest outcome out of a full window.
func (w *window) drop() {
	w.calls--
	if w.failed[w.next] {
		w.failures--
	}
}

func (w *window) clear() { w.next, w.calls, w.failures = 0, 0, 0 }

// failureRate divides, because 0.07 * 100 is more than 7. Without calls it is 0.
func (w *window) failureRate() float64 { return float64(w.failures) / float64(max(w.calls, 1)) }
