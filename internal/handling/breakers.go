package handling

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
)

// ActionBreakers are the breakers of the actions of a group in this process. If most events of an action fail, because
// a service that it needs is down, its events wait. They are not parked and use up no attempts.
//
// A closed breaker counts first attempts only, so that an event with many retries counts once. A nil ActionBreakers
// permits everything.
type ActionBreakers struct {
	trialTimeout time.Duration // after which a trial without an outcome is released: its handler does not return
	of           map[string]*actionBreaker
}

// actionBreaker is the breaker of an action, and the trial that it has permitted.
type actionBreaker struct {
	*breaker.Breaker
	action string
	mu     sync.Mutex
	trial  *Trial // the trial under way, or nil
}

// Trial is the permission to try one event of an action whose breaker is not closed. It belongs to the caller that
// tries the event. The caller releases it in a deferred call, so that the next event gets its trial however this one
// ends. A nil Trial permits nothing. Any goroutine may call its methods.
type Trial struct {
	of     *actionBreaker
	permit *breaker.Permit
	began  time.Time
}

// Permits reports whether the trial is under way, and for an action.
func (t *Trial) Permits(action string) bool {
	if t == nil || t.of.action != action {
		return false
	}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	return t.of.trial == t
}

// Release ends the trial. Without an outcome the breaker permits another trial at once. Release may be called again.
func (t *Trial) Release() {
	if t == nil {
		return
	}
	t.of.mu.Lock()
	if t.of.trial == t {
		t.of.trial = nil
	}
	t.of.mu.Unlock()
	t.permit.Release()
}

// NewActionBreakers returns closed breakers for the actions of handlers.
func NewActionBreakers(cfg *Rules, routes Routes) *ActionBreakers {
	all := &ActionBreakers{trialTimeout: 2 * cfg.HandlerTimeout, of: map[string]*actionBreaker{}}
	for _, route := range routes.ByName {
		for h := range route.Handlers() {
			changed := func(from, to breaker.State, failureRate float64) {
				reportActionBreaker(cfg, h.Action, from, to, failureRate)
			}
			all.of[h.Action] = &actionBreaker{Breaker: breaker.New(cfg.Breaker, changed), action: h.Action}
		}
	}
	return all
}

// reportActionBreaker logs a change of a breaker, and calls the hook Breaker.
func reportActionBreaker(cfg *Rules, action string, from, to breaker.State, failureRate float64) {
	switch to {
	case breaker.Open:
		cfg.Log.Warn("outbox: most events of an action fail; its events wait, and one is tried now and then",
			"action", action, "failure_rate", failureRate, "open_for", cfg.Breaker.OpenFor)
	case breaker.Closed:
		cfg.Log.Info("outbox: an action works again", "action", action)
	case breaker.HalfOpen:
	}
	if cfg.Hooks.Breaker != nil {
		cfg.Hooks.Breaker(action, from, to)
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
	return b == nil || b.Steady.Load() || b.State() == breaker.Closed
}

// TryOne reports whether one event of an action may be tried. If the breaker is not closed, it returns a trial, which
// the caller has to release.
func (a *ActionBreakers) TryOne(action string) (trial *Trial, ok bool) {
	b := a.get(action)
	if b == nil {
		return nil, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trial != nil && time.Since(b.trial.began) > a.trialTimeout {
		b.trial.permit.Release()
		b.trial = nil
	}
	if b.trial != nil {
		return nil, false
	}
	p := b.Allow(1)
	if p.Granted == 0 {
		return nil, false
	}
	if !p.Trial { // it has closed meanwhile
		p.Release()
		return nil, true
	}
	b.trial = &Trial{of: b, permit: p, began: time.Now()}
	return b.trial, true
}

// Note passes the outcome of an attempt, numbered from 1, to the breaker of an action. Trial is the trial in which the
// attempt was made, or nil. It ends with the attempt. If the breaker is not closed, only the outcome of a trial counts.
// Errors of [Permanent] and [RetryAfter] do not count: they come from the event, and not from a service that the action
// needs.
func (a *ActionBreakers) Note(action string, attempt int, trial *Trial, err error) {
	defer trial.Release()
	b := a.get(action)
	if b == nil || !counts(err) {
		return
	}
	outcome := breaker.Succeeded
	if err != nil {
		outcome = breaker.Failed
	}
	switch {
	case outcome == breaker.Succeeded && b.Steady.Load():
	case trial != nil && trial.of == b:
		trial.permit.Report(outcome)
	case attempt <= 1 && b.State() == breaker.Closed:
		p := b.Allow(1)
		p.Report(outcome)
		p.Release()
	}
}

// counts reports whether an outcome says something about what the action needs.
func counts(err error) bool {
	_, later := WaitOf(err)
	return !later && !IsPermanent(err)
}

// Wait returns the time until an event of an action may be tried. It is 0 if that is now, or not known.
func (a *ActionBreakers) Wait(action string) time.Duration {
	if b := a.get(action); b != nil {
		return b.Wait()
	}
	return 0
}

// Reasons describes the breakers that are not closed, for Health.
func (a *ActionBreakers) Reasons() (reasons []string) {
	if a == nil {
		return nil
	}
	for _, action := range slices.Sorted(maps.Keys(a.of)) {
		if s := a.of[action].State(); s != breaker.Closed {
			reason := fmt.Sprintf("the breaker of action %s is %v: most of its events fail, and others wait", action, s)
			reasons = append(reasons, reason)
		}
	}
	return reasons
}
