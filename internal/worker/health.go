package worker

import (
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Health is the state of a worker in this process.
type Health struct {
	Group                        string
	Live, Ready, Works, Answered bool
	Deliveries                   int // that this process has claimed
	Waiting                      []tables.EventCount
	Outages                      []outage.Outage
	Reasons                      []string
}

// Health reports the state of the worker, without I/O.
func (w *Worker) Health() Health {
	h := w.ownHealth()
	if r := w.current.Load(); r != nil {
		counts, reasons := r.engine.Waiting()
		h.Waiting, h.Reasons = counts, append(h.Reasons, reasons...)
	}
	return h
}

// report returns what this process says of itself in event_member.
func (w *Worker) report() delivery.Report {
	h := w.ownHealth()
	return delivery.Report{
		State:   outage.State{Works: h.Live && h.Works, Reasons: h.Reasons, Breakers: w.breakers.NotClosed(), Outages: h.Outages},
		Skipped: w.processor.Skipped(delivery.MaxSkippedTypes),
	}
}

// ownHealth is Health without what the group has to handle.
func (w *Worker) ownHealth() Health {
	r := w.current.Load()
	h := Health{Group: w.Group(), Live: true}
	notWorks := func(reason string, args ...any) {
		h.Works, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	switch running, since, err := w.state.Get(); {
	case err != nil:
		h.Live = false
		notWorks("Run has ended: %v", err)
	case !running:
		notWorks("it does not run")
	case w.state.IsStopping():
		notWorks("it stops")
	default:
		h.Ready, h.Works, h.Answered = r != nil, true, r != nil
		current := w.outages.Current()
		if moves := w.moves.Load(); moves != nil {
			if failure := moves.Current(); failure != nil {
				current = append(current, outage.Named{Name: moves.What(), Failure: *failure})
			}
		}
		for _, o := range current {
			if !o.Last.Before(since) {
				h.Outages = append(h.Outages, o.Outage(pg.ClassOf(o.Err)))
				notWorks("%s has been failing for %v: %v", o.Name, time.Since(o.Since).Round(time.Second), o.Err)
			}
		}
		if r == nil {
			notWorks("PostgreSQL has not answered yet")
			break
		}
		h.Deliveries = r.engine.Claimed.Len()
		for _, l := range r.engine.Lanes {
			h.Live = l.ReportHealth(notWorks) && h.Live
		}
		if none := r.admission.noEvents.Load(); none != nil {
			h.Reasons = append(h.Reasons, none.reason())
		}
		h.Reasons = append(append(h.Reasons, handling.PauseReasons(w.pauses, "worker")...), w.breakers.Reasons()...)
		h.Reasons = append(h.Reasons, w.notes.ReportWaits(w.delivery.SlowHandler, notWorks)...)
		if h.Ready = h.Live && r.admission.stored.Load(); h.Live && !h.Ready {
			h.Reasons = append(h.Reasons, "its handlers are not stored yet, so other processes of the group make no deliveries for new ones")
		}
	}
	return h
}

// Pause stops this process from handling events of some topics, or of all topics if none is named.
func (w *Worker) Pause(topics []string) error {
	if err := w.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: pause: %w", err)
	}
	w.pauses.Pause(handling.PausedTopics(topics)...)
	return nil
}

// Resume ends a pause that Pause has begun with the same topics.
func (w *Worker) Resume(topics []string) error {
	if err := w.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: resume: %w", err)
	}
	w.pauses.Resume(handling.PausedTopics(topics)...)
	if r := w.current.Load(); r != nil {
		r.engine.Dispatcher.SignalDue()
	}
	return nil
}

func (w *Worker) checkPause(topics []string) error {
	for _, t := range topics {
		if !slices.Contains(w.processor.Routes.Topics, t) {
			return fmt.Errorf("the worker does not handle topic %q", t)
		}
	}
	return nil
}
