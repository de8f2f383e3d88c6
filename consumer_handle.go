package outbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
)

// handled is a task that went well.
type handled struct {
	task
	repeat bool          // done before
	took   time.Duration // of the handler
}

// together runs the tasks of several records that need a transaction in a single
// one. If one of them fails, nothing has happened.
func (c *Consumer) together(ctx context.Context, items []item) error {
	var tasks []task
	for i := range items {
		for _, t := range items[i].tasks {
			if t.kind != noTx {
				tasks = append(tasks, t)
			}
		}
	}
	if len(tasks) == 0 {
		return nil
	}
	all, err := c.transact(ctx, tasks)
	if err == nil {
		c.tell(ctx, all)
	}
	return err
}

// once runs a task by itself.
func (c *Consumer) once(ctx context.Context, t task) error {
	var all []handled
	var err error
	if t.kind == noTx {
		start := time.Now()
		err = c.handle(handlerContext(ctx, t.meta), t.action, []arrival{t.arrival}, func(ctx context.Context) error { return t.one(ctx, nil, t.arrival) })
		all = []handled{{task: t, took: time.Since(start)}}
	} else {
		all, err = c.transact(ctx, []task{t})
	}
	if err == nil {
		c.tell(ctx, all)
	}
	return err
}

// transact runs tasks in a transaction, those that are not repeats.
func (c *Consumer) transact(ctx context.Context, tasks []task) (all []handled, err error) {
	keys := make([]handledKey, len(tasks))
	for i, t := range tasks {
		err := guard(func() (err error) { keys[i], err = keyOf(t); return err })
		if err != nil {
			return nil, err
		}
	}
	err = c.inTx(ctx, func(tx pgx.Tx) error {
		fresh, err := c.done.begin(ctx, tx, keys)
		if err != nil {
			return err
		}
		all, err = c.run(ctx, tx, tasks, keys, fresh)
		return err
	})
	return all, err
}

// run calls the handlers in the order of the tasks, and then those of batches.
func (c *Consumer) run(ctx context.Context, tx pgx.Tx, tasks []task, keys []handledKey, fresh map[handledKey]bool) ([]handled, error) {
	all := make([]handled, len(tasks))
	var batches [][]int // of tasks with the same handler, by their index
	for i, t := range tasks {
		all[i].task = t
		if !fresh[keys[i]] {
			all[i].repeat = true
			continue
		}
		delete(fresh, keys[i]) // the next with this key is a repeat
		if t.kind == inBatch {
			batches = addToBatch(batches, tasks, i)
			continue
		}
		start := time.Now()
		err := c.handle(handlerContext(ctx, t.meta), t.action, []arrival{t.arrival}, func(ctx context.Context) error { return t.one(ctx, tx, t.arrival) })
		if err != nil {
			return nil, err
		}
		all[i].took = time.Since(start)
	}
	for _, batch := range batches {
		arrivals := make([]arrival, len(batch))
		for n, i := range batch {
			arrivals[n] = tasks[i].arrival
		}
		start, first := time.Now(), tasks[batch[0]]
		err := c.handle(batchContext(ctx, arrivals), first.action, arrivals, func(ctx context.Context) error { return first.many(ctx, tx, arrivals) })
		if err != nil {
			return nil, err
		}
		for _, i := range batch {
			all[i].took = time.Since(start) / time.Duration(len(batch))
		}
	}
	return all, nil
}

// handle calls a handler, and tells the hooks.
func (c *Consumer) handle(ctx context.Context, action string, arrivals []arrival, call func(context.Context) error) error {
	if c.cfg.Hooks.Handling == nil {
		return guard(func() error { return call(ctx) })
	}
	events := make([]Metadata, len(arrivals))
	for i, r := range arrivals {
		events[i] = r.meta
	}
	ctx, done := c.cfg.Hooks.Handling(ctx, action, events)
	err := guard(func() error { return call(ctx) })
	done(err)
	return err
}

// addToBatch puts task i to the others of its handler.
func addToBatch(batches [][]int, tasks []task, i int) [][]int {
	same := func(b []int) bool { return tasks[b[0]].handler == tasks[i].handler }
	if n := slices.IndexFunc(batches, same); n >= 0 {
		batches[n] = append(batches[n], i)
		return batches
	}
	return append(batches, []int{i})
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
	case key == traceKey && c.traceParent != "":
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

// batchContext carries on what a single event came with; several have no one trace.
func batchContext(ctx context.Context, arrivals []arrival) context.Context {
	if len(arrivals) == 1 {
		return handlerContext(ctx, arrivals[0].meta)
	}
	return ctx
}

// tell reports what is done and committed.
func (c *Consumer) tell(ctx context.Context, all []handled) {
	debug := c.log.Enabled(ctx, slog.LevelDebug)
	for _, h := range all {
		switch {
		case h.repeat:
			if debug {
				c.log.DebugContext(handlerContext(ctx, h.meta), "outbox: event handled already", "type", h.meta.Type, "event_id", h.meta.ID, "action", h.action)
			}
			if c.cfg.Hooks.Repeated != nil {
				c.cfg.Hooks.Repeated(h.meta, h.action)
			}
		case c.cfg.Hooks.Handled != nil:
			c.cfg.Hooks.Handled(h.meta, h.action, h.took)
		}
	}
}

// lostError is an error with which the connection to PostgreSQL was lost, or none
// was to be had.
type lostError struct {
	err  error
	none bool
}

func (e *lostError) Error() string { return e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// inTx runs f in a transaction.
func (c *Consumer) inTx(ctx context.Context, f func(pgx.Tx) error) error {
	tx, err := c.done.db.Begin(ctx)
	if err != nil {
		return &lostError{err: fmt.Errorf("begin: %w", err), none: true}
	}
	conn := tx.Conn()
	if err = f(tx); err == nil {
		if err = tx.Commit(ctx); err != nil {
			err = fmt.Errorf("commit: %w", err)
		}
	}
	if err != nil && conn.IsClosed() {
		err = &lostError{err: err}
	}
	if err != nil {
		// A rollback that fails closes the connection, and that rolls back.
		_ = tx.Rollback(ctx)
	}
	return err
}

// isOutage reports whether PostgreSQL is to blame for the error of a task, and not
// the event. A lost connection may be the handler's doing, and what a handler says
// that has no transaction of ours may be about anything: they are an outage only if
// there is no connection to be had.
func (c *Consumer) isOutage(ctx context.Context, err error, kind handlerKind) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		for _, class := range []string{"08", "53", "57P", "25006"} { // connection, resources, shutdown, read-only
			if strings.HasPrefix(pg.Code, class) {
				return true
			}
		}
	}
	var lost *lostError
	var unreachable *pgconn.ConnectError
	switch {
	case errors.As(err, &unreachable):
		return true
	case errors.As(err, &lost) && lost.none:
		return true
	case c.done.db == nil || lost == nil && kind != noTx:
		return false
	}
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return c.done.db.Ping(ctx) != nil
}

// errClass names the kind of a handler's error.
func errClass(err error) string {
	var p *PanicError
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &p):
		return "panic"
	case errors.As(err, &pg):
		return "postgres_" + pg.Code
	case isPermanent(err):
		return "permanent"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "handler"
}

// handlerWait returns the wait before the n-th retry of a handler, from 1.
func (c *Consumer) handlerWait(n int) time.Duration {
	d := min(c.cfg.RetryWait<<min(n-1, 10), max(maxHandlerWait, c.cfg.RetryWait))
	return d - rand.N(d/5+1)
}

// Deliver hands a record to the handlers as [Consumer.Run] does, without Kafka: it
// is for tests. Each action runs once, in a transaction of its own; errors are
// returned, not tried again, and there are no dead letters. Actions that are done
// already are skipped, and event types without a handler as Unknown says.
func (c *Consumer) Deliver(ctx context.Context, record *kgo.Record) error {
	it := c.read(ctx, record, new(KafkaMetadata))
	if it.class == classUnknownType && c.cfg.Unknown == SkipUnknown {
		return nil
	}
	errs := []error{it.err}
	for t := range it.inOrder() {
		errs = append(errs, c.once(ctx, t))
	}
	return errors.Join(errs...)
}

// keyOf returns what a task is done once for.
func keyOf(t task) (handledKey, error) {
	k := handledKey{t.meta.Type, eventKey(t.meta), t.action}
	if t.key != nil {
		k.aggregateType, k.aggregateID = t.key(t.event, t.meta)
	}
	for _, part := range []struct {
		field, text string
		limit       int
	}{{"aggregate_type", k.aggregateType, maxAggregateType}, {"aggregate_id", k.aggregateID, maxAggregateID}} {
		if err := check.Text(part.text, part.limit); err != nil {
			return k, Permanent(&FieldError{EventType: t.meta.Type, Index: -1, Field: part.field, Err: fmt.Errorf("of the key of %s %w", t.action, err)})
		}
	}
	return k, nil
}

// eventKey names an event in a column of limited length. A UUID is unique by itself,
// another id together with its source.
func eventKey(m Metadata) string {
	if _, err := uuid.Parse(m.ID); err == nil {
		return m.ID
	}
	key := m.Source + " " + m.ID
	if utf8.RuneCountInString(key) <= maxAggregateID && check.Text(key, math.MaxInt) == nil {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}
