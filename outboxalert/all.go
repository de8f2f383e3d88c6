package outboxalert

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/outboxgo/outbox"
)

// Only passes on alerts of some kinds, and leaves out all others.
func Only(to outbox.Alerter, kinds ...outbox.AlertKind) outbox.Alerter { return only{to, kinds} }

type only struct {
	to    outbox.Alerter
	kinds []outbox.AlertKind
}

// Alert implements [outbox.Alerter].
func (o only) Alert(ctx context.Context, a outbox.Alert) error {
	if !slices.Contains(o.kinds, a.Kind) {
		return nil
	}
	return o.to.Alert(ctx, a)
}

// Resolve passes on an end of what another process may have begun, see [outbox.Alerter].
func (o only) Resolve(ctx context.Context, a outbox.Alert) error {
	if to, ok := o.to.(resolver); ok && slices.Contains(o.kinds, a.Kind) {
		return to.Resolve(ctx, a)
	}
	return nil
}

// resolver is an alerter that gets ends of what other processes may have begun.
type resolver interface {
	Resolve(ctx context.Context, a outbox.Alert) error
}

// All passes each alert on to several alerters at the same time, so that one that is slow keeps none of the others
// waiting. While one fails the alert comes again; those that have it already do not get it
// twice, unless there is more in it.
func All(to ...outbox.Alerter) outbox.Alerter {
	return &all{to: to, missed: map[alertName]missed{}}
}

type all struct {
	to []outbox.Alerter

	mu     sync.Mutex
	missed map[alertName]missed
}

// missed is an alert that not all have got.
type missed struct {
	alert outbox.Alert
	got   []bool // by alerter
}

type alertName struct {
	kind                outbox.AlertKind
	relay, group, topic string
}

// Alert implements [outbox.Alerter].
func (all *all) Alert(ctx context.Context, a outbox.Alert) error {
	all.mu.Lock()
	defer all.mu.Unlock()
	name := alertName{a.Kind, a.Relay, a.Group, a.Topic}
	got := make([]bool, len(all.to))
	if before, ok := all.missed[name]; ok && isSame(before.alert, a) {
		got = before.got
	}
	errs := make([]error, len(all.to))
	var calls sync.WaitGroup
	for i, to := range all.to {
		if !got[i] {
			calls.Go(func() { errs[i] = to.Alert(ctx, a) })
		}
	}
	calls.Wait()
	err := errors.Join(errs...)
	if err == nil {
		delete(all.missed, name)
		return nil
	}
	for i := range got {
		got[i] = got[i] || errs[i] == nil
	}
	all.missed[name] = missed{a, got}
	return err
}

// Resolve passes on an end of what another process may have begun, see [outbox.Alerter]. While one alerter fails, it
// comes again for all.
func (all *all) Resolve(ctx context.Context, a outbox.Alert) error {
	all.mu.Lock()
	defer all.mu.Unlock()
	errs := make([]error, len(all.to))
	var calls sync.WaitGroup
	for i, to := range all.to {
		if to, ok := to.(resolver); ok {
			calls.Go(func() { errs[i] = to.Resolve(ctx, a) })
		}
	}
	calls.Wait()
	return errors.Join(errs...)
}

// isSame reports whether an alert of the same name says what another one said.
func isSame(a, b outbox.Alert) bool {
	return a.Over == b.Over && a.Died == b.Died && a.Lost == b.Lost &&
		slices.EqualFunc(a.Dead, b.Dead, func(a, b outbox.DeadEvent) bool { return a.ID == b.ID })
}
