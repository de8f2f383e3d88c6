package consumer

import (
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// passAfter is how long an action whose breaker is not closed keeps the other actions of its partition waiting. Then
// its events are parked untried.
const passAfter = 5 * time.Second

// awaitBreakers waits until the first item may be tried. It returns the leading items whose
// breakers are closed. If a breaker of the first item is not closed, it returns that item alone, once
// its breakers permit a trial. After passAfter it parks the tasks of such breakers. It returns no items
// if the worker is stopped.
func (w *partitionWorker) awaitBreakers(items []recordItem) (some []recordItem) {
	for w.stopping.Err() == nil {
		n := 0
		for n < len(items) && len(w.failingActions(&items[n])) == 0 {
			n++
		}
		if n > 0 {
			return items[:n]
		}
		actions := w.failingActions(&items[0])
		if w.blockFailing(items) {
			if w.parkBlocked(items) != nil {
				return nil
			}
			continue
		}
		if w.awaitTrials(actions) {
			return items[:1]
		}
	}
	return nil
}

// awaitTrials takes the trials of actions, or waits for a while. It reports whether it has taken them.
func (w *partitionWorker) awaitTrials(actions []string) bool {
	defer w.breakers.AwaitTrials(actions)()
	if w.takeTrials(actions) {
		return true
	}
	w.pauseForBreakers(actions)
	return false
}

// blockFailing marks the tasks of actions that other actions of the partition need not wait for any more. It reports
// whether there are any.
func (w *partitionWorker) blockFailing(items []recordItem) (blocked bool) {
	for i := range items {
		for _, t := range items[i].Tasks {
			if !items[i].isBlocked(t) && w.mayPass(t) {
				items[i].block(t)
				blocked = true
			}
		}
	}
	return blocked
}

// mayPass reports whether a task is parked untried: the breaker of its action has not been closed for passAfter, and
// the partition has another action, whose breaker is closed.
func (w *partitionWorker) mayPass(t handling.Task) bool {
	return w.mayPark(t) && w.breakers.NotClosedFor(t.Action) > passAfter && slices.ContainsFunc(w.actions, w.breakers.IsClosed)
}

// awaitBreaker waits until the breaker of a task permits a try. It returns false if the worker is
// stopped first, or the task is to be parked. Other tasks of the batch may have opened the breaker since awaitBreakers.
func (w *partitionWorker) awaitBreaker(t handling.Task) bool {
	for w.stopping.Err() == nil && !w.mayPass(t) {
		if w.breakers.IsClosed(t.Action) || w.trialOf(t.Action) != nil || w.awaitTrials([]string{t.Action}) {
			return true
		}
	}
	return false
}

// pauseForBreakers waits until the breakers of actions may permit a trial, at most a second.
func (w *partitionWorker) pauseForBreakers(actions []string) {
	const often = time.Second
	longest := 50 * time.Millisecond // a trial may be under way in another worker
	for _, action := range actions {
		longest = max(longest, w.breakers.Wait(action))
	}
	w.pause(min(longest, often))
}

// failingActions returns the actions on an item whose breakers are not closed.
func (w *partitionWorker) failingActions(it *recordItem) (actions []string) {
	for _, t := range it.Tasks {
		if !it.isBlocked(t) && !w.breakers.IsClosed(t.Action) && !slices.Contains(actions, t.Action) {
			actions = append(actions, t.Action)
		}
	}
	return actions
}

// takeTrials asks the breakers of actions for a trial each. It takes all trials or none. The worker
// holds them until releaseTrials, at the latest when its batch has ended or it is cut off.
func (w *partitionWorker) takeTrials(actions []string) bool {
	var taken []*handling.Trial
	for _, action := range actions {
		trial, ok := w.breakers.TryOne(action)
		if !ok {
			for _, t := range taken {
				t.Release()
			}
			return false
		}
		taken = append(taken, trial)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trials = append(w.trials, taken...)
	return true
}

// trialOf returns the trial that the worker holds for an action, or nil.
func (w *partitionWorker) trialOf(action string) *handling.Trial {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.trials {
		if t.Permits(action) {
			return t
		}
	}
	return nil
}

// releaseTrials releases the trials that the worker holds, and returns their number. Any goroutine may
// call it.
func (w *partitionWorker) releaseTrials() (released int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.trials {
		t.Release()
	}
	released, w.trials = len(w.trials), nil
	return released
}

// noteCommitted notes for their breakers that the shared transaction of an item's tasks, which began at a
// time, is committed. Repeats do not count.
func (w *partitionWorker) noteCommitted(it *recordItem, done handling.Batch, began time.Time) {
	for _, t := range it.Tasks {
		if t.Kind != handling.NoTx && !it.isBlocked(t) && !done.Repeats.Has(&t) && done.Excluded.Of(&t) == nil && !slices.Contains(it.noted, t.Handler) {
			w.breakers.Succeeded(t.Action, w.trialOf(t.Action), began)
		}
	}
}

// noteSucceeded notes for its breaker that a task has succeeded in a shared transaction that is rolled
// back for another task. It is repeated, but counts once.
func (w *partitionWorker) noteSucceeded(it *recordItem, t handling.Task, began time.Time) {
	if !slices.Contains(it.noted, t.Handler) {
		it.noted = append(it.noted, t.Handler)
		w.breakers.Succeeded(t.Action, w.trialOf(t.Action), began)
	}
}
