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
	trialTimeout time.Duration // after which a trial without an outcome is released: its attempt was abandoned
	of           map[string]*actionBreaker
}

// actionBreaker is the breaker of an action, and the trial that it has permitted.
type actionBreaker struct {
	*breaker.Breaker
	mu    sync.Mutex
	trial *breaker.Permit // the trial under way, or nil
	began time.Time       // of the trial
}

// NewActionBreakers returns closed breakers for the actions of handlers.
func NewActionBreakers(cfg *Rules, routes Routes) *ActionBreakers {
	all := &ActionBreakers{trialTimeout: 2 * cfg.HandlerTimeout, of: map[string]*actionBreaker{}}
	for _, route := range routes.ByName {
		for h := range route.Handlers() {
			changed := func(from, to breaker.State, failureRate float64) {
				reportActionBreaker(cfg, h.Action, from, to, failureRate)
			}
			all.of[h.Action] = &actionBreaker{Breaker: breaker.New(cfg.Breaker, changed)}
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

// MayTry reports whether the next attempt on an event may be made: the breaker of its action is closed, or the event
// has its trial.
func (a *ActionBreakers) MayTry(action string) bool {
	if a.IsClosed(action) {
		return true
	}
	b := a.of[action]
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.trial != nil
}

// TryOne asks for a trial: permission to try one event of an action whose breaker is not closed.
func (a *ActionBreakers) TryOne(action string) bool {
	b := a.get(action)
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trial != nil && time.Since(b.began) > a.trialTimeout {
		b.trial.Release()
		b.trial = nil
	}
	if b.trial != nil {
		return false
	}
	p := b.Allow(1)
	if p.Granted == 0 {
		return false
	}
	if !p.Trial { // it has closed meanwhile
		p.Release()
		return true
	}
	b.trial, b.began = p, time.Now()
	return true
}

// Note passes the outcome of an attempt, numbered from 1, to the breaker of an action. A permanent error counts as a
// success, because it comes from the event and not from a service that the action needs.
func (a *ActionBreakers) Note(action string, attempt int, err error) {
	b := a.get(action)
	if b == nil {
		return
	}
	outcome := breaker.Succeeded
	if err != nil && !IsPermanent(err) {
		outcome = breaker.Failed
	}
	if outcome == breaker.Succeeded && b.Steady.Load() {
		return
	}
	trial := b.takeTrial()
	switch {
	case trial != nil:
		trial.Report(outcome)
		trial.Release()
	case attempt <= 1 && b.State() == breaker.Closed:
		p := b.Allow(1)
		p.Report(outcome)
		p.Release()
	}
}

// Forget releases the trial of an action without an outcome, for example because its event was a repeat.
func (a *ActionBreakers) Forget(action string) {
	if b := a.get(action); b != nil {
		if trial := b.takeTrial(); trial != nil {
			trial.Release()
		}
	}
}

// takeTrial ends the trial under way and returns it, or nil.
func (b *actionBreaker) takeTrial() *breaker.Permit {
	b.mu.Lock()
	defer b.mu.Unlock()
	trial := b.trial
	b.trial = nil
	return trial
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
