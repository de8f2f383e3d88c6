package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/deliveries"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
)

// Worker passes the events of a database to handlers, without Kafka: the handlers of a
// [Consumer]. Any number of processes may run workers of the same group; they share its
// work. Each group gets every event of the topics in which the registry has the events of its
// handlers.
//
// What is owed to a handler is a row of event_delivery. A handler with a transaction commits its
// effect, its note in event_handled and the end of the row together. One that fails is tried
// again later, and is DEAD after MaxRetries, until an operator requeues it. Of the events of a key,
// which are those of a topic and a partition key, each action gets one after the other, in the order in
// which they were recorded.
type Worker struct {
	cfg       WorkerConfig
	db        *pgxpool.Pool
	processor *processor
	slots     *handling.Slots
	breakers  *actionBreakers
	pauses    *pauses.Set
	operators *pauses.Store
	outages   *outage.Logs
	wake      chan struct{} // this process has recorded events
	heard     chan struct{} // others have
	waker     *Waker
	archive   *contain.Callback // Retention.Archive
	monitor   *watch.Monitor

	running atomic.Bool
	current atomic.Pointer[workerRun] // nil while it does not run
	state   runState
}

// NewWorker returns a worker of the handlers. The events are those that are recorded in db; closing
// it stays with the caller.
//
// A new group skips what was committed before its first start, unless FromStart says otherwise. It
// keeps its position in outbox_cursor, as relays do: rows of outbox stay until it has them. So
// a group that is not needed any more has to be removed by an operator.
//
// NewWorker does no I/O. A running worker uses up to Concurrency connections of db for
// transactions, and five more, and one beside them, which all relays and workers on db share: it hears when other
// processes have recorded events, see [Waker]. The error names every bad field and handler.
func NewWorker(db *pgxpool.Pool, events *Registry, cfg WorkerConfig, handlers ...Handler) (*Worker, error) {
	cfg = cfg.withDefaults()
	errs := []error{cfg.validate()}
	if db == nil {
		errs = append(errs, fmt.Errorf("db %w", ErrNilArgument))
	}
	if events == nil {
		errs = append(errs, fmt.Errorf("registry %w", ErrNilArgument))
	}
	var routes routes
	if events != nil {
		var err error
		routes, err = newRoutes(events, &cfg.HandlerConfig, handlers)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: worker config: %w", err)
	}
	log := cfg.Logger.With("group", cfg.Group)
	cfg.HandlerConfig = cfg.guarded(log)
	w := &Worker{
		cfg: cfg, db: db, slots: handling.SlotsOf(db), pauses: pauses.NewSet(), operators: pauses.NewStore(db, cfg.Schema, cfg.Group),
		outages: outage.NewLogs(log), wake: make(chan struct{}, 1), heard: make(chan struct{}, 1), waker: newWaker(db, cfg.Schema, log),
		archive:   contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: retention.ArchiveGrace}),
		monitor:   cfg.Alerts.groupMonitor(watch.NewWorkerStore(db, cfg.Schema), cfg.Group, false, cfg.Lease, log),
		processor: &processor{cfg: cfg.HandlerConfig, routes: routes, log: log, input: &inputLog{}, apart: new(sync.Map), store: newHandledStore(db, cfg.Schema, cfg.Group)},
	}
	w.breakers = newActionBreakers(&w.cfg.HandlerConfig, routes, log)
	return w, nil
}

// Group returns the consumer group.
func (w *Worker) Group() string { return w.cfg.Group }

// Topics returns the topics whose events the worker handles, sorted.
func (w *Worker) Topics() []string { return slices.Clone(w.processor.routes.topics) }

// Waker returns the waker of this process, for transactions that record events. It works while Run does.
func (w *Worker) Waker() *Waker { return w.waker }

// Run handles events until ctx is cancelled; then it returns nil, within StopTimeout. In this
// time handlers finish the events that they are at, which has three fifths of it, and the rest goes
// back to others. Run may be called again afterwards; a second call at the same time returns
// [ErrRunning].
//
// A handler that ignores the end of its context cannot be ended. Run does not wait for it, and
// logs it with its event as an error. The connection of its transaction is closed, so that PostgreSQL
// rolls it back.
//
// Outages of PostgreSQL are waited out, not returned. The errors that Run returns need an operator:
// [ErrNotMigrated] and [ErrSequenceBehind].
func (w *Worker) Run(ctx context.Context) error {
	if !w.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer w.running.Store(false)
	w.state.begin()
	err := w.run(ctx)
	w.state.end(err)
	return err
}

func (w *Worker) run(ctx context.Context) error {
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
	*deliveryRun
	intake *intake
	lease  *groupLease
}

func newWorkerRun(w *Worker) *workerRun {
	r := &workerRun{Worker: w, lease: newGroupLease(w.db, w.cfg.Schema, tables.WorkerPrefix+w.cfg.Group, w.cfg.Lease)}
	r.deliveryRun = newDeliveryRun(runParts{
		cfg: &w.cfg, db: w.db, processor: w.processor, slots: slots{transactions: w.slots}, breakers: w.breakers, pauses: w.pauses, outages: w.outages, wake: w.wake, heard: w.heard,
		read: readOutboxDelivery, pairs: deliveryPairs(w.processor.routes, true),
	})
	r.intake = &intake{
		cfg: &w.cfg, dispatcher: r.dispatcher, processor: w.processor, log: w.processor.log, lease: r.lease, hooks: r.hooks, starting: true,
	}
	r.intake.fanOut = newFanOut(w.db, w.cfg.Schema, w.cfg.Group, routesOf(w.processor.routes), r.store, r.intake.plan)
	r.dispatcher.takeNew = r.intake.takeNew
	r.confirm = r.intake.fanOut.confirm
	return r
}

// prepare waits for PostgreSQL, checks that the tables are as this release needs them, and reads what
// is paused, before anything is handled.
func (r *workerRun) prepare(ctx context.Context) error {
	return r.deliveryRun.prepare(ctx, func(ctx context.Context) error {
		return errors.Join(r.processor.store.(*handledStore).check(ctx), r.readPauses(ctx))
	})
}

// run works until ctx is cancelled.
func (r *workerRun) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.state.stop)()
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	member := r.waker.hub.Join(r.wake, r.heard, r.processor.log)
	defer member.Close()
	beside.Go(func() { r.listen(background, member) })
	beside.Go(func() { r.watchPauses(background) })
	beside.Go(func() { newWorkerDuty(r.Worker, r.lease, r.intake.hasBacklog, r.cut).run(r.stopping) })
	err := r.deliveryRun.run(ctx)
	end()
	beside.Wait()
	return err
}

// Actions returns the actions of the handlers that get events of a type, sorted: each of
// them is a delivery of its own. There is none for a type without a handler.
func (w *Worker) Actions(eventType string) (actions []string) {
	if route := w.processor.routes.byName[eventType]; route != nil {
		for h := range route.handlers() {
			actions = append(actions, h.action)
		}
	}
	slices.Sort(actions)
	return slices.Compact(actions)
}

// Deliver makes an attempt of an action on the event with this id in outbox, within tx: it is for
// tests, and sees what tx has recorded and not committed. Handlers with a transaction get a part
// of tx, which is rolled back if they fail. Nothing is written to event_delivery. Repeated is
// reported if the action was done before. The error is that of the handler, of its codec, or
// PostgreSQL's.
//
// The module outboxtest makes plays of it, with retries.
func (w *Worker) Deliver(ctx context.Context, tx pgx.Tx, outboxID int64, action string, attempt int) (repeated bool, err error) {
	d, err := w.readRecorded(ctx, tx, outboxID)
	if err != nil {
		return false, fmt.Errorf("outbox: deliver event %d: %w", outboxID, err)
	}
	own := w.processor.forOne(new(handling.Activity))
	own.store = &storeWithin{w.processor.store.(*handledStore), tx}
	own.cfg.Hooks.Handled = nil
	own.cfg.Hooks.Repeated = func(Metadata, string) { repeated = true }
	d.Attempt = attempt
	it := item{meta: metadataOf(&d, new(origin))}
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

// RetryWait returns how long a worker waits after an attempt, from 1, of an action on an event of a
// type that has failed with err, without the random part of a wait. Again is false if there is no other attempt:
// the delivery is DEAD, or the group has no such action.
func (w *Worker) RetryWait(eventType, action string, attempt int, err error) (wait time.Duration, again bool) {
	route := w.processor.routes.byName[eventType]
	if route == nil {
		return 0, false
	}
	for h := range route.handlers() {
		if h.action != action {
			continue
		}
		usual := w.cfg.of(route.def.destination())
		if isPermanent(err) || attempt > w.cfg.retries(h, usual, err, func(f func()) { f() }) {
			return 0, false
		}
		wait, _ = h.retry.over(usual).wait(attempt, err)
		return wait, true
	}
	return 0, false
}

// sqlDeliverRecorded reads an event as a row of event_delivery would have it.
const sqlDeliverRecorded = `
SELECT coalesce(topic, ''), event_id::text, event_type, source, aggregate_type, aggregate_id, coalesce(convert_to(payload::text, 'UTF8'), payload_bytes),
       content_type, coalesce(partition_key, ''), convert_to(headers::text, 'UTF8'), occurred_at, created_at
  FROM {schema}.outbox WHERE id = $1`

func (w *Worker) readRecorded(ctx context.Context, tx pgx.Tx, id int64) (d deliveries.Delivery, err error) {
	err = tx.QueryRow(ctx, pg.InSchema(sqlDeliverRecorded, w.cfg.Schema), id).Scan(&d.Stream, &d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID, &d.Payload,
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
