package handling

import (
	"maps"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/outage"
)

// ActionBreakers are the breakers of the actions of a group in this process. If the events of an action fail one after
// the other, because a service that it needs is down, its events wait. They are not parked and use up no attempts. The
// breakers also know when an action has last succeeded. A nil ActionBreakers permits everything.
type ActionBreakers struct {
	trialTimeout time.Duration // after which a trial without an outcome is released: its handler does not return
	of           map[string]*actionBreaker
}

// Trial is the permission to try one event of an action whose breaker is not closed. It belongs to the caller that
// tries the event. The caller releases it in a deferred call, so that the next event gets its trial however this one
// ends. A nil Trial permits nothing. Any goroutine may call its methods.
type Trial struct {
	of    *actionBreaker
	began time.Time
}

// Permits reports whether the trial is under way, and for an action.
func (t *Trial) Permits(action string) bool {
	if t == nil || t.of.action != action {
		return false
	}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	_, underWay := t.of.trials[t]
	return underWay
}

// Release ends the trial. Without an outcome the breaker permits another trial at once. Release may be called again.
func (t *Trial) Release() {
	if t == nil {
		return
	}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.of.release(t)
}

// NewActionBreakers returns closed breakers for the actions of handlers. Slots is how many handlers run at the same
// time.
func NewActionBreakers(cfg *Rules, routes Routes, slots int) *ActionBreakers {
	all := &ActionBreakers{trialTimeout: 2 * cfg.HandlerTimeout, of: map[string]*actionBreaker{}}
	for _, route := range routes.ByName {
		for h := range route.Handlers() {
			all.of[h.Action] = &actionBreaker{
				action: h.Action, rules: &cfg.Breaker, slots: max(1, slots/trialShare), trials: map[*Trial]struct{}{},
				changed: func(c breakerChange) { reportActionBreaker(cfg, c) },
			}
		}
	}
	return all
}

// reportActionBreaker logs a change of a breaker, and calls the hook Breaker.
func reportActionBreaker(cfg *Rules, c breakerChange) {
	switch c.to {
	case breaker.Open:
		cfg.Log.Warn("outbox: the events of an action fail one after the other; its events wait, and some are tried now and then",
			"action", c.action, "failed", c.failures, "failing_for", time.Since(c.since).Round(time.Millisecond),
			"open_for", c.openFor.Round(time.Millisecond))
	case breaker.Closed:
		cfg.Log.Info("outbox: an action works again", "action", c.action)
	case breaker.HalfOpen:
	}
	if cfg.Hooks.Breaker != nil {
		cfg.Hooks.Breaker(c.action, c.from, c.to)
	}
}

// get returns the breaker of an action, or nil if it has none.
func (a *ActionBreakers) get(action string) *actionBreaker {
	if a == nil {
		return nil
	}
	return a.of[action]
}

// IsClosed reports whether the breaker of an action is closed, so that its events are handled.
func (a *ActionBreakers) IsClosed(action string) bool {
	b := a.get(action)
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.unlock()
	return b.now() == breaker.Closed
}

// NotClosedFor returns how long the breaker of an action has not been closed, or 0 if it is closed.
func (a *ActionBreakers) NotClosedFor(action string) time.Duration {
	b := a.get(action)
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.unlock()
	if b.now() == breaker.Closed {
		return 0
	}
	return time.Since(b.opened)
}

// AwaitTrials notes that the first event of a partition waits for trials of actions, until the returned function is
// called. Meanwhile parked events get no trials.
func (a *ActionBreakers) AwaitTrials(actions []string) (end func()) {
	add := func(n int) {
		for _, action := range actions {
			if b := a.get(action); b != nil {
				b.mu.Lock()
				b.heads += n
				b.mu.Unlock()
			}
		}
	}
	add(1)
	return func() { add(-1) }
}

// TryOne reports whether one event of an action may be tried. If the breaker is not closed, it returns a trial, which
// the caller has to release.
func (a *ActionBreakers) TryOne(action string) (trial *Trial, ok bool) { return a.try(action, false) }

// TryParked is TryOne for an event that has a row.
func (a *ActionBreakers) TryParked(action string) (trial *Trial, ok bool) { return a.try(action, true) }

func (a *ActionBreakers) try(action string, parked bool) (trial *Trial, ok bool) {
	b := a.get(action)
	if b == nil {
		return nil, true
	}
	b.mu.Lock()
	defer b.unlock()
	return b.try(parked, a.trialTimeout)
}

// Succeeded notes the success of a call that began at a time. Trial is the trial in which it was made, or nil. The
// trial ends.
func (a *ActionBreakers) Succeeded(action string, trial *Trial, began time.Time) {
	defer trial.Release()
	b := a.get(action)
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.unlock()
	b.succeed(trial, began)
}

// Failed notes that a task has failed. Trial is the trial in which it was tried, or nil. The trial ends. Failed reports
// whether the trial has failed. It has no outcome if the error says nothing about what the action needs.
func (a *ActionBreakers) Failed(t *Task, trial *Trial, err error) (inTrial bool) {
	defer trial.Release()
	b := a.get(t.Action)
	if b == nil || !votes(err) {
		return false
	}
	b.mu.Lock()
	defer b.unlock()
	if b.fail(trial) {
		return true
	}
	b.note(IdentityOf(&t.Meta))
	return false
}

// votes reports whether an error may come from something that all events of the action need.
func votes(err error) bool {
	_, later := WaitOf(err)
	return !later && !IsPermanent(err)
}

// Wait returns the time until an event of an action may be tried. It is 0 if that is now, or not known.
func (a *ActionBreakers) Wait(action string) time.Duration {
	b := a.get(action)
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.unlock()
	if b.now() != breaker.Open {
		return 0
	}
	return time.Until(b.until)
}

// SucceededSince reports whether a call of an action has succeeded in this process that began after a time.
func (a *ActionBreakers) SucceededSince(action string, since time.Time) bool {
	b := a.get(action)
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.succeeded.After(since)
}

// Unsaved returns for each action when its last successful call began, unless the other processes know.
func (a *ActionBreakers) Unsaved() map[string]time.Time {
	unsaved := map[string]time.Time{}
	if a == nil {
		return unsaved
	}
	for action, b := range a.of {
		b.mu.Lock()
		if b.succeeded.After(b.saved) {
			unsaved[action] = b.succeeded
		}
		b.mu.Unlock()
	}
	return unsaved
}

// NoteSaved notes that the other processes know of successes.
func (a *ActionBreakers) NoteSaved(saved map[string]time.Time) {
	for action, at := range saved {
		b := a.of[action]
		b.mu.Lock()
		b.saved = at
		b.mu.Unlock()
	}
}

// noteKept notes that a failure of an action does not count, because no other event has succeeded.
func (a *ActionBreakers) noteKept(action string) {
	if b := a.get(action); b != nil {
		b.mu.Lock()
		b.kept = time.Now()
		b.mu.Unlock()
	}
}

// NotClosed returns the breakers that are not closed.
func (a *ActionBreakers) NotClosed() (open []outage.Breaker) {
	if a == nil {
		return nil
	}
	for _, action := range slices.Sorted(maps.Keys(a.of)) {
		b := a.of[action]
		b.mu.Lock()
		if s := b.now(); s != breaker.Closed {
			open = append(open, outage.Breaker{Action: action, State: s.String(), Since: b.opened})
		}
		b.unlock()
	}
	return open
}

// Reasons describes the breakers that are not closed, and events that are kept, for Health.
func (a *ActionBreakers) Reasons() (reasons []string) {
	if a == nil {
		return nil
	}
	for _, action := range slices.Sorted(maps.Keys(a.of)) {
		b := a.of[action]
		b.mu.Lock()
		reasons = append(reasons, b.reasons()...)
		b.unlock()
	}
	return reasons
}
