package worker

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/wait"
)

// Health is the state of a worker in this process.
type Health struct {
	Group       string
	Live, Ready bool
	Deliveries  int
	Reasons     []string
}

// Health reports the state of the worker, without I/O.
func (w *Worker) Health() Health {
	h := Health{Group: w.Group(), Live: true, Ready: true}
	notReady := func(reason string, args ...any) {
		h.Ready, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	run := w.current.Load()
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
		if run == nil {
			notReady("PostgreSQL has not answered yet")
			break
		}
		h.Deliveries = run.Claimed.Len()
		for _, l := range run.Lanes {
			h.Live = l.ReportHealth(notReady) && h.Live
		}
		if run.intake.isMoved() {
			h.Reasons = append(h.Reasons, "the group was moved to Kafka: only what was open is handled")
		}
		h.Reasons = append(append(h.Reasons, handling.PauseReasons(w.pauses, "worker")...), w.breakers.Reasons()...)
	}
	return h
}

// Pause has this process handle nothing of some topics, or nothing at all.
func (w *Worker) Pause(topics []string) error {
	if err := w.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: pause: %w", err)
	}
	w.pauses.Pause(handling.PausedTopics(topics)...)
	return nil
}

// Resume ends the pause that pause has begun with the same topics.
func (w *Worker) Resume(topics []string) error {
	if err := w.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: resume: %w", err)
	}
	w.pauses.Resume(handling.PausedTopics(topics)...)
	if run := w.current.Load(); run != nil {
		run.Dispatcher.SignalDue()
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

// watchPauses reads what operators have paused, until ctx is cancelled. While PostgreSQL does not
// answer, what it said last counts.
func (r *workerRun) watchPauses(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Sleep(ctx, handling.PausesInterval)
		began := time.Now()
		err := r.readPauses(ctx)
		if err != nil {
			err = fmt.Errorf("what was read before still counts: %w", err)
		}
		if ctx.Err() == nil {
			r.outages.Report(handling.OutagePauses, began, err)
		}
	}
}

func (r *workerRun) readPauses(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, handling.PausesTimeout)
	defer cancel()
	now, err := r.operators.Read(ctx)
	if err != nil {
		return err
	}
	before := r.pauses.SetStored(now)
	handling.LogPauses(r.processor.Log, "worker", before, now)
	if len(now) < len(before) {
		r.Dispatcher.SignalDue()
	}
	return nil
}
