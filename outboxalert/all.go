package outboxalert

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/short"
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

// All passes each alert on to several alerters at the same time. One that is slow, hangs or panics keeps none of the
// others waiting; one that does not return gets no other alert until it does. While one fails the alert comes again;
// those that have it already do not get it twice, unless there is more in it. If it is over by then, they get its end.
func All(to ...outbox.Alerter) outbox.Alerter {
	all := &all{missed: map[alertName]*missed{}}
	for _, one := range to {
		calls := contain.NewCallback(fmt.Sprintf("Alerter %T", one), short.Logger(slog.Default()), contain.Limits{Grace: grace})
		all.to = append(all.to, receiver{one, calls})
	}
	return all
}

// grace is less than All has itself when the time of an alert is over.
const grace = 100 * time.Millisecond

type receiver struct {
	outbox.Alerter
	calls *contain.Callback
}

type all struct {
	to []receiver

	mu     sync.Mutex // not held during calls
	missed map[alertName]*missed
}

// missed is an alert that not all have got.
type missed struct {
	alert outbox.Alert
	got   []bool // by receiver. Each alert has its own, because a call for an earlier one may return late.
	open  []bool // by receiver: it has got a begin, and no end since
}

type alertName struct {
	kind                outbox.AlertKind
	relay, group, topic string
}

// Alert implements [outbox.Alerter].
func (all *all) Alert(ctx context.Context, a outbox.Alert) error {
	return all.each(ctx, a, func(m *missed, i int) func() error {
		if m.got[i] {
			return nil
		}
		m.open[i] = m.open[i] || a.Over // all have got what ends
		return all.passTo(ctx, a, m, i)
	})
}

// Resolve passes on an end of what another process may have begun, see [outbox.Alerter]. Those that have got a begin
// here get its end. While one alerter fails, it comes again for all others that have a method Resolve.
func (all *all) Resolve(ctx context.Context, a outbox.Alert) error {
	return all.each(ctx, a, func(m *missed, i int) func() error {
		if m.open[i] {
			return all.passTo(ctx, a, m, i)
		}
		if to, ok := all.to[i].Alerter.(resolver); ok {
			return func() error { return to.Resolve(ctx, a) }
		}
		return nil
	})
}

// passTo returns a function that passes an alert on to a receiver and notes its success.
func (all *all) passTo(ctx context.Context, a outbox.Alert, m *missed, i int) func() error {
	got := m.got
	return func() error {
		err := all.to[i].Alert(ctx, a)
		if err == nil {
			all.mu.Lock()
			defer all.mu.Unlock()
			got[i], m.open[i] = true, !a.Over
		}
		return err
	}
}

// each calls the functions that callOf returns for the receivers, at the same time. It forgets the alert if none fails.
func (all *all) each(ctx context.Context, a outbox.Alert, callOf func(m *missed, i int) func() error) error {
	name := alertName{a.Kind, a.Relay, a.Group, a.Topic}
	all.mu.Lock()
	m := all.missed[name]
	if m == nil {
		m = &missed{open: make([]bool, len(all.to))}
		all.missed[name] = m
	}
	if m.got == nil || !isSame(m.alert, a) {
		m.alert, m.got = a, make([]bool, len(all.to))
	}
	calls := make([]func() error, len(all.to))
	for i := range all.to {
		calls[i] = callOf(m, i)
	}
	all.mu.Unlock()

	errs := make([]error, len(all.to))
	var running sync.WaitGroup
	for i, call := range calls {
		if call != nil {
			running.Go(func() { errs[i] = all.to[i].calls.Call(ctx, call) })
		}
	}
	running.Wait()
	err := errors.Join(errs...)
	if err == nil {
		all.mu.Lock()
		defer all.mu.Unlock()
		delete(all.missed, name)
	}
	return err
}

// isSame reports whether an alert of the same name says what another one said.
func isSame(a, b outbox.Alert) bool {
	return a.Over == b.Over && a.FirstAt.Equal(b.FirstAt) && a.Died == b.Died && a.Lost == b.Lost &&
		slices.EqualFunc(a.Dead, b.Dead, func(a, b outbox.DeadEvent) bool { return a.ID == b.ID })
}
