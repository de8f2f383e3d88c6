package delivery

import "github.com/outboxgo/outbox/internal/handling"

// failHung counts the attempts on items whose call was given up and has returned since. A handler that returns each
// time before its lease ends would otherwise hang for ever, because a release takes the attempt back. As after a
// takeover, each delivery is tried alone next: any event of the call may have caused the hang.
// A hang is one failure, so only the first of its events counts in the breaker of the action.
func (l *lane) failHung(items []laneItem) {
	if l.ctx.Err() == nil {
		return
	}
	attempts := *l.attempts
	for i := range items {
		it := &items[i]
		action, hung := l.claimed.hungIn(&it.Delivery)
		if !hung || it.ended || !l.beginSuspect(it) { // lost: the takeover has counted the attempt
			continue
		}
		it.begun = true
		t := it.taskOf(action)
		o := attempts.Hung(&t, t.Retry.Over(l.cfg.Of(it.Stream)))
		attempts.Breakers = nil
		o.Class = codeStale
		l.recordOutcome(it, t, o)
	}
}

// taskOf returns the task of an item for an action. The task has no event if the item was not decoded.
func (it *laneItem) taskOf(action string) handling.Task {
	task := handling.Task{Handler: &handling.Handler{Action: action}, Arrival: handling.Arrival{Meta: it.Meta}}
	for _, t := range it.Tasks {
		if t.Action == action {
			task = t
		}
	}
	task.FirstFailed, task.WitnessAfter = it.FirstFailed, it.WitnessAfter
	return task
}
