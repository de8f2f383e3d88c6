package consumer

import (
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// awaitBreakers waits until the first item may be tried. It returns the leading items whose
// breakers are closed. If a breaker of the first item is not closed, it returns that item alone, once
// its breakers permit a trial, with the actions on trial. It returns no items if the worker is
// stopped.
func (w *partitionWorker) awaitBreakers(items []recordItem) (some []recordItem, trials []string) {
	for w.stopping.Err() == nil {
		n := 0
		for n < len(items) && len(w.failingActions(&items[n])) == 0 {
			n++
		}
		if n > 0 {
			return items[:n], nil
		}
		actions := w.failingActions(&items[0])
		if w.tryOne(actions) {
			return items[:1], actions
		}
		w.pauseForBreakers(actions)
	}
	return nil, nil
}

// awaitBreaker waits until the breaker of a task permits a try. It returns false if the worker is
// stopped first. Other tasks of the batch may have opened the breaker since awaitBreakers.
func (w *partitionWorker) awaitBreaker(t handling.Task) bool {
	if n := slices.Index(w.trials, t.Action); n >= 0 {
		w.trials = slices.Delete(w.trials, n, n+1) // for the first attempt
		return true
	}
	for w.stopping.Err() == nil {
		if w.breakers.IsClosed(t.Action) || w.breakers.TryOne(t.Action) {
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

// tryOne asks the breakers of all actions for a trial. It takes all trials or none.
func (w *partitionWorker) tryOne(actions []string) bool {
	for i, action := range actions {
		if !w.breakers.TryOne(action) {
			for _, permitted := range actions[:i] {
				w.breakers.Forget(permitted)
			}
			return false
		}
	}
	return true
}

// forgetTrials returns the trials that were not used to the breakers.
func (w *partitionWorker) forgetTrials(actions []string) {
	for _, action := range actions {
		w.breakers.Forget(action)
	}
	w.trials = nil
}
