package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// HandlerConfig says how events are handled, whatever brings them.
type HandlerConfig struct {
	// Group is the consumer group, at most 255 characters. It is part of what marks
	// a repeat. Required.
	Group string

	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// MaxRetries is how often an action on an event that failed is tried again, in
	// place, before the event is given up and becomes a dead letter. What PostgreSQL
	// rolls back for a deadlock or a serialization failure is repeated with short pauses, and
	// counts after ten times. An outage is waited out and does not count: PostgreSQL gives the
	// consumer no connection, or event_handled cannot be written. Negative means never. Zero
	// means 3.
	MaxRetries int
	// RetriesFor replaces MaxRetries for an error. If it panics or ends its goroutine,
	// that is logged, and MaxRetries counts. Its partition waits while it does not return.
	// Nil means MaxRetries for all.
	RetriesFor func(error) int
	// RetryWait is the wait before the first retry. Each further wait is twice as
	// long, up to 30 s; a random part of each, up to a fifth, is left out. [RetryAfter] says
	// another one. Zero means 1 s.
	RetryWait time.Duration

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

const (
	defaultSlowHandler    = 30 * time.Second
	defaultHandlerRetries = 3
	defaultRetryWait      = time.Second
	maxHandlerWait        = 30 * time.Second
	maxGroup              = 255
	defaultMaxPoll        = 100
	maxMaxPoll            = 10_000
	defaultStopTimeout    = 5 * time.Second
)

func (c HandlerConfig) withDefaults() HandlerConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.MaxRetries = cmp.Or(c.MaxRetries, defaultHandlerRetries)
	c.RetryWait = cmp.Or(c.RetryWait, defaultRetryWait)
	c.SlowHandler = cmp.Or(c.SlowHandler, defaultSlowHandler)
	c.Logger = short.Logger(cmp.Or(c.Logger, slog.Default()))
	if c.RetriesFor == nil {
		retries := c.MaxRetries
		c.RetriesFor = func(error) int { return retries }
	}
	return c
}

// guarded returns the configuration with functions of the host whose panics are logged.
func (c HandlerConfig) guarded(log *slog.Logger) HandlerConfig {
	c.Hooks = c.Hooks.guarded(func(name string) func(func()) {
		hook := contain.NewCallback("Hooks."+name, log, contain.HookLimits)
		switch name {
		case "Handled", "Repeated": // called for every event, below [contain.Do]
			return hook.Inline
		case "Lost", "RowsRemoved": // called by what fetches for all partitions, and by the Kafka client; by what removes rows
			return func(call func()) { hook.Notify(context.Background(), call) }
		}
		return hook.Alone
	})
	retriesFor, call := c.RetriesFor, contain.NewCallback("RetriesFor", log, contain.HookLimits)
	c.RetriesFor = func(err error) int {
		retries := c.MaxRetries
		call.Alone(func() { retries = retriesFor(err) })
		return retries
	}
	return c
}

func (c HandlerConfig) validate() error {
	errs := []error{
		check.Schema(c.Schema),
		check.NotNegative("RetryWait", c.RetryWait),
		check.NotNegative("HandlerTimeout", c.HandlerTimeout),
		check.NotNegative("SlowHandler", c.SlowHandler),
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
	if err := check.Text(c.Group, maxGroup); err != nil {
		errs = append(errs, fmt.Errorf("field Group %w", err))
	}
	if c.Unknown != SkipUnknown && c.Unknown != DeadLetterUnknown {
		errs = append(errs, fmt.Errorf("field Unknown is %d: must be SkipUnknown or DeadLetterUnknown", c.Unknown))
	}
	return errors.Join(errs...)
}
