package handling

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

// Handler is an action on the events of a Go type, with the function of the host that carries it out.
type Handler struct {
	Action string
	GoType reflect.Type
	Kind   HandlerKind
	One    func(context.Context, pgx.Tx, *Arrival) error  // set for InTx and NoTx
	Many   func(context.Context, pgx.Tx, []Arrival) error // set for InBatch
	// Key returns the key under which the action is noted. Nil means the identity of the event.
	Key     func(event any, about *envelope.Received) (aggregateType, aggregateID string)
	KeyType reflect.Type // Go type of the events that Key takes; nil without Key
	Retry   RetryPolicy
	InPlace bool // the partition waits while an event is tried again
}

// HandlerKind says how a handler is called.
type HandlerKind uint8

// Kinds of handlers.
const (
	InTx    HandlerKind = iota // with one event, in a transaction
	InBatch                    // with several events, in a transaction
	NoTx                       // with one event, without a transaction
)

// call calls the function of a handler.
func (h *Handler) call(ctx context.Context, tx pgx.Tx, arrivals []Arrival) error {
	if h.Kind == InBatch {
		return h.Many(ctx, tx, arrivals)
	}
	return h.One(ctx, tx, &arrivals[0])
}

// callGuarded is call, but returns a panic as an error.
func (h *Handler) callGuarded(ctx context.Context, tx pgx.Tx, arrivals []Arrival) error {
	return Guard(func() error { return h.call(ctx, tx, arrivals) })
}

// Arrival is a decoded event, of the Go type that its handler takes.
type Arrival struct {
	Event any
	Meta  envelope.Received
}

// Task is an action on an event.
type Task struct {
	*Handler
	Arrival
	FirstFailed time.Time // when the first attempt has failed, zero if this is the first one
	// WitnessAfter is the time of the last failure that counts. Zero means FirstFailed. The next failure counts only if
	// another event of the action succeeds in between.
	WitnessAfter time.Time
	// Works is set if another event of the action had succeeded since, before this attempt began.
	Works     bool
	Begun     bool         // an attempt may have begun: in this process, or in one that is gone
	conflicts int          // repeated conflicts, over all attempts in this process; see [Attempts.Try]
	late      *latePayload // nil if the event is decoded
}

// TaskResult is a task that a transaction has reached.
type TaskResult struct {
	*Task
	Excluded bool          // left out of the transaction: its handler has failed, or an earlier event of its key has
	Repeat   bool          // no handler was called, because the action was done before or the event had expired
	expired  bool          // the event had expired
	called   bool          // the handler was called and has succeeded
	took     time.Duration // time of the handler
}

// eventContext carries the correlation id, the trace id and the traceparent of an event. It needs one allocation, where
// [envelope.WithCarried] would need six.
type eventContext struct {
	context.Context
	correlationID, traceID, traceParent string // "" leaves the value of the outer context
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

// EventContext returns a context with the correlation id, the trace id and the traceparent of an event.
func EventContext(ctx context.Context, m *envelope.Received) context.Context {
	correlationID, traceID := m.Extensions[eventheader.Correlation], m.Extensions[eventheader.TraceID]
	traceParent := m.Extensions[eventheader.TraceParent]
	if correlationID == "" && traceID == "" && traceParent == "" {
		return ctx
	}
	return &eventContext{ctx, correlationID, traceID, traceParent}
}

// batchContext is [EventContext] for a single event. Several events have no common trace, so it returns ctx for them.
func batchContext(ctx context.Context, arrivals []Arrival) context.Context {
	if len(arrivals) == 1 {
		return EventContext(ctx, &arrivals[0].Meta)
	}
	return ctx
}

// MaxAction is the largest number of characters in the name of an action.
const MaxAction = 100

// validate returns why a handler cannot be used, or nil.
func (h *Handler) validate() error {
	bad := func(field string, err error) error {
		return &envelope.FieldError{EventType: h.GoType.String(), Index: -1, Field: field, Err: err}
	}
	switch err := check.Text(h.Action, MaxAction); {
	case err != nil:
		return bad("action", err)
	case h.One == nil && h.Many == nil:
		return bad("handler", fmt.Errorf("function of %s %w", h.Action, check.ErrNilArgument))
	case h.KeyType != nil && h.Kind == NoTx:
		return bad("OncePer",
			fmt.Errorf("of %s %w: nothing records what a handler of HandleNoTx has done", h.Action, check.ErrMalformed))
	case h.Retry.Validate() != nil:
		return bad("WithRetry", fmt.Errorf("of %s: %w", h.Action, h.Retry.Validate()))
	case h.KeyType != nil && h.KeyType != h.GoType:
		return bad("OncePer", fmt.Errorf("of %s %w: its key is of %s", h.Action, check.ErrMalformed, h.KeyType))
	}
	return nil
}
