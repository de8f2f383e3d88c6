package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// finishRecord completes a record after tryBatch: it runs the tasks that are not done, one by one. failed are errors
// of tasks in the batch; each counts as its task's first attempt. behind are the later records of the batch. The only
// error is ErrStopped.
func (w *partitionWorker) finishRecord(it *recordItem, behind []recordItem, failed []*handling.TaskError) error {
	if it.Class != "" && !w.awaitResume() {
		return handling.ErrStopped
	}
	if err := w.parkBlocked([]recordItem{*it}); err != nil { // tasks that an earlier record has blocked
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
		return w.giveUp(it, handling.Task{}, handling.Outcome{Result: handling.Dead, Action: it.replay.action, Class: it.Class, Err: it.Err})
	}
	for t := range it.InOrder() {
		if it.isBlocked(t) {
			continue
		}
		parked, err := w.runTask(it, t, handling.ErrorOf(t, failed))
		if err != nil {
			return err
		}
		it.noteParked(t) // or it is done
		if parked {
			w.blockBehind(it, t, behind)
		}
	}
	return nil
}

// runTask tries a task until it is done, parked or dead. failed is its error in a batch, which counts
// as the first attempt. The only error is ErrStopped.
func (w *partitionWorker) runTask(it *recordItem, t handling.Task, failed error) (parked bool, err error) {
	policy := t.Retry.Over(w.cfg.Retry)
	for t.Meta.Attempt = 1; ; {
		if failed == nil && !w.awaitBreaker(t) { // the error of an attempt that was made needs no permission
			if w.stopping.Err() != nil {
				return false, handling.ErrStopped
			}
			it.block(t)
			return true, w.parkBlocked([]recordItem{*it})
		}
		o := w.attempts.Try(&t, policy, failed)
		failed = nil
		switch o.Result {
		case handling.Done:
			return false, nil
		case handling.Interrupted:
			return w.parkBehind(it, t, o.Err)
		case handling.Dead:
			return w.giveUpTask(it, t, o)
		case handling.Again, handling.Postponed:
		default:
			return false, handling.ErrStopped
		}
		if w.mayPark(t) {
			return true, w.parkFailed(it, t, o)
		}
		w.attempts.ReportAgain(&t, o)
		if o.Result == handling.Again {
			t.NoteFailure(o)
		}
		w.pause(o.Wait)
	}
}

// parkBehind parks a task whose key is blocked, which err says, unless lookAgain has. Later tasks of the key are parked
// too, except for handlers with RetryInPlace: their tasks are checked one by one. The only error is ErrStopped.
func (w *partitionWorker) parkBehind(it *recordItem, t handling.Task, err error) (parked bool, _ error) {
	if !it.isBlocked(t) {
		it.block(t)
	}
	if found, is := errors.AsType[*blockedError](err); is && len(found.whole) > 0 {
		it.blockAll()
	}
	return !t.InPlace, w.parkBlocked([]recordItem{*it})
}

// giveUpTask ends the attempts of a task whose last attempt has failed. It reports whether later
// tasks of its key are to be parked. The only error is ErrStopped.
func (w *partitionWorker) giveUpTask(it *recordItem, t handling.Task, o handling.Outcome) (parked bool, err error) {
	if err := w.giveUp(it, t, o); err != nil || w.parking == nil {
		return false, err
	}
	if !t.InPlace || w.cfg.HoldDead { // with HoldDead the key waits for an operator, which may take long
		return true, nil
	}
	return false, w.awaitDead(t)
}

// partitionScheduler implements [handling.Scheduler] for tasks that are tried in offset order.
type partitionScheduler struct{ *partitionWorker }

func (w partitionScheduler) Held() context.Context { return w.held }

// Enter looks whether the key of a task is blocked when nothing else keeps the call waiting.
func (w partitionScheduler) Enter(t *handling.Task) error {
	for w.stopping.Err() == nil && w.mayCall(t.Kind != handling.NoTx) {
		if err := w.lookAgain(t); err != nil {
			w.slots.Release()
			return err
		}
		if !w.isTopicPaused() && w.hasPlace() {
			return nil
		}
		w.slots.Release() // PostgreSQL did not answer for a while
	}
	return handling.ErrStopped
}

func (w partitionScheduler) Exit(t *handling.Task, began time.Time, err error) {
	w.slots.Release()
	if err == nil && t.Kind != handling.NoTx {
		w.reportPostgresWorks(began)
	}
}

func (w partitionScheduler) Trial(action string) *handling.Trial { return w.trialOf(action) }

func (w partitionScheduler) Interrupts(err error) bool { return isBlocked(err) }
func (w partitionScheduler) Sleep(d time.Duration)     { w.pause(d) }

// AwaitPostgres has a task postponed that waits for a lock, so that it can be parked.
func (w partitionScheduler) AwaitPostgres(began time.Time, err error) (putBack bool) {
	w.awaitPostgres(began, err)
	return pg.IsWaitInVain(err)
}

// pause waits for d. It returns early when the worker is stopped.
func (w *partitionWorker) pause(d time.Duration) {
	w.givePlace()
	wait.Sleep(w.stopping, d)
}

// awaitPostgres reports an outage of PostgreSQL and waits before the next try: for the backoff of the
// outage, or for the time that the handler's error asks for, if that is longer. Neither a wait for a lock in vain nor a
// deadlock is an outage.
func (w *partitionWorker) awaitPostgres(began time.Time, err error) {
	if pg.IsWaitInVain(err) || pg.IsTransient(err) {
		w.pause(delivery.LockPause)
		return
	}
	w.outages.Report(handling.OutagePostgres, began, err)
	later, _ := handling.WaitOf(err)
	w.pause(max(later, w.outages.Backoff(handling.OutagePostgres)))
}

// reportPostgresWorks reports that a transaction that began at began has committed.
func (w *partitionWorker) reportPostgresWorks(began time.Time) {
	if w.outages.Failing() {
		w.outages.Report(handling.OutagePostgres, began, nil)
	}
}
