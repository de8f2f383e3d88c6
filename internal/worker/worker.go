package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Rules are the configuration of a worker.
type Rules struct {
	Handling     handling.Rules
	Streams      map[string]handling.RetryPolicy
	FromStart    bool
	Unordered    bool
	Concurrency  int
	MaxPoll      int
	PollInterval time.Duration
	Lease        time.Duration
	Retention    retention.Rules
	RowsRemoved  func(retention.Result) // nil: nobody asks
}

// Worker passes the events of a database to handlers.
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
	wake      chan struct{} // this process has recorded events
	heard     chan struct{} // others have
	hub       *wakeup.Hub
	archive   *contain.Callback     // of retention
	alert     func(context.Context) // sends alerts until its context ends

	running atomic.Bool
	current atomic.Pointer[workerRun] // nil while it does not run
	state   handling.RunState
}

// New returns a worker of the handlers in routes. Alert sends the alerts of its group until its context ends.
func New(db *pgxpool.Pool, rules Rules, routes handling.Routes, hub *wakeup.Hub, alert func(context.Context)) *Worker {
	schema, group, log := rules.Handling.Schema, rules.Handling.Group, rules.Handling.Log
	notes := handling.NewNotes(db, schema, group)
	processor := handling.NewProcessor(rules.Handling, routes, notes)
	if hook := rules.RowsRemoved; hook != nil {
		call := contain.NewCallback("Hooks.RowsRemoved", log, contain.HookLimits)
		rules.RowsRemoved = func(r retention.Result) { call.Notify(context.Background(), func() { hook(r) }) }
	}
	return &Worker{
		cfg: &rules, db: db, processor: processor, notes: notes, breakers: handling.NewActionBreakers(processor.Rules, routes), hub: hub, alert: alert,
		delivery: &delivery.Rules{
			Rules: processor.Rules, Streams: rules.Streams, Concurrency: rules.Concurrency, MaxPoll: rules.MaxPoll, PollInterval: rules.PollInterval, Lease: rules.Lease,
		},
		slots: handling.SlotsOf(db), pauses: pauses.NewSet(), operators: pauses.NewStore(db, schema, group), outages: outage.NewLogs(log),
		wake: make(chan struct{}, 1), heard: make(chan struct{}, 1), archive: contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: retention.ArchiveGrace}),
	}
}

func (w *Worker) Group() string { return w.processor.Rules.Group }

// Topics returns the topics whose events the worker handles, sorted.
func (w *Worker) Topics() []string { return slices.Clone(w.processor.Routes.Topics) }

// Run handles events until ctx is cancelled.
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
	run := newWorkerRun(w)
	if err := run.prepare(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	w.current.Store(run)
	defer w.current.Store(nil)
	return run.run(ctx)
}

// workerRun is a worker that runs.
type workerRun struct {
	*Worker
	*delivery.Run
	intake *intake
	lease  *lease.GroupLease
}

func newWorkerRun(w *Worker) *workerRun {
	r := &workerRun{Worker: w, lease: lease.NewGroupLease(w.db, w.processor.Rules.Schema, tables.WorkerPrefix+w.Group(), w.cfg.Lease)}
	r.Run = delivery.NewRun(delivery.Parts{
		Rules: w.delivery, Db: w.db, Processor: w.processor, Slots: handling.CallSlots{Transactions: w.slots}, Breakers: w.breakers, Pauses: w.pauses, Outages: w.outages, Wake: w.wake, Heard: w.heard,
		Read: delivery.ReadOutboxDelivery, Pairs: delivery.PairsOf(w.processor.Routes, true),
	})
	r.intake = &intake{
		cfg: w.cfg, delivery: w.delivery, dispatcher: r.Dispatcher, processor: w.processor, log: w.processor.Log, lease: r.lease, hooks: r.Hooks, starting: true,
	}
	r.intake.fanOut = newFanOut(w.db, w.processor.Rules.Schema, w.Group(), routesOf(w.processor.Routes), r.Store, r.intake.plan)
	r.Dispatcher.TakeNew = r.intake.takeNew
	r.Confirm = r.intake.fanOut.confirm
	return r
}

// prepare waits for PostgreSQL, checks that the tables are as this release needs them, and reads what
// is paused, before anything is handled.
func (r *workerRun) prepare(ctx context.Context) error {
	return r.Run.Prepare(ctx, func(ctx context.Context) error {
		return errors.Join(r.notes.Check(ctx), r.readPauses(ctx))
	})
}

// run works until ctx is cancelled.
func (r *workerRun) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.state.Stop)()
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	member := r.hub.Join(r.wake, r.heard, r.processor.Log)
	defer member.Close()
	beside.Go(func() { r.listen(background, member) })
	beside.Go(func() { r.watchPauses(background) })
	beside.Go(func() { newWorkerRole(r.Worker, r.lease, r.intake.hasBacklog, r.Cut).Run(r.Stopping) })
	err := r.Run.Run(ctx)
	end()
	beside.Wait()
	return err
}

// Actions returns the actions of the handlers that get events of a type, sorted.
func (w *Worker) Actions(eventType string) (actions []string) {
	if route := w.processor.Routes.ByName[eventType]; route != nil {
		for h := range route.Handlers() {
			actions = append(actions, h.Action)
		}
	}
	slices.Sort(actions)
	return slices.Compact(actions)
}

// Deliver makes an attempt of an action on an event of outbox, within tx.
func (w *Worker) Deliver(ctx context.Context, tx pgx.Tx, outboxID int64, action string, attempt int) (repeated bool, err error) {
	d, err := w.readRecorded(ctx, tx, outboxID)
	if err != nil {
		return false, fmt.Errorf("outbox: deliver event %d: %w", outboxID, err)
	}
	own := w.processor.ForOne(new(handling.Activity))
	own.Store = &storeWithin{w.notes, tx}
	rules := *own.Rules
	rules.Hooks.Handled = nil
	rules.Hooks.Repeated = func(*envelope.Received, string) { repeated = true }
	own.Rules = &rules
	d.Attempt = attempt
	it := handling.Item{Meta: delivery.ReceivedOf(&d, new(envelope.Origin))}
	m, err := delivery.ReadOutboxEvent(&d, &it.Meta)
	if err != nil {
		return false, err
	}
	if own.Resolve(ctx, &it, m, action); it.Err != nil {
		return false, it.Err
	}
	for t := range it.InOrder() {
		if err := own.ProcessOne(ctx, t); err != nil {
			return false, err
		}
	}
	return repeated, nil
}

// RetryWait returns how long a worker waits after a failed attempt, without the random part of a wait.
func (w *Worker) RetryWait(eventType, action string, attempt int, err error) (wait time.Duration, again bool) {
	route := w.processor.Routes.ByName[eventType]
	if route == nil {
		return 0, false
	}
	for h := range route.Handlers() {
		if h.Action != action {
			continue
		}
		policy := h.Retry.Over(w.delivery.Of(route.Kind.Topic))
		if handling.IsPermanent(err) || attempt > w.processor.Retries(policy, err, func(f func()) { f() }) {
			return 0, false
		}
		wait, _ = policy.Wait(attempt, err)
		return wait, true
	}
	return 0, false
}

// sqlDeliverRecorded reads an event as a row of event_delivery would have it.
const sqlDeliverRecorded = `
SELECT coalesce(topic, ''), event_id::text, event_type, source, aggregate_type, aggregate_id, coalesce(convert_to(payload::text, 'UTF8'), payload_bytes),
       content_type, coalesce(partition_key, ''), convert_to(headers::text, 'UTF8'), occurred_at, created_at
  FROM {schema}.outbox WHERE id = $1`

func (w *Worker) readRecorded(ctx context.Context, tx pgx.Tx, id int64) (d delivery.Delivery, err error) {
	err = tx.QueryRow(ctx, pg.InSchema(sqlDeliverRecorded, w.processor.Rules.Schema), id).Scan(&d.Stream, &d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID, &d.Payload,
		&d.ContentType, &d.PartitionKey, &d.Headers, pg.Instant{At: &d.OccurredAt}, pg.Instant{At: &d.RecordedAt})
	if err == nil {
		d.Stream, err = eventHead{eventType: d.Type, topic: d.Stream}.destination()
	}
	return d, err
}

// storeWithin notes what is handled in a transaction of the caller.
type storeWithin struct {
	*handling.Notes
	tx pgx.Tx
}

// InTx implements transactor, with a savepoint.
func (s *storeWithin) InTx(ctx context.Context, _ *handling.Activity, keys []handling.NoteKey, _ bool, f func(handling.Tx, map[handling.NoteKey]bool) error) error {
	part, err := s.tx.Begin(ctx)
	if err != nil {
		return &handling.NoteError{Err: err}
	}
	defer func() { _ = part.Rollback(ctx) }() // nothing, once it is committed; f may end its goroutine
	fresh, err := s.KeysOf(ctx, part, s.Mark, keys)
	if err == nil {
		err = s.MarkOthers(ctx, part, keys, fresh)
	}
	if err != nil {
		return &handling.NoteError{Err: fmt.Errorf("note what is handled: %w", err)}
	}
	if err := f(guardtx.Within(part), fresh); err != nil {
		return err
	}
	return part.Commit(ctx)
}
