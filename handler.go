package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"github.com/outboxgo/outbox/internal/envelope"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/wait"
)

// ErrHandlerTx is the error of Commit and Rollback of the transaction that a handler gets, and of
// a handler that has called them, or has ended the transaction with a statement. Nothing is
// committed then.
var ErrHandlerTx = guardtx.ErrEnded

// Received is an event with what came along, for [HandleBatch].
type Received[E DomainEvent] struct {
	// Event as its codec decoded it, upcast where need be.
	Event E
	// Metadata of the event.
	Metadata Metadata
}

// Handler is an action on the events of a type: what [Handle], [HandleNoTx] and
// [HandleBatch] return. It does not change; [OncePer] returns a changed copy.
type Handler interface {
	handler() *handler
}

// Handle makes a handler of f, for effects in PostgreSQL. What f does in tx commits
// with a row of event_handled that says that it is done, so that it is done once
// however often the event arrives. Tx is the consumer's: its Commit and Rollback return
// [ErrHandlerTx], as f does that ends it with a statement, and nothing is committed then. Begin
// sets a savepoint. If f returns nil although a statement has failed, or leaves rows open, that
// is an error of f. It must not CLOSE ALL, because a cursor of the consumer guards tx.
//
// The events that arrive together share a transaction, until handlers have taken a second in
// it: then what is done is committed. If one of them fails, it is
// rolled back, and the events in front of that one get another: f may run more often than its attempts, and
// effects outside of tx belong into [HandleNoTx]. An error is tried again as
// [HandlerConfig] says; [Permanent] marks one that no retry would change.
//
// What f sets with SET LOCAL or set_config is not seen by handlers of other events: if it does
// that in a shared transaction, this is rolled back, and from then on the events that arrive with
// those of f are handled one by one, which is slower. That holds, too, if f runs a statement by the
// name under which it was prepared elsewhere, whose text is not known here. Of what a function inside PostgreSQL sets, or
// a statement that goes through tx.Conn, only search_path, role, session_authorization,
// row_security, session_replication_role, lock_timeout, statement_timeout and TimeZone are noticed. A SET without LOCAL
// stays with the connection, which goes back to the pool.
//
// ctx carries the event's correlation id, trace id and traceparent, so that events recorded
// in f continue all of them. It ends when the handling takes longer than MaxPollInterval.
//
// The action names what is done, at most 100 characters, for example
// SALES_COUNT_INCREASED. It is part of what marks a repeat: do not rename it.
func Handle[E DomainEvent](action string, f func(ctx context.Context, tx pgx.Tx, event E, m Metadata) error) Handler {
	h := handler{action: action, goType: reflect.TypeFor[E](), kind: inTx}
	if f != nil {
		h.one = func(ctx context.Context, tx pgx.Tx, r arrival) error { return f(ctx, tx, r.event.(E), r.meta) }
	}
	return &h
}

// HandleBatch is [Handle] for handlers that aggregate: f gets the events of type E
// that arrived together in a partition and are no repeats, in their order, at most
// MaxPoll; fewer if another handler has to get an event of the same key and another type in
// between, or if handlers of [Handle] that share the transaction are slow. If it fails, it gets
// half of them, and so on, until the event that it fails for is alone.
func HandleBatch[E DomainEvent](action string, f func(ctx context.Context, tx pgx.Tx, events []Received[E]) error) Handler {
	h := handler{action: action, goType: reflect.TypeFor[E](), kind: inBatch}
	if f != nil {
		h.many = func(ctx context.Context, tx pgx.Tx, rs []arrival) error {
			events := make([]Received[E], len(rs))
			for i, r := range rs {
				events[i] = Received[E]{r.event.(E), r.meta}
			}
			return f(ctx, tx, events)
		}
	}
	return &h
}

// HandleNoTx makes a handler of f for effects that are idempotent by nature, such
// as the deletion of a cache entry: event_handled gets no row, and an event that
// arrives twice is handled twice. f runs after the transactions of the handlers that
// have one. What f did must be durable when it returns nil, because it is not called
// again. An outage of PostgreSQL is waited out for f too; one of something else that f
// needs is an error like any other, so allow enough retries for it in RetriesFor.
func HandleNoTx[E DomainEvent](action string, f func(ctx context.Context, event E, m Metadata) error) Handler {
	h := handler{action: action, goType: reflect.TypeFor[E](), kind: noTx}
	if f != nil {
		h.one = func(ctx context.Context, _ pgx.Tx, r arrival) error { return f(ctx, r.event.(E), r.meta) }
	}
	return &h
}

// OncePer returns a copy of a [Handle] or [HandleBatch] handler that says what its
// action is done once for. Without it that is the event: a repeated one is skipped.
// With it every event of the same aggregate type (at most 100 characters) and id (at
// most 255) is a repeat. Two handlers with the same action and key are repeats of one
// another, also of different event types. A nil key means the event again.
//
// E is the event type of h. [NewConsumer] rejects another one, and a handler of
// [HandleNoTx], because nothing records what that has done.
func OncePer[E DomainEvent](h Handler, key func(event E, m Metadata) (aggregateType, aggregateID string)) Handler {
	if check.IsNil(h) {
		return h // NewConsumer names it
	}
	c := *h.handler()
	c.key, c.keyType = nil, reflect.TypeFor[E]()
	if key != nil {
		c.key = func(e any, m Metadata) (string, string) { return key(e.(E), m) }
	}
	return &c
}

// RetryPolicy is how an action on an event that failed is tried again. What is zero is as in the
// configuration.
type RetryPolicy struct {
	// MaxRetries is how often it is tried again. Negative means never. Zero means what RetriesFor or
	// MaxRetries of the configuration says.
	MaxRetries int
	// RetryWait is the wait before the first retry; each further wait is twice as long.
	RetryWait time.Duration
	// MaxRetryWait bounds the wait.
	MaxRetryWait time.Duration
}

// over returns a policy with what is zero taken from another.
func (p RetryPolicy) over(base RetryPolicy) RetryPolicy {
	return RetryPolicy{
		MaxRetries: cmp.Or(p.MaxRetries, base.MaxRetries), RetryWait: cmp.Or(p.RetryWait, base.RetryWait), MaxRetryWait: cmp.Or(p.MaxRetryWait, base.MaxRetryWait),
	}
}

// wait returns the wait after an attempt, from 1, that failed with err, without its random part. It has none, and is
// exact, if the error says how long it is.
func (p RetryPolicy) wait(attempt int, err error) (d time.Duration, exact bool) {
	if d, ok := retryAfter(err); ok {
		return d, true
	}
	return wait.Exponential(p.RetryWait, max(p.RetryWait, p.MaxRetryWait), attempt-1), false
}

// next is wait with its random part: a fifth more or less.
func (p RetryPolicy) next(attempt int, err error) time.Duration {
	const jitter = 5
	const longest = math.MaxInt64 / 2 // so that a fifth more is no overflow
	d, exact := p.wait(attempt, err)
	if exact {
		return d
	}
	d = min(d, longest)
	return d - d/jitter + rand.N(2*(d/jitter)+1)
}

func (p RetryPolicy) validate() error {
	return errors.Join(check.NotNegative("RetryWait", p.RetryWait), check.NotNegative("MaxRetryWait", p.MaxRetryWait))
}

// WithRetry returns a copy of a handler whose action is tried again as the policy says, in a
// [Consumer] and in a [Worker].
func WithRetry(h Handler, policy RetryPolicy) Handler {
	if check.IsNil(h) {
		return h // NewConsumer names it
	}
	c := *h.handler()
	c.retry = policy
	return &c
}

// RetryInPlace returns a copy of a handler for a [Consumer] whose partition waits while an event is
// tried again. Without it, a consumer with a database parks the event, and goes on with other
// keys; see [ConsumerConfig]. It is for handlers that need the order of a whole partition. A [Worker]
// has no partitions, and takes no notice.
func RetryInPlace(h Handler) Handler {
	if check.IsNil(h) {
		return h // NewConsumer names it
	}
	c := *h.handler()
	c.inPlace = true
	return &c
}

// Middleware runs around the handlers of a consumer, for example to measure them, to trace
// them, or to set what each of them needs in its transaction. It calls next with ctx or a
// context derived from it, and returns what next has returned, or another error.
//
// What it returns counts as the handler's: an error is tried again and may become a dead
// letter, and nil means that the events are done. That holds also if it does not call next:
// with an error the handler has failed, and with nil the events are noted as done, so that
// they are skipped when they arrive again. A middleware that shall skip an event for good
// returns nil, one that shall have it later returns an error.
//
// It calls next at most once, and returns after next has: anything else is an error of the
// handler, and nothing is committed. A panic of what is next comes out of next as an error, a
// [*PanicError]. A panic of the middleware itself is one of the handler. HandlerTimeout
// bounds both together.
//
// Repeats are not seen by it, and neither are events that no handler gets. It is called
// again for each further attempt, and, after a batch has failed, for its parts.
type Middleware func(ctx context.Context, call HandlerCall, next func(context.Context) error) error

// HandlerCall is a call of a handler, as a [Middleware] sees it.
type HandlerCall struct {
	// Action of the handler.
	Action string
	// Events that the handler gets, of the Go type that it takes: several for a handler of
	// [HandleBatch]. They and their Metadata must not be changed.
	Events []Received[DomainEvent]
	// Tx is the transaction that the handler gets, with the same rules. It is nil for a
	// handler without one.
	Tx pgx.Tx
}

// handler is a Handler without its type parameter.
type handler struct {
	action  string
	goType  reflect.Type
	kind    handlerKind
	one     func(context.Context, pgx.Tx, arrival) error   // inTx, noTx
	many    func(context.Context, pgx.Tx, []arrival) error // inBatch
	key     func(event any, m Metadata) (aggregateType, aggregateID string)
	keyType reflect.Type // the E of OncePer; nil without
	retry   RetryPolicy
	inPlace bool
}

type handlerKind uint8

const (
	inTx handlerKind = iota
	inBatch
	noTx
)

func (h *handler) handler() *handler { return h }

// call calls the function of a handler.
func (h *handler) call(ctx context.Context, tx pgx.Tx, arrivals []arrival) error {
	if h.kind == inBatch {
		return h.many(ctx, tx, arrivals)
	}
	return h.one(ctx, tx, arrivals[0])
}

// callGuarded is call, with a panic as an error.
func (h *handler) callGuarded(ctx context.Context, tx pgx.Tx, arrivals []arrival) error {
	return guard(func() error { return h.call(ctx, tx, arrivals) })
}

// arrival is an event, decoded, of the Go type that its handler takes.
type arrival struct {
	event any
	meta  Metadata
}

// task is an action on an event.
type task struct {
	*handler
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
func handlerContext(ctx context.Context, m Metadata) context.Context {
	correlationID, traceID, traceParent := m.Extensions[eventheader.Correlation], m.Extensions[eventheader.TraceID], m.Extensions[eventheader.TraceParent]
	if correlationID == "" && traceID == "" && traceParent == "" {
		return ctx
	}
	return &eventContext{ctx, correlationID, traceID, traceParent}
}

// batchContext is [handlerContext] for a single event; several have no one trace.
func batchContext(ctx context.Context, arrivals []arrival) context.Context {
	if len(arrivals) == 1 {
		return handlerContext(ctx, arrivals[0].meta)
	}
	return ctx
}

const maxAction = 100 // characters

// check says why a handler cannot be used.
func (h *handler) check() error {
	bad := func(field string, err error) error {
		return &FieldError{EventType: h.goType.String(), Index: -1, Field: field, Err: err}
	}
	switch err := check.Text(h.action, maxAction); {
	case err != nil:
		return bad("action", err)
	case h.one == nil && h.many == nil:
		return bad("handler", fmt.Errorf("function of %s %w", h.action, ErrNilArgument))
	case h.keyType != nil && h.kind == noTx:
		return bad("OncePer", fmt.Errorf("of %s %w: nothing records what a handler of HandleNoTx has done", h.action, ErrMalformed))
	case h.retry.validate() != nil:
		return bad("WithRetry", fmt.Errorf("of %s: %w", h.action, h.retry.validate()))
	case h.keyType != nil && h.keyType != h.goType:
		return bad("OncePer", fmt.Errorf("of %s %w: its key is of %s", h.action, ErrMalformed, h.keyType))
	}
	return nil
}

// Upcaster turns events of an older version into the next. Make one with [Upcast].
type Upcaster struct {
	from, to reflect.Type
	up       func(any) any
}

// Upcast makes an upcaster of f. Handlers of To then get the events of From as
// well. Upcasters form chains: from v1 to v2, and from v2 to v3. Both types are in
// the registry.
func Upcast[From, To DomainEvent](f func(From) To) Upcaster {
	u := Upcaster{from: reflect.TypeFor[From](), to: reflect.TypeFor[To]()}
	if f != nil {
		u.up = func(e any) any { return f(e.(From)) }
	}
	return u
}

// PanicError is what a panic in a handler, a decoder or an upcaster becomes, or in the
// methods of the error that it returns.
type PanicError struct {
	// Value is what was panicked with.
	Value any
	// Stack is that of the goroutine at the panic.
	Stack []byte
}

// Error implements error, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// guard calls f and turns a panic into an error. It returns another error for one whose
// methods panic, because these are called outside of it.
func guard(f func() error) error {
	err := recovered(f)
	if err == nil {
		return nil
	}
	if panicked := recovered(func() error { contain.CallMethods(err); return nil }); panicked != nil {
		return fmt.Errorf("error of type %T, which may be a nil pointer: %w", err, panicked)
	}
	return err
}

func recovered(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// Permanent marks an error that no retry would change: the event becomes a dead letter
// at once. It returns nil for nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

func isPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// RetryAfter marks an error of a handler after which the event is tried again when d has passed,
// for example because another server asks for that. D takes the place of the wait that RetryWait
// of [HandlerConfig] says, and has no upper bound: until then the later events of its key wait, or,
// where it is tried again in place, those of its partition. A d that is not positive means at once. If an event waits in
// place, and d has not passed when the consumer stops, it is tried when it arrives again.
//
// It does not change how often the event is tried: MaxRetries, RetriesFor and [Permanent] say
// that. An error for which PostgreSQL would have the transaction repeated counts as any other
// then, and in an outage of PostgreSQL, which does not count, the event waits for d at least.
//
// It returns nil for nil. Of several in one error the outermost counts.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err, max(0, d)}
}

type retryAfterError struct {
	err  error
	wait time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// retryAfter returns the wait that an error says, if it says one.
func retryAfter(err error) (wait time.Duration, ok bool) {
	later, ok := errors.AsType[*retryAfterError](err)
	if !ok {
		return 0, false
	}
	return later.wait, true
}
