package outbox

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
)

// engineHandler is an action on the events of a Go type, and the function that carries it out.
type engineHandler struct {
	action  string
	goType  reflect.Type
	kind    handlerKind
	one     func(context.Context, pgx.Tx, *arrival) error                                 // of inTx and noTx
	many    func(context.Context, pgx.Tx, []arrival) error                                // of inBatch
	key     func(event any, about *envelope.Received) (aggregateType, aggregateID string) // nil: the event itself
	keyType reflect.Type                                                                  // the Go type of the events that key takes; nil without one
	retry   retryPolicy
	inPlace bool // its partition waits while an event is tried again
}

// handlerKind says in what a handler is called.
type handlerKind uint8

const (
	inTx handlerKind = iota
	inBatch
	noTx
)

// call calls the function of a handler.
func (h *engineHandler) call(ctx context.Context, tx pgx.Tx, arrivals []arrival) error {
	if h.kind == inBatch {
		return h.many(ctx, tx, arrivals)
	}
	return h.one(ctx, tx, &arrivals[0])
}

// callGuarded is call, with a panic as an error.
func (h *engineHandler) callGuarded(ctx context.Context, tx pgx.Tx, arrivals []arrival) error {
	return guard(func() error { return h.call(ctx, tx, arrivals) })
}

// arrival is an event, decoded, of the Go type that its handler takes.
type arrival struct {
	event any
	meta  envelope.Received
}

// task is an action on an event.
type task struct {
	*engineHandler
	arrival
}

// taskResult is a task that went well.
type taskResult struct {
	task
	repeat bool          // the action was done before
	took   time.Duration // by the handler
}

// eventContext carries the correlation id, the trace id and the traceparent of an event. It is
// one allocation, where [WithCorrelationID] and the others would make six.
type eventContext struct {
	context.Context
	correlationID, traceID, traceParent string // "" for that of the outer context
}

// Value implements context.Context.
func (c *eventContext) Value(key any) any {
	switch {
	case key == any(envelope.CorrelationKey) && c.correlationID != "":
		return c.correlationID
	case key == any(envelope.TraceIDKey) && c.traceID != "":
		return c.traceID
	case key == any(envelope.TraceKey) && c.traceParent != "":
		return c.traceParent
	}
	return c.Context.Value(key)
}

// handlerContext returns a context with the correlation id, the trace id and the traceparent
// that the event arrived with.
func handlerContext(ctx context.Context, m *envelope.Received) context.Context {
	correlationID, traceID, traceParent := m.Extensions[eventheader.Correlation], m.Extensions[eventheader.TraceID], m.Extensions[eventheader.TraceParent]
	if correlationID == "" && traceID == "" && traceParent == "" {
		return ctx
	}
	return &eventContext{ctx, correlationID, traceID, traceParent}
}

// batchContext is [handlerContext] for a single event; several have no one trace.
func batchContext(ctx context.Context, arrivals []arrival) context.Context {
	if len(arrivals) == 1 {
		return handlerContext(ctx, &arrivals[0].meta)
	}
	return ctx
}

const maxAction = 100 // characters

// validate says why a handler cannot be used.
func (h *engineHandler) validate() error {
	bad := func(field string, err error) error {
		return &envelope.FieldError{EventType: h.goType.String(), Index: -1, Field: field, Err: err}
	}
	switch err := check.Text(h.action, maxAction); {
	case err != nil:
		return bad("action", err)
	case h.one == nil && h.many == nil:
		return bad("handler", fmt.Errorf("function of %s %w", h.action, check.ErrNilArgument))
	case h.keyType != nil && h.kind == noTx:
		return bad("OncePer", fmt.Errorf("of %s %w: nothing records what a handler of HandleNoTx has done", h.action, check.ErrMalformed))
	case h.retry.validate() != nil:
		return bad("WithRetry", fmt.Errorf("of %s: %w", h.action, h.retry.validate()))
	case h.keyType != nil && h.keyType != h.goType:
		return bad("OncePer", fmt.Errorf("of %s %w: its key is of %s", h.action, check.ErrMalformed, h.keyType))
	}
	return nil
}
