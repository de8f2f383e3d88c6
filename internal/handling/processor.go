package handling

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/pg"
)

// Processor decodes events, finds their handlers and calls them, in transactions that note each task. It does not
// retry. It belongs to one goroutine; [Processor.ForOne] returns the processor of another one.
type Processor struct {
	Rules    *Rules
	Routes   Routes
	Store    Transactor // nil without PostgreSQL
	Log      *slog.Logger
	input    *inputLog
	separate *sync.Map // *Handler: handlers that change settings, see runSeparately

	retriesFor *contain.Callback // calls RetriesFor of a policy
	work       *Activity

	// Complete, if it is not nil, is called for the tasks that have succeeded, repeats among them. It runs in their
	// transaction, after the handlers and before the commit.
	Complete func(ctx context.Context, tx Tx, results []TaskResult) error
	// Queue, if it is not nil, queues statements that run when the transaction of tasks begins.
	Queue func(b *pgx.Batch, tasks []Task)
	// PassFailed has [Processor.ProcessBatch] go on behind a task that has failed, where nothing has to be undone.
	PassFailed bool
	// Ahead is added to the clock by which events expire. Only tests set it, which do not wait between attempts.
	Ahead time.Duration
	// Begin, if it is not nil, is called in the transaction of tasks, before their handlers. It returns the indexes of
	// tasks that the transaction leaves out.
	Begin func(ctx context.Context, tx Tx, tasks []Task) (excluded []int, err error)
}

// ForOne returns a processor for another goroutine, which notes its calls in work.
func (p *Processor) ForOne(work *Activity) *Processor {
	own := *p
	own.work = work
	return &own
}

// TxFunc runs tasks in a transaction. Fresh has the keys that were not noted before. The function removes the keys of
// the tasks that it has done.
type TxFunc = func(tx Tx, fresh map[NoteKey]bool) error

// Transactor begins and commits the transactions of a processor. It is a [Notes], or a fake.
type Transactor interface {
	// InTx notes keys and calls f in one transaction, whose connection it notes in work. It deletes the notes of the
	// keys that f leaves in fresh, and commits. Behind its own statements it runs those that queue has queued. The
	// transaction is shared if f may call several handlers. The error is a [*NoteError] if it cannot begin, and a
	// [*ConnectionError] if the connection was lost later.
	InTx(ctx context.Context, work *Activity, keys []NoteKey, shared bool, queue func(*pgx.Batch), f TxFunc) error
	// Ping returns why PostgreSQL cannot be reached, or nil.
	Ping(ctx context.Context) error
	// Now returns the time of PostgreSQL.
	Now(ctx context.Context) (time.Time, error)
}

// Batch is what has become of tasks that ran in one transaction, which is committed, or rolled back if it has excluded
// all tasks.
type Batch struct {
	Next     *envelope.Origin // the first event that was not reached; nil if all were
	Repeats  Repeats
	Excluded Excluded
}

// ProcessBatch runs tasks of several events in one transaction, which commits early if enough returns true between
// two events. If a handler fails, the transaction leaves out its task and later ones of its key (see
// [Processor.PassFailed]), or it is rolled back, and the error is a [*TaskError].
func (p *Processor) ProcessBatch(ctx context.Context, tasks []Task, enough func(spent time.Duration) bool) (done Batch, err error) {
	c, err := p.transact(ctx, tasks, enough)
	if err != nil {
		return Batch{}, c.attribute(err)
	}
	done.Excluded = c.excluded
	if len(c.results) < len(tasks) {
		done.Next = tasks[len(c.results)].Meta.Origin
	}
	if len(c.excluded) > 0 {
		c.results = slices.DeleteFunc(c.results, func(r TaskResult) bool { return r.Excluded })
	}
	p.Notify(ctx, c.results)
	for _, r := range c.results {
		if r.Repeat {
			done.Repeats = append(done.Repeats, *r.Task)
		}
	}
	return done, nil
}

// Repeats are tasks that were done before, or whose events had expired. No handler was called for them, so they say
// nothing about an action.
type Repeats []Task

// Has reports whether a task is among them.
func (r Repeats) Has(t *Task) bool {
	return slices.ContainsFunc(r, func(one Task) bool { return one.Handler == t.Handler && one.Meta.Origin == t.Meta.Origin })
}

// ProcessOne runs one task, in a transaction of its own if its handler has one. It reports whether the task was done
// before, or its event had expired, so that no handler was called.
func (p *Processor) ProcessOne(ctx context.Context, t Task) (repeat bool, err error) {
	if t.Kind != NoTx {
		c, err := p.transact(ctx, []Task{t}, func(time.Duration) bool { return false })
		if err != nil {
			return false, err
		}
		p.Notify(ctx, c.results)
		return c.results[0].Repeat, nil
	}
	if expired, err := p.hasExpired(ctx, &t); expired || err != nil {
		if expired {
			p.Notify(ctx, []TaskResult{{Task: &t, Repeat: true, expired: true}})
		}
		return expired, err
	}
	var took time.Duration
	err = contain.Do(func() (err error) {
		if err := p.decodeLate(ctx, &t); err != nil {
			return err
		}
		took, err = p.callHandler(EventContext(ctx, &t.Meta), t.Handler, nil, []Arrival{t.Arrival})
		return err
	})
	switch {
	case err == nil:
		p.Notify(ctx, []TaskResult{{Task: &t, took: took}})
	case errors.Is(err, contain.ErrGoexit):
		return false, endedGoroutine(t, err)
	}
	return false, err
}

// transact runs tasks in one transaction; it skips repeats. If enough returns true, it commits before all tasks are
// done, and there are fewer results than tasks. It runs functions of the host in a goroutine of its own, because they
// may end the goroutine.
func (p *Processor) transact(
	ctx context.Context, tasks []Task, enough func(spent time.Duration) bool,
) (*handlerCalls, error) {
	c := &handlerCalls{
		tasks: tasks, keys: make([]NoteKey, len(tasks)), enough: enough, passes: p.PassFailed && len(tasks) > 1,
		callOne: p.callHandler, runSeparately: p.runSeparately,
	}
	err := contain.Do(func() error {
		for i := range tasks {
			if err := p.decodeLate(ctx, &tasks[i]); err != nil {
				c.current = []int{i}
				return err
			}
		}
		if err := p.findKeys(ctx, c); err != nil {
			return err
		}
		queue := func(b *pgx.Batch) {
			if p.Queue != nil {
				p.Queue(b, tasks)
			}
			c.clock.queue(b, tasks, p.Ahead)
		}
		return p.Store.InTx(ctx, p.work, c.keys, severalCalls(tasks), queue, func(tx Tx, fresh map[NoteKey]bool) error {
			c.tx, c.fresh = tx, fresh
			if p.Begin != nil {
				if err := own(ctx, func(ctx context.Context) (err error) { c.excluding, err = p.Begin(ctx, tx, tasks); return err }); err != nil {
					return err
				}
			}
			if err := c.run(ctx); err != nil {
				return err
			}
			if len(c.excluded) == len(c.results) {
				return errNothingDone
			}
			if p.Complete == nil {
				return nil
			}
			return own(ctx, func(ctx context.Context) error { return p.Complete(ctx, tx, c.results) })
		})
	})
	if lost, _ := errors.AsType[*ConnectionError](err); lost == nil && errors.Is(err, errNothingDone) {
		return c, nil
	}
	ours, _ := errors.AsType[*completeError](err)
	if err = c.name(err); ours == nil && errors.Is(err, guardtx.ErrSettings) {
		p.runSeparately(handlersOf(tasks)...)
	}
	return c, err
}

// errNothingDone rolls back a transaction that has left out all its tasks.
var errNothingDone = errors.New("no task was done")

// own calls Begin or Complete of a [Processor], with a bound for their statements.
func own(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := pg.Bounded(ctx)
	defer cancel()
	if err := f(ctx); err != nil {
		return &completeError{err}
	}
	return nil
}

// completeError is an error of Begin or Complete of a [Processor]. It does not depend on the handlers and their events.
type completeError struct{ err error }

// ErrUnfinished is the error of a handler after which Complete cannot work in the transaction, for example because the
// handler has made it read-only.
var ErrUnfinished = errors.New("the handler has left its transaction so that what it did cannot be noted")

func (e *completeError) Error() string { return e.err.Error() }
func (e *completeError) Unwrap() error { return e.err }

// findKeys sets the keys of the tasks.
func (p *Processor) findKeys(ctx context.Context, c *handlerCalls) (err error) {
	for i := range c.tasks {
		if c.keys[i], err = p.findKey(ctx, &c.tasks[i]); err != nil {
			return err
		}
	}
	return nil
}

// findKey returns the key of a task. A key may come from a function of the host, which may end the goroutine: see
// OncePer.
func (p *Processor) findKey(ctx context.Context, t *Task) (key NoteKey, err error) {
	find := func() {
		err = Guard(func() (err error) { key, err = keyOf(t); return err })
	}
	if t.Key == nil {
		find()
	} else {
		p.CallHost(ctx, "key of OncePer", t.Action, &t.Meta, find)
	}
	return key, err
}

// KeyOf returns the key of a task that is not being run. It calls a function of the host in a goroutine of its own.
func (p *Processor) KeyOf(ctx context.Context, t *Task) (key NoteKey, err error) {
	if t.Key == nil {
		return p.findKey(ctx, t)
	}
	err = contain.Do(func() (err error) {
		key, err = p.findKey(ctx, t)
		return err
	})
	return key, err
}

// callHandler calls a handler with a context that ends after HandlerTimeout, and returns the duration of the call. The
// handler may end the goroutine.
func (p *Processor) callHandler(
	ctx context.Context, h *Handler, tx pgx.Tx, arrivals []Arrival,
) (took time.Duration, err error) {
	bounded, cancel := context.WithTimeout(ctx, p.Rules.HandlerTimeout)
	defer cancel()
	first := &arrivals[0].Meta
	p.work.Begin(Call{
		Context: ctx, Action: h.Action, Type: first.Type, ID: first.ID,
		AggregateType: first.AggregateType(), AggregateID: first.Subject,
		Events: len(arrivals), Place: PlaceOf(first.Origin),
	})
	defer func() { took = p.work.End() }()
	err = p.callInMiddleware(bounded, h, tx, arrivals)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = &timeoutError{err: err, after: p.Rules.HandlerTimeout}
	}
	return 0, err
}

// CallHost calls f, which calls a function of the host that is no handler. It notes the call in the activity, so that a
// function that does not return is reported.
func (p *Processor) CallHost(ctx context.Context, function, action string, m *envelope.Received, f func()) {
	p.work.Begin(Call{
		Context: ctx, Function: function, Action: action, Type: m.Type, ID: m.ID,
		AggregateType: m.AggregateType(), AggregateID: m.Subject, Events: 1, Place: PlaceOf(m.Origin),
	})
	defer p.work.End() // also if f ends its goroutine
	f()
}

// Retries returns how many retries a policy permits after err. It passes a function that calls RetriesFor to call.
func (p *Processor) Retries(policy RetryPolicy, err error, call func(func())) int {
	retries := policy.MaxRetries
	if policy.RetriesFor != nil {
		call(func() {
			p.retriesFor.Alone(func() { retries = policy.RetriesFor(err) })
		})
	}
	return retries
}

// PlaceOf returns where an event came from, for log lines.
func PlaceOf(o *envelope.Origin) Place {
	return Place{
		Topic: o.Record.Topic, Partition: o.Record.Partition, Offset: o.Record.Offset,
		Stream: o.Stream, DeliveryID: o.DeliveryID,
	}
}

// EventAttrs returns the attributes of an event for a log line, followed by more.
func EventAttrs(m *envelope.Received, more ...any) []any {
	return append(attrsAt(PlaceOf(m.Origin), m.Type, m.ID, m.AggregateType(), m.Subject), more...)
}

// timeoutError is the error of a handler that returned after HandlerTimeout.
type timeoutError struct {
	err   error
	after time.Duration
}

func (e *timeoutError) Error() string {
	return fmt.Sprintf("after HandlerTimeout, %v: %v", e.after, e.err)
}
func (e *timeoutError) Unwrap() []error { return []error{e.err, context.DeadlineExceeded} }

// callInMiddleware calls a handler inside all middleware. The first middleware is outermost.
func (p *Processor) callInMiddleware(ctx context.Context, h *Handler, tx pgx.Tx, arrivals []Arrival) error {
	if len(p.Rules.Middleware) == 0 {
		return h.callGuarded(ctx, tx, arrivals)
	}
	call := func(ctx context.Context) error { return h.callGuarded(ctx, tx, arrivals) }
	about := HandlerCall{Action: h.Action, Arrivals: arrivals, Tx: tx}
	for _, m := range slices.Backward(p.Rules.Middleware) {
		inner := call
		call = func(ctx context.Context) error { return callMiddleware(ctx, m, about, inner) }
	}
	return call(ctx)
}

// callMiddleware calls a middleware around inner. It returns when both have ended, also if the middleware calls next in
// another goroutine.
func callMiddleware(
	ctx context.Context, m Middleware, about HandlerCall, inner func(context.Context) error,
) (err error) {
	next := contain.NewNext(inner)
	defer func() { // also if something ends the goroutine
		if misuse := next.End(); misuse != nil {
			err = fmt.Errorf("middleware of handler %s: %w", about.Action, errors.Join(misuse, err))
		}
	}()
	return Guard(func() error { return m(ctx, about, next.Call) })
}

// Notify calls the hooks Handled and Repeated for committed tasks. A hook may end its goroutine.
func (p *Processor) Notify(ctx context.Context, results []TaskResult) {
	if h := p.Rules.Hooks; h.Handled == nil && h.Repeated == nil && !p.Log.Enabled(ctx, slog.LevelDebug) {
		return
	}
	for next := 0; next < len(results); {
		_ = contain.Do(func() error { // its error is logged where the hook is called
			p.CallHost(ctx, "hook Handled or Repeated", results[next].Action, &results[next].Meta, func() {
				for next < len(results) {
					next++
					p.notifyOne(ctx, results[next-1])
				}
			})
			return nil
		})
	}
}

func (p *Processor) notifyOne(ctx context.Context, r TaskResult) {
	switch {
	case r.Repeat:
		what := "outbox: event handled already"
		if r.Meta.Expired = r.expired; r.expired {
			what = "outbox: event has expired and is not handled"
		}
		if p.Log.Enabled(ctx, slog.LevelDebug) {
			p.Log.DebugContext(EventContext(ctx, &r.Meta), what,
				EventAttrs(&r.Meta, "action", r.Action)...)
		}
		if p.Rules.Hooks.Repeated != nil {
			p.Rules.Hooks.Repeated(&r.Meta, r.Action)
		}
	case p.Rules.Hooks.Handled != nil:
		p.Rules.Hooks.Handled(&r.Meta, r.Action, r.took)
	}
}

// IsOutage reports whether a task has failed because PostgreSQL was down, and not because of its event. Then the event
// waits, and no attempt is counted.
//
//   - It is an outage if the tasks could not be noted, or Begin or Complete has failed, except for a conflict of
//     transactions.
//   - An error of a handler may have any cause: another server, or a connection that the handler has closed. It is an
//     outage only if the pool of the processor cannot reach PostgreSQL either.
//   - It is no outage if the handler had used up its time.
func (p *Processor) IsOutage(ctx context.Context, err error, kind HandlerKind, late bool) bool {
	if errors.Is(err, ErrUnfinished) {
		return false
	}
	if isOwn(err) {
		return !pg.IsTransient(err)
	}
	var lost *ConnectionError
	if p.Store == nil || late || kind != NoTx && !errors.As(err, &lost) && !pg.IsOutage(err) {
		return false
	}
	const pingTimeout = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return p.Store.Ping(ctx) != nil
}

// isOwn reports whether an error comes from a statement of ours in the transaction of a handler.
func isOwn(err error) bool {
	var store *NoteError
	var completing *completeError
	return errors.As(err, &store) || errors.As(err, &completing)
}

// isOwnConflict reports whether PostgreSQL has rolled back the transaction of a handler in a statement of ours, for a
// deadlock or a serialization failure.
func isOwnConflict(err error) bool {
	return pg.IsTransient(err) && isOwn(err) && !errors.Is(err, ErrUnfinished)
}

// IsLate reports whether a handler, or its whole transaction, has used up its time.
func IsLate(ctx context.Context, err error) bool {
	timedOut, _ := errors.AsType[*timeoutError](err)
	return timedOut != nil || ctx.Err() != nil
}
