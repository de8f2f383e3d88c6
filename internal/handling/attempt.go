package handling

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pg"
)

// Attempts tries tasks one at a time and decides about the outcome of each. It decides which errors count as attempts,
// when a task is tried again, which outcomes reach its breaker, which hooks are called, and which lines are logged.
// Consumers and workers share it. Each has a [Scheduler] of its own, which decides when attempts are made.
type Attempts struct {
	Processor *Processor
	Breakers  *ActionBreakers // nil without PostgreSQL
	Scheduler Scheduler
	Bound     time.Duration // limit of one attempt; 0 means no limit
	// Witness reports whether a call of an action has succeeded in any process that began less than ago. Nil means that
	// all failures count.
	Witness func(ctx context.Context, action string, ago time.Duration) (bool, error)
}

// Scheduler decides when an attempt may be made, and when it must end.
type Scheduler interface {
	// Held returns a context that ends when this process may no longer handle the events.
	Held() context.Context
	// Enter waits until a handler may be called. It returns ErrStopped if the work ends first, or an error that
	// interrupts.
	Enter(t *Task) error
	// Exit is called after each call that Enter has permitted.
	Exit(t *Task, began time.Time, err error)
	// Trial returns the trial in which an action is tried, or nil. The scheduler releases it.
	Trial(action string) *Trial
	// Interrupts reports whether an error means that this process must not handle the task.
	Interrupts(err error) bool
	// Sleep waits for d, or until the work ends.
	Sleep(d time.Duration)
	// AwaitPostgres waits in an outage of PostgreSQL, which an attempt that began at began has met. It returns true if
	// the task must be put back meanwhile.
	AwaitPostgres(began time.Time, err error) (putBack bool)
}

// Result is the kind of an [Outcome].
type Result int

const (
	// Done means that the task is committed.
	Done Result = iota
	// Stopped means that the work ends. The outcome of the task is unknown.
	Stopped
	// Interrupted means that this process must not handle the task. The error says why.
	Interrupted
	// Postponed means that the task is tried again after an outage of PostgreSQL, or when another session may have
	// released a lock. It has used up no attempt.
	Postponed
	// Again means that the task has failed and is tried again after Wait.
	Again
	// Dead means that the task has failed for the last time.
	Dead
)

// Outcome is the outcome of an attempt on a task.
type Outcome struct {
	Result  Result
	Action  string
	Err     error         // set for Interrupted, Postponed, Again and Dead
	Class   string        // see [ErrorClass]
	Attempt int           // number of the attempt, from 1
	Retries int           // retries that the policy permits; set for Again and Dead
	Wait    time.Duration // until the next attempt; set for Postponed and Again
	// Uncounted is set for Again if the attempt does not count, because its cause may be an outage. Kept is set as well
	// if the reason is that no other event of the action has succeeded.
	Uncounted, Kept bool
	// Repeat is set for Done if no handler was called, because the task was done before or its event has expired.
	Repeat bool
}

// Message returns the error as it is stored, and why the attempt does not count.
func (o Outcome) Message() string {
	if o.Kept {
		return "the attempt does not count, because no other event of the action has succeeded: " + o.Err.Error()
	}
	return o.Err.Error()
}

// Try makes the attempt on a task whose number is in its metadata. Failures that do not count are repeated: a conflict
// of transactions up to [MostConflicts] times, an outage of PostgreSQL until it ends. After that, a conflict in a
// statement of ours postpones the task, and one in a statement of the handler fails it. Before is the error of this
// attempt if it was made in a transaction with other tasks, or nil.
func (a *Attempts) Try(t *Task, policy RetryPolicy, before error) Outcome {
	if a.mustTryAlone(t, policy, before) {
		before = nil
	}
	if shared, _ := errors.AsType[*sharedError](before); shared != nil {
		before = shared.error
	}
	works := t.Works || a.works(t, policy)
	for {
		err, late, repeat, tried := before, false, false, before == nil
		if tried {
			if err := a.Scheduler.Enter(t); err != nil {
				return a.notEntered(t, err)
			}
		}
		began := time.Now()
		if tried {
			repeat, late, err = a.call(t, began)
		}
		before = nil
		switch held := a.Scheduler.Held(); {
		case err == nil:
			if !repeat {
				a.Breakers.Succeeded(t.Action, a.Scheduler.Trial(t.Action), began)
			}
			return Outcome{Result: Done, Action: t.Action, Attempt: t.Meta.Attempt, Repeat: repeat}
		case held.Err() != nil:
			return Outcome{Result: Stopped}
		case a.Scheduler.Interrupts(err):
			return Outcome{Result: Interrupted, Action: t.Action, Err: err}
		case isPostponed(err):
			return a.postponed(t, policy, err)
		case IsConflict(err) && t.conflicts < MostConflicts:
			t.conflicts++
			a.awaitConflict(t, t.conflicts, err)
		case isOwnConflict(err):
			return a.postponed(t, policy, err)
		case tried && a.Processor.IsOutage(held, err, t.Kind, late):
			if a.Scheduler.AwaitPostgres(began, err) {
				return a.postponed(t, policy, err)
			}
		default:
			return a.failed(t, policy, err, works)
		}
	}
}

// notEntered returns the outcome of a task whose handler may not be called.
func (a *Attempts) notEntered(t *Task, err error) Outcome {
	if a.Scheduler.Interrupts(err) {
		return Outcome{Result: Interrupted, Action: t.Action, Err: err}
	}
	return Outcome{Result: Stopped}
}

// call calls the handler of a task once, unless the task was done before. It reports whether the call has used up its
// time.
func (a *Attempts) call(t *Task, began time.Time) (repeat, late bool, err error) {
	ctx, cancel := a.Scheduler.Held(), context.CancelFunc(func() {})
	if a.Bound > 0 {
		ctx, cancel = context.WithTimeout(ctx, a.Bound)
	}
	defer cancel()
	repeat, err = a.Processor.ProcessOne(ctx, *t)
	t.Begun = t.Begun || !repeat && !isOwn(err)
	a.Scheduler.Exit(t, began, err)
	return repeat, IsLate(ctx, err), err
}

// awaitConflict waits before a task is repeated that PostgreSQL has rolled back. It warns after several conflicts of
// the same event, because a single one is normal.
func (a *Attempts) awaitConflict(t *Task, n int, err error) {
	const unusual = 5
	level := slog.LevelDebug
	if n == unusual {
		level = slog.LevelWarn
	}
	ctx := EventContext(a.Scheduler.Held(), &t.Meta)
	a.Processor.Log.Log(ctx, level, "outbox: transaction conflicts with another one and is repeated",
		EventAttrs(&t.Meta, "action", t.Action, "attempt", t.Meta.Attempt, "conflicts", n, "error", err)...)
	if hook := a.Processor.Rules.Hooks.Conflicted; hook != nil {
		a.callHost("hook Conflicted", t.Action, &t.Meta, func() { hook(&t.Meta, t.Action, err) })
	}
	a.Scheduler.Sleep(ConflictWait(n))
}

// failed decides whether a failed task is tried again, and calls the hook Failed. The first failure counts. A further
// one, and the last attempt, counts only if the action works.
func (a *Attempts) failed(t *Task, policy RetryPolicy, err error, works bool) Outcome {
	inTrial := a.Breakers.Failed(t, a.Scheduler.Trial(t.Action), err)
	retries := a.Processor.Retries(policy, err, func(call func()) { a.callHost("RetriesFor", t.Action, &t.Meta, call) })
	o := Outcome{
		Result: Again, Action: t.Action, Err: err, Class: ErrorClass(err), Attempt: t.Meta.Attempt, Retries: retries,
	}
	later, asks := WaitOf(err)
	last, first := o.Attempt > retries, t.FirstFailed.IsZero()
	switch waits := policy.waitsInOutage(t.FirstFailed); {
	case IsPermanent(err):
		o.Result = Dead
	case waits && (IsUnavailable(err) || inTrial && retries > 0):
		o.Uncounted = true
	case waits && retries > 0 && (last || !first) && !works:
		o.Uncounted, o.Kept = true, true
		a.Breakers.noteKept(t.Action)
	case last:
		o.Result = Dead
	}
	switch {
	case o.Kept && asks && !last:
		o.Wait = later
	case o.Kept: // RetryAfter sets the waits between attempts that count
		o.Wait = max(later, policy.NextInOutage(sinceFailure(t.witnessAfter())+policy.RetryWait, nil))
	case o.Uncounted:
		o.Wait = policy.NextInOutage(sinceFailure(t.FirstFailed), err)
	case o.Result == Again:
		o.Wait = policy.Next(o.Attempt, err)
	}
	if hook := a.Processor.Rules.Hooks.Failed; hook != nil {
		a.callHost("hook Failed", t.Action, &t.Meta, func() { hook(&t.Meta, t.Action, err, o.Result == Again) })
	}
	return o
}

// Hung returns the outcome of a task whose call was given up, because it did not return in time, and has returned
// since. The attempt counts.
func (a *Attempts) Hung(t *Task, policy RetryPolicy) Outcome {
	const works = true
	return a.failed(t, policy, &timeoutError{err: errHung, after: a.Processor.Rules.HandlerTimeout}, works)
}

var errHung = errors.New("the call had not returned and was given up")

// NoteFailure updates a task whose outcome is Again: the number of its next attempt, and the times of its failures. It
// is what [delivery.Store.Fail] does to a row.
func (t *Task) NoteFailure(o Outcome) {
	now := time.Now()
	if t.FirstFailed.IsZero() {
		t.FirstFailed = now
	}
	if !o.Uncounted {
		t.Meta.Attempt++
		t.WitnessAfter = now
	}
}

// Works reports whether this process knows that another event of the action has succeeded after [Task.witnessAfter].
func (a *ActionBreakers) Works(t *Task) bool {
	after := t.witnessAfter()
	return !after.IsZero() && a.SucceededSince(t.Action, after)
}

// witnessAfter returns the time after which another event of the action must succeed, or zero if the task has not
// failed yet.
func (t *Task) witnessAfter() time.Time {
	if t.WitnessAfter.IsZero() {
		return t.FirstFailed
	}
	return t.WitnessAfter
}

// mustTryAlone reports whether an error of a shared transaction is no failure of a task: the task has failed before,
// and it is not known whether another event of the action had succeeded when that transaction began. Or the failure may
// be the last one, and the handler may have missed what was not committed yet.
func (a *Attempts) mustTryAlone(t *Task, policy RetryPolicy, before error) bool {
	if shared, _ := errors.AsType[*sharedError](before); shared != nil &&
		(IsPermanent(before) || policy.RetriesFor != nil || t.Meta.Attempt > policy.MaxRetries) {
		return true
	}
	return before != nil && !t.Works && a.Witness != nil && !t.FirstFailed.IsZero() && policy.waitsInOutage(t.FirstFailed) &&
		!IsPermanent(before) && !IsUnavailable(before) && !isPostponed(before)
}

// works reports whether another event of the action has succeeded in any process after [Task.witnessAfter]. It is
// asked once, before the handler is called: the call may take beyond the end of an outage, and what succeeds meanwhile
// says nothing about the time at which the call began. If PostgreSQL does not answer, it reports false, and the failure
// does not count.
func (a *Attempts) works(t *Task, policy RetryPolicy) bool {
	after := t.witnessAfter()
	switch {
	case a.Witness == nil || !policy.waitsInOutage(t.FirstFailed):
		return true
	case after.IsZero(): // the failures begin with this one: other attempts have not returned
		return false
	case a.Breakers.SucceededSince(t.Action, after):
		return true
	}
	const timeout = 5 * time.Second
	ctx, cancel := context.WithTimeout(a.Scheduler.Held(), timeout)
	defer cancel()
	seen, err := a.Witness(ctx, t.Action, time.Since(after))
	if err != nil {
		a.Processor.Log.Debug("outbox: it is not known whether an action works in another process; a failure of its event will not count",
			"action", t.Action, "error", err)
	}
	return seen && err == nil
}

// sinceFailure returns how long ago a failure was, or 0 without one.
func sinceFailure(failed time.Time) time.Duration {
	if failed.IsZero() {
		return 0
	}
	return time.Since(failed)
}

func (a *Attempts) postponed(t *Task, policy RetryPolicy, err error) Outcome {
	return Outcome{
		Result: Postponed, Action: t.Action, Err: err, Class: ErrorClass(err), Attempt: t.Meta.Attempt,
		Wait: policy.Next(t.Meta.Attempt, err),
	}
}

// ReportAgain logs that a task has failed or was postponed and is tried again.
func (a *Attempts) ReportAgain(t *Task, o Outcome) {
	ctx := EventContext(a.Scheduler.Held(), &t.Meta)
	attrs := EventAttrs(&t.Meta, "action", t.Action, "attempt", o.Attempt, "wait", o.Wait,
		"error_code", o.Class, "error", o.Err)
	if o.Result == Postponed && pg.IsWaitInVain(o.Err) {
		a.Processor.Log.WarnContext(ctx, "outbox: another session holds a lock that an event needs, which is no attempt; trying again", attrs...)
		return
	}
	if o.Result == Postponed && pg.IsTransient(o.Err) {
		a.Processor.Log.WarnContext(ctx, "outbox: transaction conflicts with others again and again, which is no attempt; trying again", attrs...)
		return
	}
	if o.Result == Postponed {
		a.Processor.Log.InfoContext(ctx,
			"outbox: handler failed in an outage of PostgreSQL, which is no attempt; trying again", attrs...)
		return
	}
	message := "outbox: handler failed, trying again"
	switch {
	case o.Kept:
		message = "outbox: handler failed, and no other event of the action has succeeded: it may be an outage, and is no attempt; " +
			"trying again"
	case o.Uncounted:
		message = "outbox: handler failed in an outage of what it needs, which is no attempt; trying again"
	}
	a.Processor.Log.WarnContext(ctx, message, attrs...)
}

// ReportDead logs that an event is dead for an action, or for all actions if the outcome names none, and calls the hook
// DeadLettered. Topic is the topic of its dead letter, or "" if none was sent.
func (a *Attempts) ReportDead(about envelope.Received, topic string, o Outcome) {
	m := &about
	m.Attempt = o.Attempt
	attrs := EventAttrs(m, "action", o.Action, "attempt", o.Attempt, "error_code", o.Class, "error", o.Err)
	if topic != "" {
		attrs = append(attrs, "dead_letter_topic", topic)
	}
	ctx := EventContext(a.Scheduler.Held(), m)
	a.Processor.Log.ErrorContext(ctx, "outbox: event is dead, an operator has to decide", attrs...)
	if hook := a.Processor.Rules.Hooks.DeadLettered; hook != nil {
		a.callHost("hook DeadLettered", o.Action, m, func() { hook(m, o.Action, topic, o.Err) })
	}
}

// ReportUnknown calls the hook Unknown for an event of a type without a handler.
func (a *Attempts) ReportUnknown(m *envelope.Received, action string) {
	if hook := a.Processor.Rules.Hooks.Unknown; hook != nil {
		a.callHost("hook Unknown", action, m, func() { hook(m) })
	}
}

func (a *Attempts) callHost(function, action string, m *envelope.Received, call func()) {
	a.Processor.CallHost(a.Scheduler.Held(), function, action, m, call)
}

// postponedError is an error of a handler in an outage of PostgreSQL. It is no attempt. Its [RetryAfter], if it has
// one, is the wait until the next attempt.
type postponedError struct{ error }

func (e *postponedError) Unwrap() error { return e.error }

func isPostponed(err error) bool {
	_, is := errors.AsType[*postponedError](err)
	return is
}

// PostponedError turns the error of a transaction of several tasks, in an outage of PostgreSQL, into one that uses up
// no attempt, for [Attempts.Try]. It returns nil if it is not certain which task has failed.
func PostponedError(err error) *TaskError {
	failed, _ := errors.AsType[*TaskError](err)
	if failed == nil || !failed.Certain {
		return nil
	}
	later := *failed
	later.Err = &postponedError{failed.Err}
	return &later
}
