package outbox

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
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
	handler() *handling.Handler
}

// builtHandler is the only Handler that there is.
type builtHandler struct{ engine handling.Handler }

func (h *builtHandler) handler() *handling.Handler { return &h.engine }

// changed returns a copy of a handler with a change. It returns nil for nil: NewConsumer names it.
func changed(h Handler, change func(*handling.Handler)) Handler {
	if check.IsNil(h) {
		return h
	}
	c := &builtHandler{*h.handler()}
	change(&c.engine)
	return c
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
	h := handling.Handler{Action: action, GoType: reflect.TypeFor[E](), Kind: handling.InTx}
	if f != nil {
		h.One = func(ctx context.Context, tx pgx.Tx, a *handling.Arrival) error {
			return f(ctx, tx, a.Event.(E), metadataOf(&a.Meta))
		}
	}
	return &builtHandler{h}
}

// HandleBatch is [Handle] for handlers that aggregate: f gets the events of type E
// that arrived together in a partition and are no repeats, in their order, at most
// MaxPoll; fewer if another handler has to get an event of the same key and another type in
// between, or if handlers of [Handle] that share the transaction are slow. If it fails, it gets
// half of them, and so on, until the event that it fails for is alone.
func HandleBatch[E DomainEvent](action string, f func(ctx context.Context, tx pgx.Tx, events []Received[E]) error) Handler {
	h := handling.Handler{Action: action, GoType: reflect.TypeFor[E](), Kind: handling.InBatch}
	if f != nil {
		h.Many = func(ctx context.Context, tx pgx.Tx, arrivals []handling.Arrival) error {
			events := make([]Received[E], len(arrivals))
			for i := range arrivals {
				events[i] = Received[E]{arrivals[i].Event.(E), metadataOf(&arrivals[i].Meta)}
			}
			return f(ctx, tx, events)
		}
	}
	return &builtHandler{h}
}

// HandleNoTx makes a handler of f for effects that are idempotent by nature, such
// as the deletion of a cache entry: event_handled gets no row, and an event that
// arrives twice is handled twice. f runs after the transactions of the handlers that
// have one. What f did must be durable when it returns nil, because it is not called
// again. An outage of PostgreSQL is waited out for f too; one of something else that f
// needs is an error like any other, so allow enough retries for it in RetriesFor.
func HandleNoTx[E DomainEvent](action string, f func(ctx context.Context, event E, m Metadata) error) Handler {
	h := handling.Handler{Action: action, GoType: reflect.TypeFor[E](), Kind: handling.NoTx}
	if f != nil {
		h.One = func(ctx context.Context, _ pgx.Tx, a *handling.Arrival) error {
			return f(ctx, a.Event.(E), metadataOf(&a.Meta))
		}
	}
	return &builtHandler{h}
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
	return changed(h, func(own *handling.Handler) {
		own.Key, own.KeyType = nil, reflect.TypeFor[E]()
		if key != nil {
			own.Key = func(e any, m *envelope.Received) (string, string) { return key(e.(E), metadataOf(m)) }
		}
	})
}

// RetryPolicy says how an action that failed on an event is retried. A field of [WithRetry] or
// [WorkerConfig].Streams that is zero is as in [HandlerConfig].Retry.
type RetryPolicy struct {
	// MaxRetries is how often an action is retried after its first attempt. Negative means never. Zero
	// means 3.
	MaxRetries int
	// RetriesFor replaces MaxRetries for an error. If it panics or ends its goroutine, that is logged, and
	// MaxRetries counts. The partition waits until RetriesFor returns. A policy that sets MaxRetries does not
	// use the RetriesFor of the configuration. Nil means MaxRetries for all errors.
	RetriesFor func(error) int
	// RetryWait is the wait before the first retry. Each further wait is twice as long, up to MaxRetryWait;
	// up to a fifth of each wait is added or left out at random. [RetryAfter] says another wait. Zero means
	// 1 s.
	RetryWait time.Duration
	// MaxRetryWait bounds the wait before a retry. Zero means 60 s.
	MaxRetryWait time.Duration
}

// WithRetry returns a copy of a handler whose action is tried again as the policy says, in a
// [Consumer] and in a [Worker].
func WithRetry(h Handler, policy RetryPolicy) Handler {
	return changed(h, func(own *handling.Handler) { own.Retry = handling.RetryPolicy(policy) })
}

// RetryInPlace returns a copy of a handler for a [Consumer] whose partition waits while an event is
// tried again. Without it, a consumer with a database parks the event, and goes on with other
// keys; see [ConsumerConfig]. It is for handlers that need the order of a whole partition. A [Worker]
// has no partitions, and takes no notice.
func RetryInPlace(h Handler) Handler {
	return changed(h, func(own *handling.Handler) { own.InPlace = true })
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

// engineMiddlewares returns middleware as the engine calls it.
func engineMiddlewares(all []Middleware) []handling.Middleware {
	var middlewares []handling.Middleware
	for _, m := range all {
		middlewares = append(middlewares, func(ctx context.Context, call handling.HandlerCall, next func(context.Context) error) error {
			about := HandlerCall{Action: call.Action, Events: make([]Received[DomainEvent], len(call.Arrivals)), Tx: call.Tx}
			for i := range call.Arrivals {
				a := &call.Arrivals[i]
				about.Events[i] = Received[DomainEvent]{a.Event.(DomainEvent), metadataOf(&a.Meta)}
			}
			return m(ctx, about, next)
		})
	}
	return middlewares
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

// Permanent marks an error that no retry would change: the event becomes a dead letter
// at once. It returns nil for nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return handling.Permanent(err)
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
	return handling.RetryAfter(err, d)
}
