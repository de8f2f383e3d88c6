package handling

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
)

// ActionBreakers are the breakers of the actions of a group in this process. Where most events of an action
// fail, because something that it needs is away, its events wait instead of being parked or using up their attempts.
//
// A closed breaker learns of first attempts only, so that an event which is tried again and again counts once. Nil
// lets everything through.
type ActionBreakers struct {
	patience time.Duration // for a trial: an attempt that was given up may report nothing
	of       map[string]*actionBreaker
}

// actionBreaker is the breaker of an action, and the trial that it has permitted.
type actionBreaker struct {
	*breaker.Breaker
	mu    sync.Mutex
	trial *breaker.Permit // nil if none is under way
	began time.Time
}

// NewActionBreakers returns closed breakers for the actions of handlers.
func NewActionBreakers(cfg *Rules, routes Routes) *ActionBreakers {
	all := &ActionBreakers{patience: 2 * cfg.HandlerTimeout, of: map[string]*actionBreaker{}}
	for _, route := range routes.ByName {
		for h := range route.Handlers() {
			all.of[h.Action] = &actionBreaker{Breaker: breaker.New(cfg.Breaker, func(from, to breaker.State, failureRate float64) {
				reportActionBreaker(cfg, h.Action, from, to, failureRate)
			})}
		}
	}
	return all
}

func reportActionBreaker(cfg *Rules, action string, from, to breaker.State, failureRate float64) {
	switch to {
	case breaker.Open:
		cfg.Log.Warn("outbox: most events of an action fail; its events wait, and one is tried now and then", "action", action, "failure_rate", failureRate, "open_for", cfg.Breaker.OpenFor)
	case breaker.Closed:
		cfg.Log.Info("outbox: an action works again", "action", action)
	case breaker.HalfOpen:
	}
	if cfg.Hooks.Breaker != nil {
		cfg.Hooks.Breaker(action, from, to)
	}
}

// get returns the breaker of an action, or nil.
func (a *ActionBreakers) get(action string) *actionBreaker {
	if a == nil {
		return nil
	}
	return a.of[action]
}

// IsClosed reports whether events of an action are handled as usual.
func (a *ActionBreakers) IsClosed(action string) bool {
	b := a.get(action)
	return b == nil || b.Steady.Load() || b.State() == breaker.Closed
}

// MayTry reports whether an event of an action may be tried that was begun before its breaker opened, or with
// a trial.
func (a *ActionBreakers) MayTry(action string) bool {
	if a.IsClosed(action) {
		return true
	}
	b := a.of[action]
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.trial != nil
}

// TryOne asks for the permission to try an event of an action whose breaker is not closed.
func (a *ActionBreakers) TryOne(action string) bool {
	b := a.get(action)
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.trial != nil && time.Since(b.began) > a.patience {
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

// Note notes the outcome of an attempt, from 1, on an event of an action. A permanent error says something about the event,
// and nothing about what the action needs.
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

// Forget gives back a trial of an action that has said nothing: its event was a repeat, for example.
func (a *ActionBreakers) Forget(action string) {
	if b := a.get(action); b != nil {
		if trial := b.takeTrial(); trial != nil {
			trial.Release()
		}
	}
}

// takeTrial returns the trial that is under way, or nil. From then on there is none.
func (b *actionBreaker) takeTrial() *breaker.Permit {
	b.mu.Lock()
	defer b.mu.Unlock()
	trial := b.trial
	b.trial = nil
	return trial
}

// Wait returns how long it takes until an event of an action may be tried, 0 if that is now or not known.
func (a *ActionBreakers) Wait(action string) time.Duration {
	if b := a.get(action); b != nil {
		return b.Wait()
	}
	return 0
}

// Reasons says which breakers are not closed, for Health.
func (a *ActionBreakers) Reasons() (reasons []string) {
	if a == nil {
		return nil
	}
	for _, action := range slices.Sorted(maps.Keys(a.of)) {
		if s := a.of[action].State(); s != breaker.Closed {
			reasons = append(reasons, fmt.Sprintf("the breaker of action %s is %v: most of its events fail, and others wait", action, s))
		}
	}
	return reasons
}
