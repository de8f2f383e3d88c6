// Package worker passes the recorded events of a database to handlers, without Kafka.
//
// It needs PostgreSQL only: the tables of outbox, a pool of connections, and the rules and routes of the
// handlers. Each [Worker] belongs to a group. The workers of a group share its events.
//
// Each pending call of a handler is a row of event_delivery: one row for each group, action and event
// (package delivery). A group has a cursor, as a relay has (package cursor), but no leader. A worker with
// free handlers runs a round of fan-out:
//
//  1. It takes the advisory lock of the group.
//  2. In a later statement it reads the events behind the cursor, as many as its lanes can take.
//  3. In the same transaction it inserts their deliveries, claims the deliveries whose key is free, and
//     moves the cursor.
//
// The parts are:
//
//   - fanOut is the cursor of the group and the rounds. Its doc says why the lock comes first.
//   - admission decides how many events a round reads, and which deliveries each event needs.
//   - groupRoutes are the handlers of all workers of the group, so that old and new releases can run
//     together.
//   - [delivery.Run] claims, runs and ends the deliveries, in lanes.
//
// The package promises:
//
//   - Each committed event enters event_delivery once for each action that handles it. No event is skipped.
//   - A backlog stays in the table outbox. Most deliveries are written twice: when they are inserted and
//     when they end.
//   - Deliveries of a key run in the order of their events, unless [Rules.Unordered] is set.
//   - Run returns at most StopTimeout after its context has ended.
package worker

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Rules are the configuration of a worker, with all defaults. The package outbox checks and documents them.
type Rules struct {
	Handling     handling.Rules
	Streams      map[string]handling.RetryPolicy // by topic
	FromStart    bool                            // a new group starts with the events that exist already
	Unordered    bool                            // events of the same key have no order
	Concurrency  int                             // lanes of each kind of handlers
	MaxPoll      int                             // deliveries that a lane takes at once
	PollInterval time.Duration
	Lease        time.Duration
	Retention    retention.Rules
	RowsRemoved  func(retention.Result) // a hook, or nil
}

// Worker passes the events of a database to handlers. Its methods may be called by any goroutine.
type Worker struct {
	cfg       *Rules
	delivery  *delivery.Rules
	db        *pgxpool.Pool
	processor *handling.Processor
	notes     *handling.Notes
	slots     *handling.Slots
	breakers  *handling.ActionBreakers
	pauses    *pauses.Set
	operators *pauses.Store
	outages   *outage.Logs
	moves     atomic.Pointer[outage.Log] // nil while this process does not move delayed events
	wake      chan struct{}              // signalled when this process has recorded events
	heard     chan struct{}              // signalled when another process has recorded events
	hub       *wakeup.Hub
	archive   *contain.Callback     // calls the archive of retention
	alert     func(context.Context) // sends alerts until its context ends

	running atomic.Bool
	current atomic.Pointer[run] // nil while Run does not run; for Health and Resume
	state   handling.RunState
}

// New returns a worker for the handlers in routes. Alert sends the alerts of the group until its context
// ends. New does no I/O and starts no goroutine.
func New(db *pgxpool.Pool, rules Rules, routes handling.Routes, hub *wakeup.Hub, alert func(context.Context)) *Worker {
	schema, group, log := rules.Handling.Schema, rules.Handling.Group, rules.Handling.Log
	notes := handling.NewNotes(db, schema, group)
	notes.Limits = handling.LimitsOf(rules.Handling.HandlerTimeout)
	processor := handling.NewProcessor(rules.Handling, routes, notes)
	if hook := rules.RowsRemoved; hook != nil {
		call := contain.NewCallback("Hooks.RowsRemoved", log, contain.HookLimits)
		rules.RowsRemoved = func(r retention.Result) { call.Notify(context.Background(), func() { hook(r) }) }
	}
	return &Worker{
		cfg: &rules,
		delivery: &delivery.Rules{
			Rules: processor.Rules, Streams: rules.Streams, Concurrency: rules.Concurrency, MaxPoll: rules.MaxPoll,
			PollInterval: rules.PollInterval, Lease: rules.Lease,
			// A call that is given up goes on in its lane, without its slots.
			Spare: [2]int{rules.Concurrency, rules.Concurrency}, SpareAfter: rules.Handling.HandlerTimeout + handling.StuckGrace,
		},
		db:        db,
		processor: processor,
		notes:     notes,
		slots:     handling.SlotsOf(db),
		breakers:  handling.NewActionBreakers(processor.Rules, routes, rules.Concurrency),
		pauses:    pauses.NewSet(),
		operators: pauses.NewStore(db, schema, group),
		outages:   outage.NewLogs(log),
		wake:      make(chan struct{}, 1),
		heard:     make(chan struct{}, 1),
		hub:       hub,
		archive:   contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: retention.ArchiveGrace}),
		alert:     alert,
	}
}

// Group returns the name of the group.
func (w *Worker) Group() string { return w.processor.Rules.Group }

// Topics returns the topics whose events the worker handles, sorted.
func (w *Worker) Topics() []string { return slices.Clone(w.processor.Routes.Topics) }

// Run handles events until ctx is cancelled, and returns nil then. It returns [check.ErrRunning] if the
// worker runs already, and an error if the tables of outbox do not exist. Outages of PostgreSQL are
// retried.
func (w *Worker) Run(ctx context.Context) error {
	if !w.running.CompareAndSwap(false, true) {
		return check.ErrRunning
	}
	defer w.running.Store(false)
	w.state.Begin()
	err := w.runOnce(ctx)
	w.state.End(err)
	return err
}

func (w *Worker) runOnce(ctx context.Context) error {
	r := newRun(w)
	if err := r.prepare(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	w.current.Store(r)
	defer w.current.Store(nil)
	return r.run(ctx)
}

// Actions returns the actions of the handlers that get events of a type, sorted.
func (w *Worker) Actions(eventType string) []string { return w.processor.Actions(eventType) }

// RetryWait returns how long a worker waits after a failed attempt, without the random part of a wait, and whether
// later events of the key wait for the delivery.
func (w *Worker) RetryWait(
	eventType, action string, attempt int, err error,
) (wait time.Duration, again, blocks bool) {
	route := w.processor.Routes.ByName[eventType]
	if route == nil {
		return 0, false, false
	}
	for h := range route.Handlers() {
		if h.Action != action {
			continue
		}
		policy := h.Retry.Over(w.delivery.Of(route.Kind.Topic))
		if handling.IsPermanent(err) || attempt > w.processor.Retries(policy, err, func(f func()) { f() }) {
			return 0, false, w.delivery.HoldDead && !w.cfg.Unordered
		}
		wait, _ = policy.Wait(attempt, err)
		return wait, true, !w.cfg.Unordered
	}
	return 0, false, false
}
