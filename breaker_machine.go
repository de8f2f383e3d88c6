package outbox

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// breakerRules say when a breaker opens and closes: see BreakerConfig of the package outbox.
type breakerRules struct {
	Window int
	MinCalls int
	FailureRate float64
	OpenFor time.Duration
	Trials int
}

// breakerState is the state of a breaker.
type breakerState int

const (
	stateClosed breakerState = iota
	stateHalfOpen
	stateOpen
)

// String returns closed, half-open or open.
func (s breakerState) String() string {
	switch s {
	case stateClosed:
		return "closed"
	case stateHalfOpen:
		return "half-open"
	case stateOpen:
		return "open"
	}
	return fmt.Sprintf("unknown state: %d", int(s))
}

// stateOf translates a state of the machine.
func stateOf(s gobreaker.State) breakerState {
	switch s {
	case gobreaker.StateHalfOpen:
		return stateHalfOpen
	case gobreaker.StateOpen:
		return stateOpen
	case gobreaker.StateClosed:
	}
	return stateClosed
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
	cfg     breakerRules
	changed func(from, to breakerState, failureRate float64)

	// steady means that the breaker is closed and its window full of successes, so that
	// one more success changes nothing. Only a failure ends that, so steady is false in
	// every other state.
	steady     atomic.Bool
	generation atomic.Uint64 // counts changes of state

	mu        sync.Mutex // of all below; machine has a lock of its own inside it
	machine   *gobreaker.TwoStepCircuitBreaker[struct{}]
	current   breakerState // what machine was last seen in
	last      window
	trialsAt  time.Time     // when it was opened, plus OpenFor
	changes   []stateChange // for which changed has not been called yet
	notifying bool          // a goroutine is calling changed, without mu
}

type stateChange struct {
	from, to    breakerState
	failureRate float64 // of the last outcomes, in the state before
}

// newBreaker returns a closed breaker. It calls changed after each change of state, from
// one goroutine at a time and in the order of the changes, with the share of failures among
// the last outcomes, 0 if it was not closed; changed may call the breaker.
// The change to half-open happens when a method of the breaker is called.
func newBreaker(cfg breakerRules, changed func(from, to breakerState, failureRate float64)) *breaker {
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
	if b.current == stateHalfOpen {
		return err == nil
	}
	b.last.add(err != nil)
	b.steady.Store(b.last.calls == b.cfg.Window && b.last.failures == 0)
	return b.last.calls < b.cfg.MinCalls || b.last.failureRate() < b.cfg.FailureRate
}

// onChange is called by machine, under mu and under the lock of machine. Asking machine
// for its state here would deadlock.
func (b *breaker) onChange(_ string, from, to gobreaker.State) {
	b.current = stateOf(to)
	b.generation.Add(1)
	rate := b.last.failureRate()
	b.last.clear()
	if to == gobreaker.StateOpen {
		b.trialsAt = time.Now().Add(b.cfg.OpenFor)
	}
	b.changes = append(b.changes, stateChange{stateOf(from), stateOf(to), rate})
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
func (b *breaker) state() breakerState {
	b.mu.Lock()
	defer b.unlock()
	return stateOf(b.machine.State())
}

// wait returns how long an open breaker stays open, and 0 in any other state. If a
// half-open breaker allows nothing, other goroutines use the trial calls, and it is not
// known for how long.
func (b *breaker) wait() time.Duration {
	b.mu.Lock()
	defer b.unlock()
	if stateOf(b.machine.State()) != stateOpen {
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
	if b.current == stateHalfOpen {
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
