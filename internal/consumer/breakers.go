package consumer

import (
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// awaitBreakers returns those of the first items that may be tried now, when there are some: all up to one with an action most of whose
// events fail, or this one alone, with the actions that are tried. It returns none if the worker is to end.
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

// awaitBreaker waits until a task may be tried by itself, and reports whether that was before the worker is to end. What
// came with it in a batch may have opened the breaker.
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

// pauseForBreakers waits a while for the breakers of actions.
func (w *partitionWorker) pauseForBreakers(actions []string) {
	const often = time.Second
	longest := 50 * time.Millisecond // for a trial that is under way elsewhere
	for _, action := range actions {
		longest = max(longest, w.breakers.Wait(action))
	}
	w.pause(min(longest, often))
}

// failingActions returns the actions on an item that are not handled as usual.
func (w *partitionWorker) failingActions(it *recordItem) (actions []string) {
	for _, t := range it.Tasks {
		if !it.isBlocked(t) && !w.breakers.IsClosed(t.Action) && !slices.Contains(actions, t.Action) {
			actions = append(actions, t.Action)
		}
	}
	return actions
}

// tryOne asks for the permission to try all of these actions on an item.
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

// forgetTrials gives back the trials that have said nothing.
func (w *partitionWorker) forgetTrials(actions []string) {
	for _, action := range actions {
		w.breakers.Forget(action)
	}
	w.trials = nil
}
