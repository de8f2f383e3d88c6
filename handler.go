package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// HandlerConfig has the settings that a [Consumer] and a [Worker] share.
type HandlerConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// From is where a group begins in a topic that it reads for the first time. FromStart is the oldest record of the
	// topic (worker: the oldest row of outbox). FromEnd is the end of the topic (worker: the first start of the group).
	// A consumer reads topics and partitions that are created later from their beginning. A consumer without a database
	// requires From. Danger: it applies From to every partition without an offset of the group, also after offsets have
	// expired; FromEnd then skips records. Zero means FromEnd.
	From Start

	// MaxPoll is the most events that one transaction handles, at most 10,000; for a consumer, of one partition.
	// With slow handlers, a transaction gets fewer, so that it takes about a second. Zero means 100.
	MaxPoll int

	// Concurrency is how many handlers run at the same time. A worker (at most 1,000) counts handlers with and without
	// a transaction separately. Handlers with a transaction, of all workers and consumers together, use at most three
	// quarters of a pool. Zero means 4 for a worker and no bound besides the pool for a consumer.
	Concurrency int

	// Retry says how an action that failed on an event is retried. Later events of the topic and key wait for it. After
	// the last retry the event is DEAD in event_delivery, and a consumer sends a dead letter. Without a database, a
	// consumer blocks the partition instead. [WithRetry] sets the policy of one handler. docs/retries.md says which
	// outages use up no attempt. Zero means MaxRetries 3, RetryWait 1 s, MaxRetryWait 60 s and MaxOutage 24 h.
	Retry RetryPolicy

	// HoldDead keeps the later events of a key behind a DEAD event until it is resolved or handled. It needs a
	// database. False means that they continue.
	HoldDead bool

	// RetryDeadAfter maps classes of the last error (event_delivery.last_error_code), such as timeout, to delays. After
	// the delay, a DEAD delivery has all attempts again. Without HoldDead, held deliveries stay DEAD, even if HoldDead
	// held them. It needs a database. Nil means that operators decide.
	RetryDeadAfter map[string]time.Duration

	// HandlerTimeout is how long a handler (of [HandleBatch]: with all of its events) or a codec may run before its
	// context ends. If it then returns an error, the attempt has failed. A consumer allows at most half of
	// MaxPollInterval. Zero means 150 s (half of MaxPollInterval, if that is set).
	HandlerTimeout time.Duration

	// SlowHandler is how long a handler, hook, codec or other callback, or a BEGIN or COMMIT, may take before
	// a WARN names it. Zero means 30 s.
	SlowHandler time.Duration

	// StopTimeout is how long Run may outlive its context. Handlers have three fifths of it to finish. Zero means 5 s.
	StopTimeout time.Duration

	// Topics are read in addition to those of the event types with handlers: for events with another topic ([With]), or
	// of other producers. Nil means none.
	Topics []string

	// Unknown says what happens to event types without a handler: [SkipUnknown] or [DeadLetterUnknown]. Zero means
	// [SkipUnknown].
	Unknown UnknownTypes

	// Codecs decode payloads of other content types than the registered one.
	Codecs []Codec

	// Upcasters turn events of older versions into those that handlers take.
	Upcasters []Upcaster

	// Middleware runs around each call of a handler, the first outermost.
	Middleware []Middleware

	// Alerts says which alerts are sent, and to whom: about dead and stale deliveries, and records that Kafka has
	// removed unread. It needs a database. docs/watch.md says by which process.
	Alerts AlertConfig

	// Hooks are called when events are handled, repeated, failed or dead.
	Hooks ConsumerHooks

	// Logger receives WARN for outages, retries and dead letters. Nil means slog.Default().
	Logger *slog.Logger
}

// UnknownTypes says what happens to events of a type without a handler.
type UnknownTypes int

const (
	// SkipUnknown passes over them. It is the default, because topics are shared.
	SkipUnknown UnknownTypes = iota
	// DeadLetterUnknown sends them to the dead-letter topic.
	DeadLetterUnknown
)

// Start says where a new consumer group begins. A group that has a position goes on from it.
type Start int

const (
	// StartDefault is FromEnd for a group that has a database. A [Consumer] without one refuses it.
	StartDefault Start = iota
	// FromStart begins with the oldest event that there is.
	FromStart
	// FromEnd begins with the first event after the first start of the group.
	FromEnd
)

func (s Start) validate() error {
	if s < StartDefault || s > FromEnd {
		return fmt.Errorf("field From is %d: must be FromStart or FromEnd", s)
	}
	return nil
}

const (
	defaultSlowHandler    = 30 * time.Second
	defaultHandlerRetries = 3
	defaultRetryWait      = time.Second
	defaultMaxRetryWait   = time.Minute
	defaultMaxOutage      = 24 * time.Hour
	maxGroup              = 255
	defaultMaxPoll        = 100
	maxMaxPoll            = 10_000
	defaultStopTimeout    = 5 * time.Second
)

func (c HandlerConfig) withDefaults() HandlerConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.Retry.MaxRetries = cmp.Or(c.Retry.MaxRetries, defaultHandlerRetries)
	c.Retry.RetryWait = cmp.Or(c.Retry.RetryWait, defaultRetryWait)
	c.Retry.MaxRetryWait = cmp.Or(c.Retry.MaxRetryWait, defaultMaxRetryWait)
	c.Retry.MaxOutage = cmp.Or(c.Retry.MaxOutage, defaultMaxOutage)
	c.MaxPoll = cmp.Or(c.MaxPoll, defaultMaxPoll)
	c.SlowHandler = cmp.Or(c.SlowHandler, defaultSlowHandler)
	c.StopTimeout = cmp.Or(c.StopTimeout, defaultStopTimeout)
	c.Logger = short.Logger(cmp.Or(c.Logger, slog.Default()))
	return c
}

// rules returns the configuration as the engine takes it.
func (c HandlerConfig) rules(group string) handling.Rules {
	codecs := make([]handling.Codec, len(c.Codecs))
	for i, codec := range c.Codecs {
		codecs[i] = codec.engine()
	}
	return handling.Rules{
		Group: group, Schema: c.Schema, Retry: handling.RetryPolicy(c.Retry), HoldDead: c.HoldDead, RetryDeadAfter: c.RetryDeadAfter,
		Breaker: handling.BreakerOf(handling.RetryPolicy(c.Retry)), HandlerTimeout: c.HandlerTimeout, SlowHandler: c.SlowHandler, StopTimeout: c.StopTimeout,
		DeadLetterUnknown: c.Unknown == DeadLetterUnknown, JSON: JSON().engine(), Codecs: codecs,
		Middleware: engineMiddlewares(c.Middleware), Hooks: c.Hooks.engine(), Log: c.Logger.With("group", group),
	}
}

// Routes returns which events the handlers get. Its error names every bad handler and upcaster.
func (c HandlerConfig) routes(events *Registry, handlers []Handler) (handling.Routes, error) {
	of := handling.Sources{Topics: c.Topics}
	for _, def := range events.byName {
		of.Kinds = append(of.Kinds, handling.EventType{Name: def.eventType, Topic: def.destination(), GoType: def.goType, Codec: def.codec.engine()})
	}
	for _, u := range c.Upcasters {
		of.Upcasters = append(of.Upcasters, handling.Upcaster{From: u.from, To: u.to, Up: u.up})
	}
	for _, h := range handlers {
		if check.IsNil(h) {
			of.Handlers = append(of.Handlers, nil)
		} else {
			of.Handlers = append(of.Handlers, h.handler())
		}
	}
	return handling.NewRoutes(of)
}

func (c Codec) engine() handling.Codec {
	return handling.Codec{ContentType: c.ContentType, Decode: c.Decode}
}

// checkGroup returns an error if no consumer group can have this name.
func checkGroup(group string) error {
	if err := check.Text(group, maxGroup); err != nil {
		return fmt.Errorf("group %w", err)
	}
	if strings.HasPrefix(group, handling.InboxPrefix) {
		return fmt.Errorf("group %w: %s begins the names of inboxes", ErrMalformed, handling.InboxPrefix)
	}
	return nil
}

func (c HandlerConfig) validate() error {
	errs := []error{
		check.Schema(c.Schema),
		handling.RetryPolicy(c.Retry).Validate(),
		c.From.validate(),
		check.NotNegative("MaxPoll", c.MaxPoll),
		check.NotAbove("MaxPoll", c.MaxPoll, maxMaxPoll),
		check.NotNegative("Concurrency", c.Concurrency),
		check.NotNegative("HandlerTimeout", c.HandlerTimeout),
		check.NotNegative("SlowHandler", c.SlowHandler),
		check.NotNegative("StopTimeout", c.StopTimeout),
		c.Alerts.settings().Validate(),
		check.EachPositive("RetryDeadAfter", c.RetryDeadAfter),
	}
	for _, codec := range c.Codecs {
		if err := codec.check(); err != nil {
			errs = append(errs, fmt.Errorf("field Codecs: content type %w", err))
		}
	}
	for i, m := range c.Middleware {
		if m == nil {
			errs = append(errs, fmt.Errorf("field Middleware: number %d %w", i, ErrNilArgument))
		}
	}
	for _, topic := range c.Topics {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("field Topics: topic %.300q %w", topic, err))
		}
	}
	if c.Unknown != SkipUnknown && c.Unknown != DeadLetterUnknown {
		errs = append(errs, fmt.Errorf("field Unknown is %d: must be SkipUnknown or DeadLetterUnknown", c.Unknown))
	}
	return errors.Join(errs...)
}

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
// it: then what is done is committed. If f fails before it has used tx, the others go on. If it fails later, the
// transaction is rolled back, and the events in front get another one: f may run more often than its attempts, and
// effects outside of tx belong into [HandleNoTx]. Tx cannot be used when f has returned. An error is tried again as
// [HandlerConfig] says; [Permanent] marks one that no retry would change.
//
// What f sets with SET LOCAL or set_config is not seen by handlers of other events: if it does that in a shared
// transaction, this is rolled back, and from then on the events that arrive with those of f are handled one by one,
// which is slower. That holds, too, if f runs a statement by the name under which it was prepared elsewhere, whose
// text is not known here. Of what a function inside PostgreSQL sets, or a statement that goes through tx.Conn, only
// search_path, role, session_authorization, row_security, session_replication_role, lock_timeout, statement_timeout
// and TimeZone are noticed. A SET without LOCAL, and an advisory lock of the session, end with the transaction: RESET
// ALL follows it. Of what AfterConnect of the pool has SET, only application_name, TimeZone, DateStyle,
// client_encoding, search_path and role stay. Use RuntimeParams or ALTER ROLE for other settings.
//
// ctx carries the event's correlation id, trace id and traceparent, so that events recorded
// in f continue all of them. It ends after HandlerTimeout of [HandlerConfig].
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

// RetryPolicy says how an action that failed on an event is retried. In [WithRetry] and [WorkerConfig].Streams, a
// zero field has its value from [HandlerConfig].Retry.
type RetryPolicy struct {
	// MaxRetries is how often an action is retried after its first attempt. Negative means never. Zero means 3.
	MaxRetries int
	// RetriesFor replaces MaxRetries for an error. It must return quickly; if it panics, MaxRetries counts. A policy of
	// [WithRetry] or Streams with MaxRetries but without RetriesFor ignores HandlerConfig.Retry.RetriesFor. Nil means
	// MaxRetries for all errors.
	RetriesFor func(error) int `json:"-"`
	// RetryWait is the wait before the first retry. Further waits double, up to MaxRetryWait, and vary by a fifth at
	// random. [RetryAfter] sets another wait. Zero means 1 s.
	RetryWait time.Duration
	// MaxRetryWait bounds the wait before a retry. Zero means 60 s.
	MaxRetryWait time.Duration
	// MaxOutage is how long after an event's first failure its failures use up no attempt while a service that handlers
	// need has an outage. docs/retries.md says which failures do not count. Negative means that each failure counts.
	// Zero means 24 h.
	MaxOutage time.Duration
}

// WithRetry returns a copy of a handler whose action is tried again as the policy says, in a
// [Consumer] and in a [Worker].
func WithRetry(h Handler, policy RetryPolicy) Handler {
	return changed(h, func(own *handling.Handler) { own.Retry = handling.RetryPolicy(policy) })
}

// RetryInPlace returns a copy of a handler for a [Consumer] whose partition waits while an event is
// tried again. Without it, a consumer with a database parks the event, and goes on with other
// keys; see [HandlerConfig]. It is for handlers that need the order of a whole partition. A [Worker]
// has no partitions, and takes no notice.
//
// The partition also waits while failures do not count, because no other event of the action succeeds, for as long as
// MaxOutage of its [RetryPolicy] says.
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

// Types returns the Go types of the older and of the newer version, for tools and tests.
func (u Upcaster) Types() (from, to reflect.Type) { return u.from, u.to }
