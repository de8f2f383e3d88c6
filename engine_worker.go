package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/deliveries"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// workerRules are the configuration of a worker.
type workerRules struct {
	Handling     handlerRules
	Streams      map[string]retryPolicy
	FromStart    bool
	Unordered    bool
	Concurrency  int
	MaxPoll      int
	PollInterval time.Duration
	Lease        time.Duration
	Retention    retention.Rules
	RowsRemoved  func(retention.Result) // nil: nobody asks
}

// workerEngine passes the events of a database to handlers.
type workerEngine struct {
	cfg       *workerRules
	delivery  *deliveryRules
	db        *pgxpool.Pool
	processor *processor
	notes     *handledStore
	slots     *handling.Slots
	breakers  *actionBreakers
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
	state   runState
}

// newWorkerEngine returns a worker of the handlers in routes. Alert sends the alerts of its group until its context ends.
func newWorkerEngine(db *pgxpool.Pool, rules workerRules, routes routes, hub *wakeup.Hub, alert func(context.Context)) *workerEngine {
	schema, group, log := rules.Handling.Schema, rules.Handling.Group, rules.Handling.Log
	notes := newHandledStore(db, schema, group)
	processor := newProcessor(rules.Handling, routes, notes)
	if hook := rules.RowsRemoved; hook != nil {
		call := contain.NewCallback("Hooks.RowsRemoved", log, contain.HookLimits)
		rules.RowsRemoved = func(r retention.Result) { call.Notify(context.Background(), func() { hook(r) }) }
	}
	return &workerEngine{
		cfg: &rules, db: db, processor: processor, notes: notes, breakers: newActionBreakers(processor.cfg, routes), hub: hub, alert: alert,
		delivery: &deliveryRules{
			handlerRules: processor.cfg, Streams: rules.Streams, Concurrency: rules.Concurrency, MaxPoll: rules.MaxPoll, PollInterval: rules.PollInterval, Lease: rules.Lease,
		},
		slots: handling.SlotsOf(db), pauses: pauses.NewSet(), operators: pauses.NewStore(db, schema, group), outages: outage.NewLogs(log),
		wake: make(chan struct{}, 1), heard: make(chan struct{}, 1), archive: contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: retention.ArchiveGrace}),
	}
}

func (w *workerEngine) group() string { return w.processor.cfg.Group }

// topics returns the topics whose events the worker handles, sorted.
func (w *workerEngine) topics() []string { return slices.Clone(w.processor.routes.topics) }

// run handles events until ctx is cancelled.
func (w *workerEngine) run(ctx context.Context) error {
	if !w.running.CompareAndSwap(false, true) {
		return errRunning
	}
	defer w.running.Store(false)
	w.state.begin()
	err := w.runOnce(ctx)
	w.state.end(err)
	return err
}

func (w *workerEngine) runOnce(ctx context.Context) error {
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
	*workerEngine
	*deliveryRun
	intake *intake
	lease  *groupLease
}

func newWorkerRun(w *workerEngine) *workerRun {
	r := &workerRun{workerEngine: w, lease: newGroupLease(w.db, w.processor.cfg.Schema, tables.WorkerPrefix+w.group(), w.cfg.Lease)}
	r.deliveryRun = newDeliveryRun(runParts{
		cfg: w.delivery, db: w.db, processor: w.processor, slots: slots{transactions: w.slots}, breakers: w.breakers, pauses: w.pauses, outages: w.outages, wake: w.wake, heard: w.heard,
		read: readOutboxDelivery, pairs: deliveryPairs(w.processor.routes, true),
	})
	r.intake = &intake{
		cfg: w.cfg, delivery: w.delivery, dispatcher: r.dispatcher, processor: w.processor, log: w.processor.log, lease: r.lease, hooks: r.hooks, starting: true,
	}
	r.intake.fanOut = newFanOut(w.db, w.processor.cfg.Schema, w.group(), routesOf(w.processor.routes), r.store, r.intake.plan)
	r.dispatcher.takeNew = r.intake.takeNew
	r.confirm = r.intake.fanOut.confirm
	return r
}

// prepare waits for PostgreSQL, checks that the tables are as this release needs them, and reads what
// is paused, before anything is handled.
func (r *workerRun) prepare(ctx context.Context) error {
	return r.deliveryRun.prepare(ctx, func(ctx context.Context) error {
		return errors.Join(r.notes.check(ctx), r.readPauses(ctx))
	})
}

// run works until ctx is cancelled.
func (r *workerRun) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.state.stop)()
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	member := r.hub.Join(r.wake, r.heard, r.processor.log)
	defer member.Close()
	beside.Go(func() { r.listen(background, member) })
	beside.Go(func() { r.watchPauses(background) })
	beside.Go(func() { newWorkerDuty(r.workerEngine, r.lease, r.intake.hasBacklog, r.cut).run(r.stopping) })
	err := r.deliveryRun.run(ctx)
	end()
	beside.Wait()
	return err
}

// actions returns the actions of the handlers that get events of a type, sorted.
func (w *workerEngine) actions(eventType string) (actions []string) {
	if route := w.processor.routes.byName[eventType]; route != nil {
		for h := range route.handlers() {
			actions = append(actions, h.action)
		}
	}
	slices.Sort(actions)
	return slices.Compact(actions)
}

// deliver makes an attempt of an action on an event of outbox, within tx.
func (w *workerEngine) deliver(ctx context.Context, tx pgx.Tx, outboxID int64, action string, attempt int) (repeated bool, err error) {
	d, err := w.readRecorded(ctx, tx, outboxID)
	if err != nil {
		return false, fmt.Errorf("outbox: deliver event %d: %w", outboxID, err)
	}
	own := w.processor.forOne(new(handling.Activity))
	own.store = &storeWithin{w.notes, tx}
	rules := *own.cfg
	rules.Hooks.Handled = nil
	rules.Hooks.Repeated = func(*envelope.Received, string) { repeated = true }
	own.cfg = &rules
	d.Attempt = attempt
	it := item{meta: receivedOf(&d, new(envelope.Origin))}
	m, err := readOutboxEvent(&d, &it.meta)
	if err != nil {
		return false, err
	}
	if own.resolve(ctx, &it, m, action); it.err != nil {
		return false, it.err
	}
	for t := range it.inOrder() {
		if err := own.processOne(ctx, t); err != nil {
			return false, err
		}
	}
	return repeated, nil
}

// retryWait returns how long a worker waits after a failed attempt, without the random part of a wait.
func (w *workerEngine) retryWait(eventType, action string, attempt int, err error) (wait time.Duration, again bool) {
	route := w.processor.routes.byName[eventType]
	if route == nil {
		return 0, false
	}
	for h := range route.handlers() {
		if h.action != action {
			continue
		}
		policy := h.retry.over(w.delivery.of(route.kind.topic))
		if isPermanent(err) || attempt > w.processor.retries(policy, err, func(f func()) { f() }) {
			return 0, false
		}
		wait, _ = policy.wait(attempt, err)
		return wait, true
	}
	return 0, false
}

// sqlDeliverRecorded reads an event as a row of event_delivery would have it.
const sqlDeliverRecorded = `
SELECT coalesce(topic, ''), event_id::text, event_type, source, aggregate_type, aggregate_id, coalesce(convert_to(payload::text, 'UTF8'), payload_bytes),
       content_type, coalesce(partition_key, ''), convert_to(headers::text, 'UTF8'), occurred_at, created_at
  FROM {schema}.outbox WHERE id = $1`

func (w *workerEngine) readRecorded(ctx context.Context, tx pgx.Tx, id int64) (d deliveries.Delivery, err error) {
	err = tx.QueryRow(ctx, pg.InSchema(sqlDeliverRecorded, w.processor.cfg.Schema), id).Scan(&d.Stream, &d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID, &d.Payload,
		&d.ContentType, &d.PartitionKey, &d.Headers, pg.Instant{At: &d.OccurredAt}, pg.Instant{At: &d.RecordedAt})
	if err == nil {
		d.Stream, err = eventHead{eventType: d.Type, topic: d.Stream}.destination()
	}
	return d, err
}

// storeWithin notes what is handled in a transaction of the caller.
type storeWithin struct {
	*handledStore
	tx pgx.Tx
}

// inTx implements transactor, with a savepoint.
func (s *storeWithin) inTx(ctx context.Context, _ *handling.Activity, keys []handledKey, _ bool, f func(handlerTx, map[handledKey]bool) error) error {
	part, err := s.tx.Begin(ctx)
	if err != nil {
		return &storeError{err}
	}
	defer func() { _ = part.Rollback(ctx) }() // nothing, once it is committed; f may end its goroutine
	fresh, err := s.keysOf(ctx, part, s.mark, keys)
	if err == nil {
		err = s.markOthers(ctx, part, keys, fresh)
	}
	if err != nil {
		return &storeError{fmt.Errorf("note what is handled: %w", err)}
	}
	if err := f(guardtx.Within(part), fresh); err != nil {
		return err
	}
	return part.Commit(ctx)
}
