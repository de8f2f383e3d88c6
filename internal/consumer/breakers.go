package consumer

import (
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// awaitBreakers waits until the first item may be tried. It returns the leading items whose
// breakers are closed. If a breaker of the first item is not closed, it returns that item alone, once
// its breakers permit a trial. It returns no items if the worker is stopped.
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
		if w.takeTrials(actions) {
			return items[:1]
		}
		w.pauseForBreakers(actions)
	}
	return nil
}

// awaitBreaker waits until the breaker of a task permits a try. It returns false if the worker is
// stopped first. Other tasks of the batch may have opened the breaker since awaitBreakers.
func (w *partitionWorker) awaitBreaker(t handling.Task) bool {
	for w.stopping.Err() == nil {
		if w.breakers.IsClosed(t.Action) || w.trialOf(t.Action) != nil || w.takeTrials([]string{t.Action}) {
			return true
		}
		w.pauseForBreakers([]string{t.Action})
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

// noteCommitted notes for their breakers that the shared transaction of an item's tasks is committed.
func (w *partitionWorker) noteCommitted(it *recordItem) {
	for _, t := range it.Tasks {
		if t.Kind != handling.NoTx && !it.isBlocked(t) && !slices.Contains(it.noted, t.Handler) {
			w.breakers.Note(t.Action, 1, w.trialOf(t.Action), nil)
		}
	}
}

// noteSucceeded notes for its breaker that a task has succeeded in a shared transaction that is rolled
// back for another task. It is repeated, but counts once.
func (w *partitionWorker) noteSucceeded(it *recordItem, t handling.Task) {
	if !slices.Contains(it.noted, t.Handler) {
		it.noted = append(it.noted, t.Handler)
		w.breakers.Note(t.Action, 1, w.trialOf(t.Action), nil)
	}
}
