package handling

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
)

// Attempts tries tasks one at a time, and says what becomes of each. It is all that consumers and workers have in
// common about that: which errors count, how often and when a task is tried again, what its breaker learns, which
// hooks are called and what the log says. Where events come from, and where they wait, is up to the [Scheduler].
type Attempts struct {
	Processor *Processor
	Breakers  *ActionBreakers // nil without PostgreSQL
	Scheduler Scheduler
	Bound     time.Duration // of one attempt; 0 for none
}

// Scheduler decides when an attempt may be made, and what it must not outlive.
type Scheduler interface {
	// Held returns a context that ends when the events are no longer for this process.
	Held() context.Context
	// Enter waits until a handler may be called, and reports whether that was before the work is to end.
	Enter(t *Task) bool
	// Leave is called after each call that Enter has permitted.
	Leave(t *Task, began time.Time, err error)
	// Interrupts reports whether an error means that the task is not to be handled here.
	Interrupts(err error) bool
	// Sleep waits, unless the work is to end.
	Sleep(d time.Duration)
	// AwaitPostgres waits in an outage of PostgreSQL that began with an error. It returns true if the task is to be
	// put back meanwhile.
	AwaitPostgres(began time.Time, err error) (putBack bool)
}

// Verdict is what becomes of a task.
type Verdict int

const (
	// Done means that the task is committed.
	Done Verdict = iota
	// Stopped means that the work is to end. Nothing is known about the task.
	Stopped
	// Interrupted means that the task is not to be handled here; the error says why.
	Interrupted
	// Postponed means that the task is tried again after an outage of PostgreSQL. It has used up no attempt.
	Postponed
	// Again means that the task has failed, and is tried again after Wait.
	Again
	// Dead means that the task has failed for the last time.
	Dead
)

// Outcome is what is known about a task after an attempt.
type Outcome struct {
	Verdict Verdict
	Action  string
	Err     error         // of Interrupted, Postponed, Again and Dead
	Class   string        // of Err
	Attempt int           // that was made, from 1
	Retries int           // after the first attempt, by the policy; of Again and Dead
	Wait    time.Duration // of Postponed and Again
}

// Try makes the attempt on a task that its metadata names. What does not count is tried again: a conflict of
// transactions up to ten times, and an outage of PostgreSQL until it ends. Before is the error of the attempt if it
// was made already, in a transaction with other tasks.
func (a *Attempts) Try(t *Task, policy RetryPolicy, before error) Outcome {
	for {
		err, began, late, tried := before, time.Now(), false, before == nil
		if tried {
			if !a.Scheduler.Enter(t) {
				return Outcome{Verdict: Stopped}
			}
			began = time.Now()
			late, err = a.call(t, began)
		}
		before = nil
		switch held := a.Scheduler.Held(); {
		case err == nil:
			a.Breakers.Note(t.Action, t.Meta.Attempt, nil)
			return Outcome{Verdict: Done, Action: t.Action, Attempt: t.Meta.Attempt}
		case held.Err() != nil:
			return Outcome{Verdict: Stopped}
		case a.Scheduler.Interrupts(err):
			return Outcome{Verdict: Interrupted, Action: t.Action, Err: err}
		case isPostponed(err):
			return a.postponed(t, policy, err)
		case IsConflict(err) && t.conflicts < MostConflicts:
			t.conflicts++
			a.awaitConflict(t, t.conflicts, err)
		case tried && a.Processor.IsOutage(held, err, t.Kind, late):
			if a.Scheduler.AwaitPostgres(began, err) {
				return a.postponed(t, policy, err)
			}
		default:
			return a.failed(t, policy, err)
		}
	}
}

// call calls the handler of a task once. Late reports whether it has used up its time.
func (a *Attempts) call(t *Task, began time.Time) (late bool, err error) {
	ctx, cancel := a.Scheduler.Held(), context.CancelFunc(func() {})
	if a.Bound > 0 {
		ctx, cancel = context.WithTimeout(ctx, a.Bound)
	}
	defer cancel()
	err = a.Processor.ProcessOne(ctx, *t)
	a.Scheduler.Leave(t, began, err)
	return IsLate(ctx, err), err
}

// awaitConflict waits before a task is repeated that PostgreSQL has rolled back. One conflict is
// nothing unusual, several of the same event are.
func (a *Attempts) awaitConflict(t *Task, n int, err error) {
	const unusual = 5
	level := slog.LevelDebug
	if n == unusual {
		level = slog.LevelWarn
	}
	ctx := EventContext(a.Scheduler.Held(), &t.Meta)
	a.Processor.Log.Log(ctx, level, "outbox: transaction conflicts with others, and is repeated",
		EventAttrs(&t.Meta, "action", t.Action, "attempt", t.Meta.Attempt, "conflicts", n, "error", err)...)
	if hook := a.Processor.Rules.Hooks.Conflicted; hook != nil {
		a.callHost("hook Conflicted", t.Action, &t.Meta, func() { hook(&t.Meta, t.Action, err) })
	}
	a.Scheduler.Sleep(ConflictWait(n))
}

// failed decides about a task that has failed.
func (a *Attempts) failed(t *Task, policy RetryPolicy, err error) Outcome {
	if hook := a.Processor.Rules.Hooks.Failed; hook != nil {
		a.callHost("hook Failed", t.Action, &t.Meta, func() { hook(&t.Meta, t.Action, err) })
	}
	a.Breakers.Note(t.Action, t.Meta.Attempt, err)
	retries := a.Processor.Retries(policy, err, func(call func()) { a.callHost("RetriesFor", t.Action, &t.Meta, call) })
	o := Outcome{Verdict: Again, Action: t.Action, Err: err, Class: ErrorClass(err), Attempt: t.Meta.Attempt, Retries: retries}
	if IsPermanent(err) || o.Attempt > retries {
		o.Verdict = Dead
		return o
	}
	o.Wait = policy.Next(o.Attempt, err)
	return o
}

func (a *Attempts) postponed(t *Task, policy RetryPolicy, err error) Outcome {
	return Outcome{Verdict: Postponed, Action: t.Action, Err: err, Class: ErrorClass(err), Attempt: t.Meta.Attempt, Wait: policy.Next(t.Meta.Attempt, err)}
}

// ReportAgain says that a task has failed, or was postponed, and is tried again.
func (a *Attempts) ReportAgain(t *Task, o Outcome) {
	ctx := EventContext(a.Scheduler.Held(), &t.Meta)
	attrs := EventAttrs(&t.Meta, "action", t.Action, "attempt", o.Attempt, "wait", o.Wait, "error_code", o.Class, "error", o.Err)
	if o.Verdict == Postponed {
		a.Processor.Log.InfoContext(ctx, "outbox: handler failed in an outage of PostgreSQL, which is no attempt; trying again", attrs...)
		return
	}
	a.Processor.Log.WarnContext(ctx, "outbox: handler failed, trying again", attrs...)
	if hook := a.Processor.Rules.Hooks.Retried; hook != nil {
		a.callHost("hook Retried", t.Action, &t.Meta, func() { hook(&t.Meta, t.Action, o.Err) })
	}
}

// ReportDead says that an event is dead for an action, or for all actions if the outcome names none. Topic is where
// its dead letter was sent, if it was.
func (a *Attempts) ReportDead(about envelope.Received, topic string, o Outcome) {
	m := &about
	m.Attempt = o.Attempt
	attrs := EventAttrs(m, "action", o.Action, "attempt", o.Attempt, "error_code", o.Class, "error", o.Err)
	if topic != "" {
		attrs = append(attrs, "dead_letter_topic", topic)
	}
	a.Processor.Log.ErrorContext(EventContext(a.Scheduler.Held(), m), "outbox: event is dead, an operator has to decide", attrs...)
	if hook := a.Processor.Rules.Hooks.DeadLettered; hook != nil {
		a.callHost("hook DeadLettered", o.Action, m, func() { hook(m, o.Action, topic, o.Err) })
	}
}

// ReportUnknown calls the hook for an event of a type without a handler.
func (a *Attempts) ReportUnknown(m *envelope.Received, action string) {
	if hook := a.Processor.Rules.Hooks.Unknown; hook != nil {
		a.callHost("hook Unknown", action, m, func() { hook(m) })
	}
}

func (a *Attempts) callHost(function, action string, m *envelope.Received, call func()) {
	a.Processor.CallHost(a.Scheduler.Held(), function, action, m, call)
}

// postponedError is the error of a handler in an outage of PostgreSQL, which is no attempt, that says when the event is
// to be tried again.
type postponedError struct{ error }

func (e *postponedError) Unwrap() error { return e.error }

func isPostponed(err error) bool {
	_, is := errors.AsType[*postponedError](err)
	return is
}

// PostponedError returns the error of a transaction of several tasks, for [Attempts.Try], if it is that of one of
// them, and says when its event is to be tried again after the outage of PostgreSQL.
func PostponedError(err error) *TaskError {
	failed, _ := errors.AsType[*TaskError](err)
	if failed == nil || !failed.Certain {
		return nil
	}
	later := *failed
	later.Err = &postponedError{failed.Err}
	return &later
}
