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
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
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
	cfg        WorkerConfig
	retriesFor func(error) int // the host's, or nil
	db         *pgxpool.Pool
	processor  *processor
	slots      *handling.Slots
	pauses     *pauses.Set
	operators  *pauses.Store
	outages    *outage.Logs
	wake       chan struct{}
	archive    *contain.Callback // Retention.Archive

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
// transactions, and five more. The error names every bad field and handler.
func NewWorker(db *pgxpool.Pool, events *Registry, cfg WorkerConfig, handlers ...Handler) (*Worker, error) {
	retriesFor := cfg.RetriesFor
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
		routes, err = newRoutes(events, cfg.Upcasters, handlers)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: worker config: %w", err)
	}
	log := cfg.Logger.With("group", cfg.Group)
	cfg.HandlerConfig = cfg.guarded(log)
	if retriesFor != nil {
		retriesFor = cfg.RetriesFor
	}
	return &Worker{
		cfg: cfg, retriesFor: retriesFor, db: db, slots: handling.SlotsOf(db), pauses: pauses.NewSet(), operators: pauses.NewStore(db, cfg.Schema, cfg.Group),
		outages: outage.NewLogs(log), wake: make(chan struct{}, 1),
		archive:   contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: archiveGrace}),
		processor: &processor{cfg: cfg.HandlerConfig, routes: routes, log: log, input: &inputLog{}, apart: new(sync.Map), store: newHandledStore(db, cfg.Schema, cfg.Group)},
	}, nil
}

// Group returns the consumer group.
func (w *Worker) Group() string { return w.cfg.Group }

// Topics returns the topics whose events the worker handles, sorted.
func (w *Worker) Topics() []string { return slices.Clone(w.processor.routes.topics) }

// Wake makes the worker look for events now instead of at its next poll. Call it after a
// commit; it never blocks.
func (w *Worker) Wake() { wait.Signal(w.wake) }

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
	store      *deliveries.Store
	dispatcher *dispatcher
	hands      *hands
	lanes      []*lane
	lease      *groupLease
	stopping   context.Context
	stop       context.CancelFunc // no other attempt begins
	cut        context.Context
	cutOff     context.CancelFunc // attempts end
}

func newWorkerRun(w *Worker) *workerRun {
	r := &workerRun{Worker: w, hands: newHands(), lease: newGroupLease(w.db, w.cfg.Schema, w.cfg.Group, w.cfg.Lease)}
	r.stopping, r.stop = context.WithCancel(context.Background())
	r.cut, r.cutOff = context.WithCancel(context.Background())
	r.store = deliveries.NewStore(w.db, w.cfg.Schema, w.cfg.Group, newHolder(), w.cfg.Lease)
	r.dispatcher = &dispatcher{
		cfg: &w.cfg, store: r.store, processor: w.processor, routes: w.processor.routes, pauses: w.pauses, outages: w.outages, log: w.processor.log, hands: r.hands,
		hooks: contain.NewCallback("a hook", w.processor.log, contain.Limits{Patience: w.cfg.Lease / hookShare, Grace: contain.HookLimits.Grace}),
		lease: r.lease, wake: w.wake, cut: r.cut, freeNow: make(chan struct{}, 1), starting: true,
	}
	r.dispatcher.fanOut = newFanOut(w.db, w.cfg.Schema, w.cfg.Group, routesOf(w.processor.routes), r.store, r.dispatcher.plan)
	return r
}

// prepare waits for PostgreSQL, checks that the tables are as this release needs them, and reads what
// is paused, before anything is handled.
func (r *workerRun) prepare(ctx context.Context) error {
	answered := outage.Announce(r.processor.log, "PostgreSQL, or for a connection of its pool", checkTimeout)
	defer answered()
	for ctx.Err() == nil {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, checkTimeout)
		var first poolSession
		err := errors.Join(r.processor.store.(*handledStore).check(try), r.store.Check(try), r.readPauses(try),
			r.db.QueryRow(try, sqlSession).Scan(&first.role, &first.user, &first.isolation))
		cancel()
		answered()
		switch {
		case pg.IsUndefined(err):
			return notMigrated(r.cfg.Schema, err)
		case err == nil:
			r.outages.Report(outagePostgres, began, nil)
			r.makeLanes(first)
			return nil
		case ctx.Err() == nil:
			r.outages.Report(outagePostgres, began, err)
			wait.Sleep(ctx, r.outages.Backoff(outagePostgres))
		}
	}
	return nil
}

// makeLanes makes the lanes of each kind of handlers that there is.
func (r *workerRun) makeLanes(first poolSession) {
	parts := laneParts{
		cfg: &r.cfg, retriesFor: r.retriesFor, processor: r.processor, store: r.store, slots: r.slots, pauses: r.pauses, outages: r.outages,
		log: r.processor.log, hands: r.hands, session: first, stopping: r.stopping, cut: r.cut, promoted: r.dispatcher.signalDue, lost: r.dispatcher.signalStrays, retryAt: r.dispatcher.retryAt,
	}
	withTx, without := r.pairs()
	for _, tx := range []bool{true, false} {
		k := &laneKind{pairs: withTx, most: r.cfg.MaxPoll, load: map[*lane]int{}, slow: map[*lane]bool{}}
		if !tx {
			k.pairs, k.most = without, 1
		}
		if len(k.pairs) == 0 {
			continue
		}
		parts.freed = func(l *lane, n int, took time.Duration) {
			k.freed(l, n, took, r.cfg.MaxPoll)
			wait.Signal(r.dispatcher.freeNow)
		}
		for range r.cfg.Concurrency {
			k.lanes = append(k.lanes, newLane(parts, tx))
		}
		r.lanes = append(r.lanes, k.lanes...)
		r.dispatcher.kinds = append(r.dispatcher.kinds, k)
	}
}

// pairs returns what handlers with a transaction get, and what others get. Rows without an action
// are for all handlers of their type.
func (r *workerRun) pairs() (withTx, without []deliveries.Pair) {
	kinds := map[deliveries.Pair]bool{} // with a transaction
	for _, route := range r.processor.routes.byName {
		topic := route.def.destination()
		for h := range route.handlers() {
			p := deliveries.Pair{Action: h.action, Stream: topic}
			tx, known := kinds[p]
			kinds[p] = h.kind != noTx && (tx || !known)
		}
	}
	for p, tx := range kinds {
		if tx {
			withTx = append(withTx, p)
		} else {
			without = append(without, p)
		}
	}
	all := &withTx
	if len(withTx) == 0 {
		all = &without
	}
	for _, topic := range r.processor.routes.topics {
		*all = append(*all, deliveries.Pair{Stream: topic})
	}
	return withTx, without
}

// run works until ctx is cancelled.
func (r *workerRun) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		r.state.stop()
		r.stop()
	})()
	var beside sync.WaitGroup
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	for _, l := range r.lanes {
		go l.run()
	}
	keeper := &keeper{
		cfg: &r.cfg, store: r.store, hands: r.hands, dispatcher: r.dispatcher, lanes: r.lanes, outages: r.outages, log: r.processor.log, hooks: r.dispatcher.hooks,
	}
	beside.Go(func() { keeper.run(background) })
	beside.Go(func() { keeper.takeOver(background) })
	beside.Go(func() { keeper.watch(background) })
	beside.Go(func() { r.watchPauses(background) })
	beside.Go(func() { newGroupCleaner(r.Worker, r.lease, r.dispatcher.hasBacklog, r.cut).run(r.stopping) })
	err := r.dispatcher.run(r.stopping)
	r.stop()
	r.end(end)
	beside.Wait()
	return err
}

// end ends the lanes within StopTimeout. Leases are renewed until they have ended.
func (r *workerRun) end(end context.CancelFunc) {
	clock := stopClock{time.Now(), r.cfg.StopTimeout}
	defer end()
	defer r.cutOff()
	for _, l := range r.lanes {
		l.in.close()
	}
	if r.haveEnded(clock.part(finishBy)) {
		return
	}
	r.cutOff()
	if r.haveEnded(clock.part(abandonBy - finishBy)) {
		return
	}
	r.abandon(clock)
	if r.haveEnded(clock.part(leftBy - abandonBy)) {
		return
	}
	for _, l := range r.lanes {
		l.reportLeft()
	}
}

// abandon gives up the lanes whose handlers do not return although their contexts have ended, and gives back what
// they have beside that.
func (r *workerRun) abandon(clock stopClock) {
	var rest []deliveries.Delivery
	for _, l := range r.lanes {
		rest = append(rest, l.cutOff()...)
	}
	ctx, cancel := clock.by(leftBy)
	defer cancel()
	r.dispatcher.giveBack(ctx, rest)
}

func (r *workerRun) haveEnded(patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for _, l := range r.lanes {
		select {
		case <-l.ended:
		case <-timer.C:
			return false
		}
	}
	return true
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
	m, err := messageOf(&d)
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

// RetryWait returns how long a worker waits after an attempt, from 1, on an event of a topic that has
// failed with err, without the random part of a wait. Again is false if there is no other attempt: the
// delivery is DEAD.
func (w *Worker) RetryWait(topic string, attempt int, err error) (wait time.Duration, again bool) {
	retries := w.cfg.of(topic).MaxRetries
	if w.retriesFor != nil {
		retries = w.retriesFor(err)
	}
	if isPermanent(err) || attempt > retries {
		return 0, false
	}
	wait, _ = w.cfg.retryWait(topic, attempt, err)
	return wait, true
}

// sqlDeliverRecorded reads an event as a row of event_delivery would have it.
const sqlDeliverRecorded = `
SELECT coalesce(topic, ''), event_id::text, event_type, source, aggregate_type, aggregate_id, coalesce(convert_to(payload::text, 'UTF8'), payload_bytes),
       content_type, coalesce(partition_key, ''), convert_to(headers::text, 'UTF8'), occurred_at, created_at
  FROM {schema}.outbox WHERE id = $1`

func (w *Worker) readRecorded(ctx context.Context, tx pgx.Tx, id int64) (d deliveries.Delivery, err error) {
	err = tx.QueryRow(ctx, pg.InSchema(sqlDeliverRecorded, w.cfg.Schema), id).Scan(&d.Stream, &d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID, &d.Payload,
		&d.ContentType, &d.PartitionKey, &d.Headers, &d.OccurredAt, &d.RecordedAt)
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
