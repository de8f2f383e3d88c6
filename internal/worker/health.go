package worker

import (
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// Health is the state of a worker in this process.
type Health struct {
	Group       string
	Live, Ready bool
	Deliveries  int // that this process has claimed
	Reasons     []string
}

// Health reports the state of the worker, without I/O.
func (w *Worker) Health() Health {
	h := Health{Group: w.Group(), Live: true, Ready: true}
	notReady := func(reason string, args ...any) {
		h.Ready, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	r := w.current.Load()
	switch running, since, err := w.state.Get(); {
	case err != nil:
		h.Live = false
		notReady("Run has ended: %v", err)
	case !running:
		notReady("it does not run")
	case w.state.IsStopping():
		notReady("it stops")
	default:
		for _, o := range w.outages.Current() {
			if !o.Last.Before(since) {
				notReady("%s has been failing for %v: %v", o.Name, time.Since(o.Since).Round(time.Second), o.Err)
			}
		}
		if r == nil {
			notReady("PostgreSQL has not answered yet")
			break
		}
		h.Deliveries = r.engine.Claimed.Len()
		for _, l := range r.engine.Lanes {
			h.Live = l.ReportHealth(notReady) && h.Live
		}
		if r.admission.isMoved() {
			h.Reasons = append(h.Reasons, "the group was moved to Kafka: only what was open is handled")
		}
		h.Reasons = append(append(h.Reasons, handling.PauseReasons(w.pauses, "worker")...), w.breakers.Reasons()...)
		h.Reasons = append(h.Reasons, w.notes.ReportWaits(w.delivery.SlowHandler, notReady)...)
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
