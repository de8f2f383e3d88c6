package consumer

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/wait"
)

// finishRecord does what is left to do about a record: all, or what needs no transaction, if the
// others are committed. The error of a task that has failed in the batch is that of its first
// attempt. Behind are the records behind it. The error of finishRecord is ErrStopped.
func (w *partitionWorker) finishRecord(it *recordItem, behind []recordItem, committed bool, failed *handling.TaskError) error {
	if it.Class != "" && !w.awaitResume() {
		return handling.ErrStopped
	}
	if err := w.parkBlocked([]recordItem{*it}); err != nil { // those that a record before has blocked
		return err
	}
	if it.Class == handling.ClassUnknownType {
		w.attempts.ReportUnknown(&it.Meta, "")
		if it.isSkipped(w.cfg.DeadLetterUnknown) {
			w.processor.LogSkipped(&it.Meta)
			return nil
		}
	}
	if it.Class != "" {
		return w.giveUp(it, handling.Task{}, handling.Outcome{Verdict: handling.Dead, Action: it.replay.action, Class: it.Class, Err: it.Err})
	}
	for t := range it.InOrder() {
		if it.isBlocked(t) || committed && t.Kind != handling.NoTx {
			continue
		}
		parked, err := w.runTask(it, t, failed.Of(t))
		if err != nil {
			return err
		}
		if parked {
			w.blockBehind(t, behind)
		}
	}
	return nil
}

// runTask runs a task until it is done, parked, or given up. If it has failed in a batch,
// that was its first attempt. The error of runTask is errStopped.
func (w *partitionWorker) runTask(it *recordItem, t handling.Task, failed error) (parked bool, err error) {
	policy := t.Retry.Over(w.cfg.Retry)
	for attempt := 1; ; attempt++ {
		t.Meta.Attempt = attempt
		o := w.attempts.Try(&t, policy, failed)
		failed = nil
		switch o.Verdict {
		case handling.Done:
			return false, nil
		case handling.Interrupted: // what is behind it may be so, too; if its handler needs the order of the partition, each is looked at
			it.block(t)
			return !t.InPlace, w.parkBlocked([]recordItem{*it})
		case handling.Dead:
			return w.giveUpTask(it, t, o)
		case handling.Again:
		default:
			return false, handling.ErrStopped
		}
		if w.mayPark(t) {
			return true, w.parkFailed(it, t, o)
		}
		w.attempts.ReportAgain(&t, o)
		w.pause(o.Wait)
	}
}

// giveUpTask gives up a task that has failed for the last time. The error is errStopped.
func (w *partitionWorker) giveUpTask(it *recordItem, t handling.Task, o handling.Outcome) (parked bool, err error) {
	if err := w.giveUp(it, t, o); err != nil || w.parking == nil {
		return false, err
	}
	if !t.InPlace || w.cfg.HoldDead { // then its key waits for an operator, who may take long
		return true, nil
	}
	return false, w.awaitDead(t)
}

// partitionScheduler has tasks tried in the order of a partition, see [handling.Scheduler].
type partitionScheduler struct{ *partitionWorker }

func (w partitionScheduler) Held() context.Context { return w.held }

func (w partitionScheduler) Enter(t *handling.Task) bool {
	return w.stopping.Err() == nil && w.awaitBreaker(*t) && w.mayCall(t.Kind != handling.NoTx)
}

func (w partitionScheduler) Leave(t *handling.Task, began time.Time, err error) {
	w.releaseSlots()
	if err == nil && t.Kind != handling.NoTx {
		w.reportPostgresWorks(began)
	}
}

func (w partitionScheduler) Interrupts(err error) bool { return isBlocked(err) }
func (w partitionScheduler) Sleep(d time.Duration)     { w.pause(d) }

func (w partitionScheduler) AwaitPostgres(began time.Time, err error) (putBack bool) {
	w.awaitPostgres(began, err)
	return false
}

// pause waits, unless the worker is to end.
func (w *partitionWorker) pause(d time.Duration) { wait.Sleep(w.stopping, d) }

// awaitPostgres waits a little while PostgreSQL is unavailable, or for longer if the error says so.
func (w *partitionWorker) awaitPostgres(began time.Time, err error) {
	w.outages.Report(handling.OutagePostgres, began, err)
	later, _ := handling.WaitOf(err)
	w.pause(max(later, w.outages.Backoff(handling.OutagePostgres)))
}

// reportPostgresWorks ends an outage of PostgreSQL, if there is one.
func (w *partitionWorker) reportPostgresWorks(began time.Time) {
	if w.outages.Failing() {
		w.outages.Report(handling.OutagePostgres, began, nil)
	}
}
