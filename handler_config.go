package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/breaker"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// HandlerConfig says how events are handled, whatever brings them.
type HandlerConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// Retry is how an action on an event that failed is tried again. Meanwhile the later
	// events of its topic and key wait for this action, and everything else goes on; a [Consumer] without a
	// database has no place to park it, so its partition waits, see also [RetryInPlace]. When the retries are
	// used up, the event is given up: it becomes DEAD in event_delivery, where operators see it, and
	// a consumer sends a dead letter. What PostgreSQL
	// rolls back for a deadlock or a serialization failure is repeated with short pauses, and
	// counts after ten times. An outage is waited out and does not count: PostgreSQL gives the
	// consumer no connection, or event_handled cannot be written. [WithRetry] says another
	// policy for a handler. Zero means MaxRetries 3, RetryWait 1 s and MaxRetryWait 60 s.
	Retry RetryPolicy

	// HoldDead keeps the events behind a DEAD one waiting until an operator has resolved it, or it
	// was handled after all. Without it they go on. It needs a database.
	HoldDead bool

	// RetryDeadAfter lets DEAD deliveries be tried again without an operator. Its keys are kinds of errors, as in
	// event_delivery.last_error_code: timeout for example. So long after the death of a delivery whose last error was of the kind, it
	// has all its attempts again. What an operator has resolved stays so. It needs a database. Nil means that operators decide.
	RetryDeadAfter map[string]time.Duration

	// Breaker says when the breaker of an action opens, in this process: its outcomes are first attempts on events, without
	// those that end with a [Permanent] error. While it is open, the events of the action wait, and so do the other actions of
	// a consumer on the events behind them; then one is tried after the other until Trials of them are handled. The
	// breaker keeps an outage of something that a handler needs from parking, or giving up, all that arrives. A
	// consumer without a database has none. Zero means Window 20, FailureRate 0.5, OpenFor 30 s and Trials 1.
	Breaker BreakerConfig

	// HandlerTimeout is when the context of a handler ends. An error that it returns then
	// counts as any other. A handler of [HandleBatch] has as long for all of its events,
	// and a codec for one. At most half of MaxPollInterval. Zero means 150 s (half of
	// MaxPollInterval, where that is set).
	HandlerTimeout time.Duration

	// SlowHandler is how long a handler may run before a WARN names it and its event, and
	// another one each time that it has run for twice as long. It holds also for hooks,
	// RetriesFor, decoders, codecs, upcasters and keys of [OncePer], and for how long a
	// transaction may take to begin. Zero means 30 s.
	SlowHandler time.Duration

	// Topics are read beside the topics of the event types that have handlers: events that
	// were recorded with a topic of their own, see [With], are there, or those of other
	// producers. Their events of any of these types reach the handlers. Nil means none.
	Topics []string

	// Unknown says what happens to event types without a handler. Zero means
	// [SkipUnknown].
	Unknown UnknownTypes

	// Codecs decode payloads of content types other than the one that their event
	// type was registered with. JSON is always understood.
	Codecs []Codec

	// Upcasters let handlers of newer versions get the events of older ones.
	Upcasters []Upcaster

	// Middleware runs around each call of a handler, the first outermost. Without any, a
	// call costs nothing more.
	Middleware []Middleware

	// Hooks are called when events are handled, repeated or given up.
	Hooks ConsumerHooks

	// Logger receives what changes: WARN for outages that begin or end, retries and
	// dead letters, INFO for what is waited for before anything is handled, and DEBUG for
	// the rest. Nil means slog.Default().
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
	defaultActionWindow   = 20
	defaultActionTrials   = 1
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
	c.SlowHandler = cmp.Or(c.SlowHandler, defaultSlowHandler)
	c.Breaker.Window = cmp.Or(c.Breaker.Window, defaultActionWindow)
	c.Breaker.Trials = cmp.Or(c.Breaker.Trials, defaultActionTrials)
	c.Breaker = c.Breaker.withDefaults()
	c.Logger = short.Logger(cmp.Or(c.Logger, slog.Default()))
	return c
}

// rules returns the configuration as the engine takes it.
func (c HandlerConfig) rules(group string, stopTimeout time.Duration) handling.Rules {
	codecs := make([]handling.Codec, len(c.Codecs))
	for i, codec := range c.Codecs {
		codecs[i] = codec.engine()
	}
	return handling.Rules{
		Group: group, Schema: c.Schema, Retry: handling.RetryPolicy(c.Retry), HoldDead: c.HoldDead, RetryDeadAfter: c.RetryDeadAfter,
		Breaker: breaker.Rules(c.Breaker), HandlerTimeout: c.HandlerTimeout, SlowHandler: c.SlowHandler, StopTimeout: stopTimeout,
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
	return nil
}

func (c HandlerConfig) validate() error {
	errs := []error{
		check.Schema(c.Schema),
		handling.RetryPolicy(c.Retry).Validate(),
		check.NotNegative("HandlerTimeout", c.HandlerTimeout),
		check.NotNegative("SlowHandler", c.SlowHandler),
		c.Breaker.validate(),
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
