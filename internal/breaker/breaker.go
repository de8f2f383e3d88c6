// Package breaker stops calls for a while when most of them fail. A relay has a breaker for its sends to Kafka. The
// breakers of actions, in package handling, have other rules and the same states.
//
// A breaker is closed, open or half-open. Half of a full window of outcomes must be known before it opens. It stays
// open for a time, then a few trial calls decide: one failure opens it again, and when all of them succeed it
// closes. Time alone makes it half-open, when a method is called.
package breaker

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// Rules say when a breaker opens and closes. BreakerConfig of the package outbox describes them.
type Rules struct {
	Window      int
	FailureRate float64
	OpenFor     time.Duration
	Trials      int
}

// minCalls is how many outcomes must be known before a breaker can open: half of the window, rounded up.
func (r Rules) minCalls() int { return (r.Window + 1) / 2 }

// State is the state of a breaker.
type State int

// States of a breaker.
const (
	Closed   State = iota // lets everything through
	HalfOpen              // lets trials through
	Open                  // lets nothing through
)

// String returns closed, half-open or open.
func (s State) String() string {
	switch s {
	case Closed:
		return "closed"
	case HalfOpen:
		return "half-open"
	case Open:
		return "open"
	}
	return fmt.Sprintf("unknown state: %d", int(s))
}

// stateOf translates a state of the machine.
func stateOf(s gobreaker.State) State {
	switch s {
	case gobreaker.StateHalfOpen:
		return HalfOpen
	case gobreaker.StateOpen:
		return Open
	case gobreaker.StateClosed:
	}
	return Closed
}

// Breaker decides whether a call may be tried, from the outcomes of earlier calls.
//
// gobreaker keeps the state: its generations exclude late outcomes, and its requests are
// the trial calls. This file decides when to open, for two reasons. The windows of
// gobreaker are periods of time. And it calls ReadyToTrip after failures only, but a
// success, too, can be the call that brings the number of outcomes to half of the window. So the
// decision is made in IsSuccessful, which gobreaker calls after each outcome that counts:
// classify returns false for the outcome that opens the breaker.
//
// A breaker may be used by any number of goroutines.
type Breaker struct {
	cfg     Rules
	changed func(from, to State, failureRate float64)

	// Steady means that the breaker is closed and its window full of successes, so that
	// one more success changes nothing. Only a failure ends that, so steady is false in
	// every other state.
	Steady     atomic.Bool
	generation atomic.Uint64 // counts changes of state

	mu        sync.Mutex // of all below; machine has a lock of its own inside it
	machine   *gobreaker.TwoStepCircuitBreaker[struct{}]
	current   State // what machine was last seen in
	last      window
	trialsAt  time.Time     // when it was opened, plus OpenFor
	changes   []stateChange // for which changed has not been called yet
	notifying bool          // a goroutine is calling changed, without mu
}

type stateChange struct {
	from, to    State
	failureRate float64 // of the last outcomes, in the state before
}

// New returns a closed breaker. It calls changed after each change of state, from
// one goroutine at a time and in the order of the changes, with the share of failures among
// the last outcomes, 0 if it was not closed; changed may call the breaker.
// The change to half-open happens when a method of the breaker is called.
func New(cfg Rules, changed func(from, to State, failureRate float64)) *Breaker {
	b := &Breaker{cfg: cfg, changed: changed, last: window{failed: make([]bool, cfg.Window)}}
	b.machine = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests:   uint32(cfg.Trials),
		Timeout:       1, // isOpen decides when an open breaker becomes half-open
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
func (b *Breaker) classify(err error) bool {
	if b.current == HalfOpen {
		return err == nil
	}
	b.last.add(err != nil)
	b.Steady.Store(b.last.calls == b.cfg.Window && b.last.failures == 0)
	return b.last.calls < b.cfg.minCalls() || b.last.failureRate() < b.cfg.FailureRate
}

// onChange is called by machine, under mu and under the lock of machine. Asking machine
// for its state here would deadlock.
func (b *Breaker) onChange(_ string, from, to gobreaker.State) {
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
func (b *Breaker) unlock() {
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

// isOpen reports whether the breaker is open and stays so for a while. Otherwise machine has the state: it is half-open
// when it is asked. The caller holds mu.
func (b *Breaker) isOpen() bool { return b.current == Open && time.Now().Before(b.trialsAt) }

// state returns the present state. The caller holds mu.
func (b *Breaker) state() State {
	if b.isOpen() {
		return Open
	}
	return stateOf(b.machine.State())
}

// State returns the present state. An open breaker becomes half-open by time alone, or by [Breaker.TryNow].
func (b *Breaker) State() State {
	b.mu.Lock()
	defer b.unlock()
	return b.state()
}

// TryNow makes an open breaker half-open.
func (b *Breaker) TryNow() {
	b.mu.Lock()
	defer b.unlock()
	b.trialsAt = time.Time{}
	b.state()
}

// Wait returns how long an open breaker stays open, and 0 in any other state. If a half-open breaker allows no call,
// other goroutines use the trial calls; when they end is not known.
func (b *Breaker) Wait() time.Duration {
	b.mu.Lock()
	defer b.unlock()
	if b.state() != Open {
		return 0
	}
	return time.Until(b.trialsAt)
}

// Allow asks for permission for n calls. A closed breaker grants all of them, a half-open one the trial calls that
// are left, an open one none. Each granted call needs an outcome; release the permit when all outcomes are reported.
// A nil breaker grants everything and learns nothing.
func (b *Breaker) Allow(n int) *Permit {
	if b == nil {
		return &Permit{Granted: n}
	}
	p := &Permit{Breaker: b}
	if n <= 0 {
		return p
	}
	b.mu.Lock()
	defer b.unlock()
	if b.isOpen() {
		return p
	}
	done, err := b.machine.Allow()
	if err != nil { // open, or out of trial calls: there is no other error
		return p
	}
	p.Done, p.Generation, p.Granted = done, b.generation.Load(), n
	if b.current == HalfOpen {
		p.Trial, p.Granted = true, 1
		for p.Granted < n {
			// done knows nothing but the generation, so one serves for all. A closed
			// breaker does not even count requests, and is asked only once.
			if _, err := b.machine.Allow(); err != nil {
				break
			}
			p.Granted++
		}
	}
	p.Unreported.Store(int64(p.Granted))
	return p
}

// Permit lets calls be tried. It may be used by several goroutines.
type Permit struct {
	Breaker    *Breaker
	Granted    int // calls, from the first that was asked for
	Trial      bool
	Generation uint64
	Done       func(error)
	Unreported atomic.Int64 // calls without an outcome; negative after too many
}

// Holds reports whether the breaker has not changed since it gave p. If it has, calls that have not begun should not
// begin.
func (p *Permit) Holds() bool {
	return p.Breaker == nil || p.Breaker.generation.Load() == p.Generation
}

// Outcome is how a call ended, for the breaker.
type Outcome int

// Outcomes of a call.
const (
	Succeeded Outcome = iota // Kafka answered, even if it rejected the event
	Failed                   // Kafka was unavailable
	Cancelled                // does not count, and gives the permission back
)

// Report takes the outcome of one call. The outcome does not count if the breaker has changed since it gave p, or if
// all calls have an outcome already.
func (p *Permit) Report(o Outcome) {
	b := p.Breaker
	switch {
	case b == nil, p.Unreported.Add(-1) < 0:
		return
	case o == Succeeded && b.Steady.Load():
		return
	case o == Cancelled && !p.Trial:
		return
	}
	var err error
	switch o {
	case Failed:
		err = errCallFailed
	case Cancelled:
		err = errCallCancelled
	case Succeeded:
	}
	b.mu.Lock()
	defer b.unlock()
	if !b.isOpen() { // then the call began before it opened
		p.Done(err)
	}
}

// Release gives back the calls that have no outcome. It may be called again.
func (p *Permit) Release() {
	for p.Breaker != nil && p.Unreported.Load() > 0 {
		p.Report(Cancelled)
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
