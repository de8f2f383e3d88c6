package handling

import (
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/wait"
)

// BreakerRules say when the breaker of an action opens, and how the action is tried then. HandlerConfig.Retry of the
// package outbox describes them.
type BreakerRules struct {
	Events       int           // different events that fail in a row, for at least leastOutage
	FirstOpenFor time.Duration // doubles up to OpenFor
	OpenFor      time.Duration
	Trials       int // after the breaker was opened for the first time
}

const (
	breakerEvents = 10
	breakerTrials = 10
	mostOpenFor   = 30 * time.Second // and the longest wait of an event in an outage
	leastOutage   = time.Second      // an outage is longer
	stormFactor   = 10               // so many times Events in a row open a breaker at once
	mostTrials    = 16               // so many times Trials, at most
	trialShare    = 4                // trials use one in so many slots of handlers
)

// BreakerOf returns the rules of breakers where failed events are retried by a policy.
func BreakerOf(retry RetryPolicy) BreakerRules {
	return BreakerRules{
		Events: breakerEvents, FirstOpenFor: retry.RetryWait, OpenFor: retry.mostOutageWait(), Trials: breakerTrials,
	}
}

// actionBreaker is the breaker of an action. It is closed until different events have failed one after the other,
// without a success of any event. Then it is open for a while, and half-open until one trial succeeds or all trials
// have failed. Both the time and the number of trials double each time.
type actionBreaker struct {
	action  string
	rules   *BreakerRules
	slots   int // trials at the same time
	changed func(breakerChange)

	mu        sync.Mutex // of all below
	state     breaker.State
	failed    map[handled.Identity]struct{} // events that have failed since the last success; only while it is closed
	failures  int                           // different events of the closed state, and trials, that have failed in a row
	since     time.Time                     // the first of these failures
	openings  int                           // in a row
	opened    time.Time                     // the first of these openings
	until     time.Time                     // end of the open state
	left      int                           // trials that the half-open state still permits
	trials    map[*Trial]struct{}           // under way
	heads     int                           // partitions that wait for a trial
	succeeded time.Time                     // when the last call that has succeeded began
	saved     time.Time                     // the value of succeeded that other processes can see
	kept      time.Time                     // when a failure last did not count because no event had succeeded

	changes   []breakerChange // for which changed was not called yet
	notifying bool            // a goroutine calls changed, without mu
}

// breakerChange is a change of state.
type breakerChange struct {
	action   string
	from, to breaker.State
	failures int
	since    time.Time
	openFor  time.Duration
}

// unlock releases mu and calls changed, from one goroutine at a time and in the order of the changes.
func (b *actionBreaker) unlock() {
	for !b.notifying && len(b.changes) > 0 {
		c := b.changes[0]
		b.changes = b.changes[1:]
		b.notifying = true
		b.mu.Unlock()
		b.changed(c)
		b.mu.Lock()
		b.notifying = false
	}
	b.mu.Unlock()
}

func (b *actionBreaker) change(to breaker.State) {
	b.changes = append(b.changes, breakerChange{b.action, b.state, to, b.failures, b.since, time.Until(b.until)})
	b.state = to
}

// now returns the present state. Time alone makes an open breaker half-open. The caller holds mu.
func (b *actionBreaker) now() breaker.State {
	if b.state == breaker.Open && !time.Now().Before(b.until) {
		b.left = b.rules.Trials * min(1<<min(b.openings-1, 30), mostTrials)
		b.change(breaker.HalfOpen)
	}
	return b.state
}

func (b *actionBreaker) open() {
	if b.openings == 0 {
		b.opened = time.Now()
	}
	b.failed = nil
	b.until = time.Now().Add(wait.Exponential(b.rules.FirstOpenFor, b.rules.OpenFor, b.openings))
	b.openings++
	b.change(breaker.Open)
}

// note notes the failure of an event that is no trial.
func (b *actionBreaker) note(event handled.Identity) {
	if b.now() != breaker.Closed {
		return // the call began before
	}
	if len(b.failed) == 0 {
		b.since, b.failed = time.Now(), map[handled.Identity]struct{}{}
	}
	b.failed[event] = struct{}{}
	b.failures = len(b.failed)
	if b.failures >= stormFactor*b.rules.Events || b.failures >= b.rules.Events && time.Since(b.since) >= leastOutage {
		b.open()
	}
}

// succeed notes a success. One that is no trial does not close the breaker, because its call may have begun before the
// outage.
func (b *actionBreaker) succeed(trial *Trial, began time.Time) {
	if began.After(b.succeeded) {
		b.succeeded = began
	}
	if b.now() == breaker.Closed {
		b.failed, b.failures = nil, 0
		return
	}
	if _, underWay := b.trials[trial]; underWay {
		b.failures, b.openings = 0, 0
		clear(b.trials)
		b.change(breaker.Closed)
	}
}

// fail ends a trial that has failed. It reports whether the trial was under way.
func (b *actionBreaker) fail(trial *Trial) bool {
	if _, underWay := b.trials[trial]; !underWay {
		return false
	}
	delete(b.trials, trial)
	b.failures++
	if b.left == 0 && len(b.trials) == 0 {
		b.open()
	}
	return true
}

// release ends a trial without an outcome. Another one is permitted in its place.
func (b *actionBreaker) release(trial *Trial) {
	if _, underWay := b.trials[trial]; underWay {
		delete(b.trials, trial)
		b.left++
	}
}

// try returns a trial if the breaker permits one now. It needs none if the breaker is closed.
func (b *actionBreaker) try(parked bool, timeout time.Duration) (trial *Trial, ok bool) {
	if b.now() != breaker.HalfOpen {
		return nil, b.state == breaker.Closed
	}
	for t := range b.trials {
		if time.Since(t.began) > timeout {
			b.release(t)
		}
	}
	if b.left == 0 || len(b.trials) >= b.slots || parked && b.heads > 0 {
		return nil, false
	}
	b.left--
	trial = &Trial{of: b, began: time.Now()}
	b.trials[trial] = struct{}{}
	return trial, true
}

// reasons describes an outage of the action, for Health.
func (b *actionBreaker) reasons() (reasons []string) {
	if s := b.now(); s != breaker.Closed {
		reasons = append(reasons, fmt.Sprintf("the breaker of action %s is %v: %d events in a row have failed for %v, and others wait",
			b.action, s, b.failures, time.Since(b.since).Round(time.Second)))
	}
	if b.kept.After(b.succeeded) && time.Since(b.kept) < 2*mostOpenFor {
		reasons = append(reasons, fmt.Sprintf("an event of action %s fails and is tried again without using up attempts, "+
			"because no other event of the action has succeeded since its last failure that counts", b.action))
	}
	return reasons
}
