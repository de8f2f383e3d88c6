package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"
)

// processor decodes records, finds their handlers and runs them, in transactions that
// note what is done. It neither retries nor gives up: that is for its caller, a
// [worker] or [Consumer.Deliver]. It belongs to one goroutine, see forOne.
type processor struct {
	cfg    HandlerConfig
	decode func(*kgo.Record) (*Message, error)
	routes routes
	store  transactor // nil without PostgreSQL
	log    *slog.Logger
	input  *inputLog
	work   *activity
}

// forOne returns the processor of another goroutine, whose activity is noted in work.
func (p *processor) forOne(work *activity) *processor {
	own := *p
	own.work = work
	return &own
}

// transactor is PostgreSQL as a processor needs it: a [handledStore], or a fake.
type transactor interface {
	// inTx runs f in a transaction, whose connection is noted in work. If the
	// connection was lost, or there was none to be had, the error is a
	// [*connectionError].
	inTx(ctx context.Context, work *activity, f func(pgx.Tx) error) error
	// markHandled notes keys as handled in tx, which commits with the effect. It
	// returns the keys that were not noted before.
	markHandled(ctx context.Context, tx pgx.Tx, keys []handledKey) (map[handledKey]bool, error)
	// unmarkHandled takes back what tx has noted.
	unmarkHandled(ctx context.Context, tx pgx.Tx, keys []handledKey) error
	// ping reports why there is no connection to be had.
	ping(ctx context.Context) error
}

// taskResult is a task that went well.
type taskResult struct {
	task
	repeat bool          // the action was done before
	took   time.Duration // by the handler
}

// processBatch runs the tasks of several records that need a transaction in a single
// one. If one of them fails, nothing has happened. Otherwise it returns how many records
// are done: fewer than there are if enough said so between two of them.
func (p *processor) processBatch(ctx context.Context, items []item, enough func() bool) (done int, err error) {
	var tasks []task
	for i := range items {
		for _, t := range items[i].tasks {
			if t.kind != noTx {
				tasks = append(tasks, t)
			}
		}
	}
	if len(tasks) == 0 {
		return len(items), nil
	}
	results, err := p.transact(ctx, tasks, enough)
	if err != nil {
		return 0, err
	}
	p.notify(ctx, results)
	if len(results) == len(tasks) {
		return len(items), nil
	}
	next := tasks[len(results)]
	return slices.IndexFunc(items, func(it item) bool { return it.meta.Kafka == next.meta.Kafka }), nil
}

// processOne runs a task by itself.
func (p *processor) processOne(ctx context.Context, t task) error {
	var results []taskResult
	var err error
	if t.kind == noTx {
		var took time.Duration
		took, err = p.callHandler(handlerContext(ctx, t.meta), t.action, []arrival{t.arrival}, func(ctx context.Context) error { return t.one(ctx, nil, t.arrival) })
		results = []taskResult{{task: t, took: took}}
	} else {
		results, err = p.transact(ctx, []task{t}, func() bool { return false })
	}
	if err == nil {
		p.notify(ctx, results)
	}
	return err
}

// transact runs tasks in a transaction, but for repeats. It commits before all of them
// are done if enough says so; then there are fewer results than tasks.
func (p *processor) transact(ctx context.Context, tasks []task, enough func() bool) (results []taskResult, err error) {
	keys := make([]handledKey, len(tasks))
	for i, t := range tasks {
		err := guard(func() (err error) { keys[i], err = keyOf(t); return err })
		if err != nil {
			return nil, err
		}
	}
	err = p.store.inTx(ctx, p.work, func(tx pgx.Tx) error {
		fresh, err := p.store.markHandled(ctx, tx, keys)
		if err != nil {
			return err
		}
		results, err = p.runHandlers(ctx, tx, tasks, keys, fresh, enough)
		if err != nil || len(results) == len(tasks) {
			return err
		}
		return p.store.unmarkHandled(ctx, tx, slices.Collect(maps.Keys(fresh)))
	})
	return results, err
}

// runHandlers calls the handlers in the order of the tasks, and then those of batches.
// Between two records it ends if enough says so. It removes the keys of what it has done
// from fresh.
func (p *processor) runHandlers(ctx context.Context, tx pgx.Tx, tasks []task, keys []handledKey, fresh map[handledKey]bool, enough func() bool) ([]taskResult, error) {
	results := make([]taskResult, 0, len(tasks))
	var batches [][]int // of tasks with the same handler, by their index
	for i, t := range tasks {
		if i > 0 && t.meta.Kafka != tasks[i-1].meta.Kafka && enough() {
			break
		}
		results = append(results, taskResult{task: t})
		if !fresh[keys[i]] {
			results[i].repeat = true
			continue
		}
		delete(fresh, keys[i]) // the next with this key is a repeat
		if t.kind == inBatch {
			batches = addToBatch(batches, tasks, i)
			continue
		}
		took, err := p.callHandler(handlerContext(ctx, t.meta), t.action, []arrival{t.arrival}, func(ctx context.Context) error { return t.one(ctx, tx, t.arrival) })
		if err != nil {
			return nil, err
		}
		results[i].took = took
	}
	for _, batch := range batches {
		took, err := p.callBatchHandler(ctx, tx, tasks, batch)
		if err != nil {
			return nil, err
		}
		for _, i := range batch {
			results[i].took = took / time.Duration(len(batch))
		}
	}
	return results, nil
}

// callBatchHandler calls the handler of the tasks of a batch, given by their index.
func (p *processor) callBatchHandler(ctx context.Context, tx pgx.Tx, tasks []task, batch []int) (took time.Duration, err error) {
	arrivals := make([]arrival, len(batch))
	for n, i := range batch {
		arrivals[n] = tasks[i].arrival
	}
	first := tasks[batch[0]]
	return p.callHandler(batchContext(ctx, arrivals), first.action, arrivals, func(ctx context.Context) error { return first.many(ctx, tx, arrivals) })
}

// callHandler calls a handler, for at most HandlerTimeout if it minds its context, and
// returns how long it took.
func (p *processor) callHandler(ctx context.Context, action string, arrivals []arrival, call func(context.Context) error) (took time.Duration, err error) {
	bounded, cancel := context.WithTimeout(ctx, p.cfg.HandlerTimeout)
	defer cancel()
	p.work.begin(action, arrivals)
	err = p.callHooked(bounded, action, arrivals, call)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = &timeoutError{err: err, after: p.cfg.HandlerTimeout}
	}
	return p.work.end(), err
}

// timeoutError is the error of a handler after HandlerTimeout.
type timeoutError struct {
	err   error
	after time.Duration
}

func (e *timeoutError) Error() string {
	return fmt.Sprintf("after HandlerTimeout, %v: %v", e.after, e.err)
}
func (e *timeoutError) Unwrap() []error { return []error{e.err, context.DeadlineExceeded} }

// callHooked calls a handler between the two halves of the hook Handling.
func (p *processor) callHooked(ctx context.Context, action string, arrivals []arrival, call func(context.Context) error) error {
	if p.cfg.Hooks.Handling == nil {
		return guard(func() error { return call(ctx) })
	}
	events := make([]Metadata, len(arrivals))
	for i, r := range arrivals {
		events[i] = r.meta
	}
	ctx, done := p.cfg.Hooks.Handling(ctx, action, events)
	err := guard(func() error { return call(ctx) })
	done(err)
	return err
}

// addToBatch adds task i to the batch of its handler.
func addToBatch(batches [][]int, tasks []task, i int) [][]int {
	same := func(b []int) bool { return tasks[b[0]].handler == tasks[i].handler }
	if n := slices.IndexFunc(batches, same); n >= 0 {
		batches[n] = append(batches[n], i)
		return batches
	}
	return append(batches, []int{i})
}

// notify calls the hooks for what is done and committed.
func (p *processor) notify(ctx context.Context, results []taskResult) {
	debug := p.log.Enabled(ctx, slog.LevelDebug)
	for _, r := range results {
		switch {
		case r.repeat:
			if debug {
				p.log.DebugContext(handlerContext(ctx, r.meta), "outbox: event handled already", "type", r.meta.Type, "event_id", r.meta.ID, "action", r.action)
			}
			if p.cfg.Hooks.Repeated != nil {
				p.cfg.Hooks.Repeated(r.meta, r.action)
			}
		case p.cfg.Hooks.Handled != nil:
			p.cfg.Hooks.Handled(r.meta, r.action, r.took)
		}
	}
}

// eventContext carries the correlation id and the traceparent of an event. It is one
// allocation, where [WithCorrelationID] and [WithTraceParent] would make four.
type eventContext struct {
	context.Context
	correlationID, traceParent string // "" for that of the outer context
}

// Value implements context.Context.
func (c *eventContext) Value(key any) any {
	switch {
	case key == any(correlationKey) && c.correlationID != "":
		return c.correlationID
	case key == any(traceKey) && c.traceParent != "":
		return c.traceParent
	}
	return c.Context.Value(key)
}

// handlerContext returns a context with the correlation id and the traceparent that
// the event arrived with.
func handlerContext(ctx context.Context, m Metadata) context.Context {
	correlationID, traceParent := m.Extensions[correlationAttr], m.Extensions[traceAttr]
	if correlationID == "" && traceParent == "" {
		return ctx
	}
	return &eventContext{ctx, correlationID, traceParent}
}

// batchContext is [handlerContext] for a single event; several have no one trace.
func batchContext(ctx context.Context, arrivals []arrival) context.Context {
	if len(arrivals) == 1 {
		return handlerContext(ctx, arrivals[0].meta)
	}
	return ctx
}

// isOutage reports whether the error of a task is due to PostgreSQL, and not to the
// event. A handler may have broken the connection itself, and the error of a handler
// without a transaction may be about anything: these are an outage only if there is
// no connection to be had.
func (p *processor) isOutage(ctx context.Context, err error, kind handlerKind) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		for _, class := range []string{"08", "53", "57P", "25006"} { // connection, resources, shutdown, read-only
			if strings.HasPrefix(pgErr.Code, class) {
				return true
			}
		}
	}
	var lost *connectionError
	var unreachable *pgconn.ConnectError
	switch {
	case errors.As(err, &unreachable):
		return true
	case errors.As(err, &lost) && lost.unavailable:
		return true
	case p.store == nil || lost == nil && kind != noTx:
		return false
	}
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return p.store.ping(ctx) != nil
}

// errorClass names the kind of a handler's error.
func errorClass(err error) string {
	var panicked *PanicError
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &panicked):
		return "panic"
	case errors.As(err, &pgErr):
		return "postgres_" + pgErr.Code
	case isPermanent(err):
		return "permanent"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "handler"
}

// retryWait returns the wait before the n-th retry of a handler, from 1.
func (p *processor) retryWait(n int) time.Duration {
	d := min(p.cfg.RetryWait<<min(n-1, 10), max(maxHandlerWait, p.cfg.RetryWait))
	return d - rand.N(d/5+1)
}
