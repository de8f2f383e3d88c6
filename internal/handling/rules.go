package handling

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
)

// Rules are the configuration of a [Processor] and its attempts, with all defaults. The package outbox checks and
// documents them.
type Rules struct {
	Group, Schema     string
	Retry             RetryPolicy // of handlers and streams without a policy of their own
	HoldDead          bool
	RetryDeadAfter    map[string]time.Duration
	Breaker           BreakerRules
	HandlerTimeout    time.Duration
	SlowHandler       time.Duration
	StopTimeout       time.Duration
	DeadLetterUnknown bool    // event types without a handler become dead letters
	JSON              Codec   // for JSON without another codec
	Codecs            []Codec // in addition to those of the event types
	Middleware        []Middleware
	Hooks             Hooks
	Log               *slog.Logger // has the group as an attribute
}

// HandlerCall is a call of a handler, as middleware sees it.
type HandlerCall struct {
	Action   string
	Arrivals []Arrival
	Tx       pgx.Tx // nil for a handler without a transaction
}

// Middleware runs around the call of a handler.
type Middleware func(ctx context.Context, call HandlerCall, next func(context.Context) error) error

// Hooks are functions of the host that are called while events are handled. Each may be nil.
type Hooks struct {
	Breaker      func(action string, from, to breaker.State)
	Handled      func(m *envelope.Received, action string, took time.Duration)
	Repeated     func(m *envelope.Received, action string)
	Conflicted   func(m *envelope.Received, action string, err error)
	Failed       func(m *envelope.Received, action string, err error, retry bool)
	DeadLettered func(m *envelope.Received, action, topic string, err error)
	Unknown      func(m *envelope.Received)
	Lost         func(topic string, partition int32, records int64)
}

// guarded returns hooks that log their panics. A hook that would delay other partitions is
// abandoned if it does not return.
func (h Hooks) guarded(log *slog.Logger) Hooks {
	call := func(name string) func(func()) {
		hook := contain.NewCallback("Hooks."+name, log, contain.HookLimits)
		switch name {
		case "Handled", "Repeated": // called for every event, inside [contain.Do]
			return hook.Inline
		case "Breaker", "Lost": // called while an attempt is under way; by the Kafka client
			return func(call func()) { hook.Notify(context.Background(), call) }
		}
		return hook.Alone
	}
	if hook := h.Conflicted; hook != nil {
		notify := call("Conflicted")
		h.Conflicted = func(m *envelope.Received, action string, err error) { notify(func() { hook(m, action, err) }) }
	}
	if hook := h.Failed; hook != nil {
		notify := call("Failed")
		h.Failed = func(m *envelope.Received, action string, err error, retry bool) {
			notify(func() { hook(m, action, err, retry) })
		}
	}
	if hook := h.Unknown; hook != nil {
		notify := call("Unknown")
		h.Unknown = func(m *envelope.Received) { notify(func() { hook(m) }) }
	}
	if hook := h.Breaker; hook != nil {
		notify := call("Breaker")
		h.Breaker = func(action string, from, to breaker.State) { notify(func() { hook(action, from, to) }) }
	}
	if hook := h.Handled; hook != nil {
		notify := call("Handled")
		h.Handled = func(m *envelope.Received, action string, took time.Duration) {
			notify(func() { hook(m, action, took) })
		}
	}
	if hook := h.Repeated; hook != nil {
		notify := call("Repeated")
		h.Repeated = func(m *envelope.Received, action string) { notify(func() { hook(m, action) }) }
	}
	if hook := h.DeadLettered; hook != nil {
		notify := call("DeadLettered")
		h.DeadLettered = func(m *envelope.Received, action, topic string, err error) {
			notify(func() { hook(m, action, topic, err) })
		}
	}
	if hook := h.Lost; hook != nil {
		notify := call("Lost")
		h.Lost = func(topic string, partition int32, records int64) {
			notify(func() { hook(topic, partition, records) })
		}
	}
	return h
}

// NewProcessor returns a processor with transactions of store. Store is nil without PostgreSQL; then only handlers
// without a transaction work. [Processor.ForOne] must be called before the processor is used.
func NewProcessor(cfg Rules, routes Routes, store Transactor) *Processor {
	cfg.Hooks = cfg.Hooks.guarded(cfg.Log)
	return &Processor{
		Rules: &cfg, Routes: routes, Store: store, Log: cfg.Log, input: &inputLog{}, separate: new(sync.Map),
		retriesFor: contain.NewCallback("RetriesFor", cfg.Log, contain.HookLimits),
	}
}
