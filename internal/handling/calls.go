package handling

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/pg"
)

// Tx is a transaction in which handlers are called: a [guardtx.Tx], or a fake.
type Tx interface {
	// Call calls the handler of an action, and checks what it has done to the transaction.
	Call(action string, f func(pgx.Tx) error) error
	// Used reports whether the last handler has used the transaction.
	Used() bool
	// ChangedSettings reports whether a handler has changed settings of the transaction.
	ChangedSettings() bool
	// Own returns the transaction for statements of this package and of its callers.
	Own() pgx.Tx
}

// handlerCalls calls the handlers of tasks in one transaction. A handler of batches ([InBatch]) is called as late as
// possible, so that it gets many events at once. It is called before another handler gets a later event of the same
// key.
type handlerCalls struct {
	tasks         []Task
	keys          []NoteKey                      // by task
	enough        func(spent time.Duration) bool // reports whether to commit, given the time that handlers took
	callOne       func(ctx context.Context, h *Handler, tx pgx.Tx, arrivals []Arrival) (took time.Duration, err error)
	runSeparately func(...*Handler) // called for a handler that changes settings

	tx        Tx
	fresh     map[NoteKey]bool
	clock     clock         // of the database, when the transaction began
	spent     time.Duration // taken by handlers
	results   []TaskResult  // of the tasks that were reached, in their order
	passes    bool          // go on behind a task that has failed
	done      int           // tasks whose handlers have succeeded
	excluding []int         // tasks that the transaction leaves out from the beginning, in order
	excluded  Excluded      // all that it leaves out
	pending   []pendingCall
	mixed     bool // the tasks are for events of several types

	event   *envelope.Origin // event of the first call
	others  bool             // a call was for another event, too
	current []int            // tasks of the call that is under way, or has failed
	one     struct {         // memory of calls with a single event, to save allocations
		task    [1]int
		arrival [1]Arrival
	}
	changed bool // a handler has changed settings of the transaction, so no other may be called
}

// pendingCall is a call of a handler of batches that has not been made.
type pendingCall struct {
	tasks []int
	types map[string]string // event type by key, "" for several types; nil unless mixed
}

// severalCalls reports whether tasks may need more than one call of a handler.
func severalCalls(tasks []Task) bool {
	return slices.ContainsFunc(tasks[1:], func(t Task) bool {
		return t.Kind != InBatch || t.Handler != tasks[0].Handler
	})
}

// run calls the handlers. It ends between two events if enough returns true. It removes the keys of the tasks that it
// has done from fresh.
func (c *handlerCalls) run(ctx context.Context) error {
	c.mixed = slices.ContainsFunc(c.tasks, func(t Task) bool { return t.Meta.Type != c.tasks[0].Meta.Type })
	c.results = make([]TaskResult, 0, len(c.tasks))
	for i := range c.tasks {
		t := &c.tasks[i]
		if i > 0 && t.Meta.Origin != c.tasks[i-1].Meta.Origin && (c.failsOften() || c.enough(c.spent)) {
			break
		}
		if begun := len(c.excluding) > 0 && c.excluding[0] == i; begun || c.isBehind(t) {
			c.exclude(i, ExcludedTask{task: t, AtBegin: begun})
			continue
		}
		fresh := c.fresh[c.keys[i]]
		expired := fresh && c.clock.isPast(t.Meta.Expires)
		c.results = append(c.results, TaskResult{Task: t, Repeat: !fresh || expired, expired: expired})
		if !fresh || expired && t.Key != nil { // without a note, a later event with the key is handled
			continue
		}
		delete(c.fresh, c.keys[i]) // the next task with this key is a repeat
		if expired {
			continue
		}
		if t.Kind == InBatch {
			c.postpone(i)
			continue
		}
		if err := c.flush(ctx, c.conflicts(t)); err != nil {
			return err
		}
		c.one.task[0], c.one.arrival[0] = i, t.Arrival
		if err := c.call(ctx, c.one.task[:], c.one.arrival[:]); err != nil {
			return err
		}
	}
	return c.flush(ctx, len(c.pending))
}

// conflicts returns how many pending calls must be made before the handler of a task is called: up to the last call
// with an event of the same key and of another type. If all events have one type, the order of calls does not matter.
func (c *handlerCalls) conflicts(t *Task) int {
	if !c.mixed || len(t.Meta.Origin.Key) == 0 {
		return 0
	}
	for n, call := range slices.Backward(c.pending) {
		name, ok := call.types[string(t.Meta.Origin.Key)]
		if ok && name != t.Meta.Type && c.tasks[call.tasks[0]].Handler != t.Handler {
			return n + 1
		}
	}
	return 0
}

// postpone adds a task to the last pending call of its handler. If another call must be made between the two, it
// adds a new pending call.
func (c *handlerCalls) postpone(i int) {
	t, n := &c.tasks[i], len(c.pending)-1
	for n >= 0 && c.tasks[c.pending[n].tasks[0]].Handler != t.Handler {
		n--
	}
	if n < c.conflicts(t) {
		n = len(c.pending)
		c.pending = append(c.pending, pendingCall{})
	}
	c.pending[n].add(i, t, c.mixed)
}

func (p *pendingCall) add(i int, t *Task, mixed bool) {
	p.tasks = append(p.tasks, i)
	if !mixed {
		return
	}
	if p.types == nil {
		p.types = map[string]string{}
	}
	key, eventType := string(t.Meta.Origin.Key), t.Meta.Type
	if name, ok := p.types[key]; ok && name != eventType {
		eventType = ""
	}
	p.types[key] = eventType
}

// flush makes the first n pending calls.
func (c *handlerCalls) flush(ctx context.Context, n int) error {
	for _, pending := range c.pending[:n] {
		tasks := slices.DeleteFunc(pending.tasks, c.dropExpired)
		if len(tasks) == 0 {
			continue
		}
		arrivals := make([]Arrival, len(tasks))
		for n, i := range tasks {
			arrivals[n] = c.tasks[i].Arrival
		}
		if err := c.call(ctx, tasks, arrivals); err != nil {
			return err
		}
	}
	c.pending = c.pending[n:]
	return nil
}

// dropExpired drops a task whose event has expired while its call was pending, and reports whether it has. A note of
// OncePer is taken back, so a task of which a later one is taken for a repeat is done nevertheless.
func (c *handlerCalls) dropExpired(i int) bool {
	t := &c.tasks[i]
	if !c.clock.isPast(t.Meta.Expires) {
		return false
	}
	if t.Key != nil {
		if slices.Contains(c.keys[i+1:len(c.results)], c.keys[i]) {
			return false
		}
		c.fresh[c.keys[i]] = true
	}
	c.results[i].Repeat, c.results[i].expired = true, true
	return true
}

// call calls the handler of some tasks, which are given by their index, with their events.
func (c *handlerCalls) call(ctx context.Context, tasks []int, arrivals []Arrival) error {
	if c.changed {
		return guardtx.ErrSettings
	}
	first := &c.tasks[tasks[0]]
	if c.event == nil {
		c.event = first.Meta.Origin
	}
	c.others, c.current = c.others || c.event != first.Meta.Origin, tasks
	var took time.Duration
	err := c.tx.Call(first.Action, func(tx pgx.Tx) (err error) {
		took, err = c.callOne(batchContext(ctx, arrivals), first.Handler, tx, arrivals)
		return err
	})
	c.spent += took
	switch {
	case err != nil && len(tasks) == 1 && c.mayPass(ctx, tasks[0], err):
		c.fresh[c.keys[tasks[0]]] = true // it is not done
		c.exclude(tasks[0], ExcludedTask{task: first, Err: &TaskError{task: *first, events: 1, Certain: true, Err: err, shared: c.others}})
		c.current = nil
		return nil
	case err != nil:
		return err
	}
	c.current, c.others, c.done = nil, c.others || len(tasks) > 1, c.done+len(tasks)
	for _, i := range tasks {
		c.results[i].called, c.results[i].took = true, took/time.Duration(len(tasks))
	}
	if c.tx.ChangedSettings() && len(c.tasks) > 1 {
		c.changed = true
		c.runSeparately(first.Handler)
	}
	return nil
}

// mayPass reports whether the transaction can go on behind a task that has failed, and has time for that: its
// handler has not used the transaction, so there is nothing to undo, and no other event can have caused the error
// by what it has done there. No later task must have been taken for a repeat of it, or wait for it and be called
// all the same: a call of a handler of batches comes late.
func (c *handlerCalls) mayPass(ctx context.Context, i int, err error) bool {
	for n := i + 1; n < len(c.results); n++ {
		if c.keys[n] == c.keys[i] || !c.results[n].Excluded && waitsFor(&c.tasks[n], &c.tasks[i]) {
			return false
		}
	}
	timedOut, _ := errors.AsType[*timeoutError](err)
	hasTime := ctx.Err() == nil && timedOut == nil && !c.enough(c.spent)
	return c.passes && !c.tasks[i].InPlace && !c.tx.Used() && hasTime && !pg.IsOwn(err) && !pg.IsWaitInVain(err) &&
		!errors.Is(err, guardtx.ErrEnded) && !errors.Is(err, guardtx.ErrSettings)
}

// isBehind reports whether a task waits for one that is excluded.
func (c *handlerCalls) isBehind(t *Task) bool {
	return slices.ContainsFunc(c.excluded, func(one ExcludedTask) bool { return waitsFor(t, one.task) })
}

// waitsFor reports whether a task waits for an earlier one that has failed: of the same action, and of the same
// event or key.
func waitsFor(t, earlier *Task) bool {
	of, before := t.Meta.Origin, earlier.Meta.Origin
	return t.Action == earlier.Action && (of == before || len(of.Key) > 0 && bytes.Equal(of.Key, before.Key))
}

// exclude leaves a task out of the transaction, whose handler was not called or has failed.
func (c *handlerCalls) exclude(i int, t ExcludedTask) {
	if i == len(c.results) {
		c.results = append(c.results, TaskResult{Task: t.task})
	}
	if t.AtBegin {
		c.excluding = c.excluding[1:]
	}
	c.results[i].Excluded = true
	c.excluded = append(c.excluded, t)
}

// failsOften reports whether so many tasks have failed, of which it is not known that their actions work, that the
// others are better tried later.
func (c *handlerCalls) failsOften() bool {
	const some, share = 3, 20
	failed := 0
	for _, l := range c.excluded {
		if l.Err != nil && !l.task.Works {
			failed++
		}
	}
	return failed > some+c.done/share
}

// Excluded are tasks that a transaction has left out.
type Excluded []ExcludedTask

// ExcludedTask is a task that a transaction has left out: from its beginning, with the error of its handler, or
// because it waits for an earlier one of its key.
type ExcludedTask struct {
	task    *Task
	AtBegin bool
	Err     *TaskError
}

// Of returns the entry of a task, or nil.
func (l Excluded) Of(t *Task) *ExcludedTask {
	for i := range l {
		if l[i].task.Handler == t.Handler && l[i].task.Meta.Origin == t.Meta.Origin {
			return &l[i]
		}
	}
	return nil
}

// HasEvent reports whether a task of an event is among them.
func (l Excluded) HasEvent(o *envelope.Origin) bool {
	return slices.ContainsFunc(l, func(one ExcludedTask) bool { return one.task.Meta.Origin == o })
}

// Errors returns the errors of the tasks that have failed.
func (l Excluded) Errors() (errs []*TaskError) {
	for _, one := range l {
		if one.Err != nil {
			errs = append(errs, one.Err)
		}
	}
	return errs
}

// ErrorOf returns the error of a task among those of a batch, if it is certain that the task has failed. Otherwise it
// returns nil.
func ErrorOf(t Task, failed []*TaskError) error {
	for _, one := range failed {
		if err := one.Of(t); err != nil {
			return err
		}
	}
	return nil
}

// TaskError is the error of a call of a handler, in a transaction of several tasks.
type TaskError struct {
	task      Task   // the first of the call
	events    int    // number of events of the call
	succeeded []Task // whose handlers had been called before
	Certain   bool   // no other event than the task's can have caused the error by what it has done
	shared    bool   // other events have been handled before, and what they have done was not committed
	Err       error
}

// Error implements error.
func (e *TaskError) Error() string { return e.Err.Error() }

// Unwrap returns the error of the handler.
func (e *TaskError) Unwrap() error { return e.Err }

// Event returns the origin of the task's event.
func (e *TaskError) Event() *envelope.Origin { return e.task.Meta.Origin }

// Of returns the error if it is certain that t has failed with it. Otherwise it returns nil.
func (e *TaskError) Of(t Task) error {
	if e == nil || !e.Certain || e.task.Handler != t.Handler || e.task.Meta.Origin != t.Meta.Origin {
		return nil
	}
	if e.shared {
		return &sharedError{e.Err}
	}
	return e.Err
}

// sharedError is the certain error of a task behind tasks of other events. What these had written was not
// committed, so the handler may have looked for it in vain.
type sharedError struct{ error }

func (e *sharedError) Unwrap() error { return e.error }

// Succeeded returns the tasks whose handlers have succeeded before in the same transaction. It is rolled back, so
// they are tried again.
func (e *TaskError) Succeeded() []Task {
	if e == nil {
		return nil
	}
	return e.succeeded
}

// ItemsToRepeat returns how many of the first of n items are tried again together, after the transaction of all n has
// failed with err: the items before the failed one. If the failed call had several events, or err comes from no
// handler, it returns half of n. If it returns 0, the first item is handled alone. Index finds an item by its origin.
func ItemsToRepeat(err error, n int, index func(*envelope.Origin) int) (repeat int, failed *TaskError) {
	if !errors.As(err, &failed) || failed.events > 1 {
		return n / 2, failed
	}
	return index(failed.task.Meta.Origin), failed
}

// name adds the action to the error of a handler that has ended its goroutine.
func (c *handlerCalls) name(err error) error {
	if errors.Is(err, contain.ErrGoexit) && len(c.current) > 0 {
		return endedGoroutine(c.tasks[c.current[0]], err)
	}
	return err
}

func endedGoroutine(t Task, err error) error { return fmt.Errorf("handler %s: %w", t.Action, err) }

// attribute makes an error a [*TaskError] if a handler has returned it. The error is certain if the call had a single
// event and all calls before it were for the same event. Otherwise other events may have caused it, by what their
// handlers have done in the transaction.
func (c *handlerCalls) attribute(err error) error {
	if len(c.current) == 0 {
		return err
	}
	failed := &TaskError{
		task: c.tasks[c.current[0]], events: len(c.current), Certain: len(c.current) == 1 && !c.others, Err: err,
	}
	for _, r := range c.results {
		if r.called {
			failed.succeeded = append(failed.succeeded, *r.Task)
		}
	}
	return failed
}
