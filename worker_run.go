package outbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// deliveryRun handles the deliveries of a group in this process: it claims them, gives them to lanes and
// renews their leases. Who makes deliveries is another matter: a [Worker] makes them of the events of its
// database, and a [Consumer] of records whose handlers have failed.
type deliveryRun struct {
	runParts
	log        *slog.Logger
	store      *delivery.Store
	dispatcher *dispatcher
	hands      *hands
	lanes      []*lane
	session    poolSession       // of the connections of the pool
	hooks      *contain.Callback // calls the hooks of what no lane has
	stopping   context.Context
	stop       context.CancelFunc // no other attempt begins
	cut        context.Context
	cutOff     context.CancelFunc // attempts end
}

// runParts are what a [deliveryRun] is given.
type runParts struct {
	cfg        *deliveryRules
	db         *pgxpool.Pool
	processor  *handling.Processor
	slots      handling.CallSlots
	breakers   *handling.ActionBreakers
	pauses     *pauses.Set
	outages    *outage.Logs
	wake       <-chan struct{} // this process has recorded events
	heard      <-chan struct{} // others have
	read       readDelivery
	deadLetter sendDeadLetter
	records    bool               // deliveries are of records
	pairs      [2][]delivery.Pair // what handlers with a transaction get, and those without

	// confirm says every now and then that this process still takes what it took. Nil if nobody asks.
	confirm func(context.Context) error
}

func newDeliveryRun(parts runParts) *deliveryRun {
	r := &deliveryRun{runParts: parts, hands: newHands(), log: parts.processor.Log}
	r.stopping, r.stop = context.WithCancel(context.Background())
	r.cut, r.cutOff = context.WithCancel(context.Background())
	r.store = delivery.NewStore(r.db, r.cfg.Schema, r.cfg.Group, lease.NewHolder(), r.cfg.Lease)
	if r.records {
		r.store.ForRecords()
	}
	r.hooks = contain.NewCallback("a hook", r.log, contain.Limits{Patience: r.cfg.Lease / hookShare, Grace: contain.HookLimits.Grace})
	r.dispatcher = &dispatcher{
		cfg: r.cfg, store: r.store, breakers: r.breakers, pauses: r.pauses, outages: r.outages, log: r.log, hands: r.hands, wake: r.wake, heard: r.heard, cut: r.cut, freeNow: make(chan struct{}, 1),
		rhythm: wakeup.Rhythm{Idle: r.cfg.PollInterval},
	}
	return r
}

// prepare waits for PostgreSQL, and checks that the tables are as this release needs them, with check
// among it, before anything is handled.
func (r *deliveryRun) prepare(ctx context.Context, check func(context.Context) error) error {
	answered := outage.Announce(r.log, "PostgreSQL, or for a connection of its pool", handling.CheckTimeout)
	defer answered()
	for ctx.Err() == nil {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, handling.CheckTimeout)
		var first poolSession
		err := errors.Join(check(try), r.store.Check(try), r.db.QueryRow(try, sqlSession).Scan(&first.role, &first.user, &first.isolation))
		cancel()
		answered()
		switch {
		case pg.IsUndefined(err):
			return pg.NotMigrated(r.cfg.Schema, err)
		case err == nil:
			r.outages.Report(handling.OutagePostgres, began, nil)
			r.session = first
			r.makeLanes()
			return nil
		case ctx.Err() == nil:
			r.outages.Report(handling.OutagePostgres, began, err)
			wait.Sleep(ctx, r.outages.Backoff(handling.OutagePostgres))
		}
	}
	return nil
}

// makeLanes makes the lanes of each kind of handlers that there is.
func (r *deliveryRun) makeLanes() {
	parts := laneParts{
		cfg: r.cfg, processor: r.processor, store: r.store, slots: r.slots, breakers: r.breakers, pauses: r.pauses, outages: r.outages, event: r.read, deadLetter: r.deadLetter,
		log: r.log, hands: r.hands, session: r.session, stopping: r.stopping, cut: r.cut, promoted: r.dispatcher.signalDue, lost: r.dispatcher.signalStrays, retryAt: r.dispatcher.retryAt,
	}
	for i, tx := range []bool{true, false} {
		k := &laneKind{pairs: r.pairs[i], most: r.cfg.MaxPoll, load: map[*lane]int{}, slow: map[*lane]bool{}}
		if !tx {
			k.most = 1
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

// deliveryPairs returns what handlers with a transaction get, and what others get. Rows without an
// action are for all handlers of their type.
func deliveryPairs(routes handling.Routes, withoutAction bool) (pairs [2][]delivery.Pair) {
	kinds := map[delivery.Pair]bool{} // with a transaction
	for _, route := range routes.ByName {
		for _, topic := range routes.TopicsOf(route) {
			for h := range route.Handlers() {
				p := delivery.Pair{Action: h.Action, Stream: topic}
				tx, known := kinds[p]
				kinds[p] = h.Kind != handling.NoTx && (tx || !known)
			}
		}
	}
	const withTx, without = 0, 1
	for p, tx := range kinds {
		if tx {
			pairs[withTx] = append(pairs[withTx], p)
		} else {
			pairs[without] = append(pairs[without], p)
		}
	}
	if !withoutAction {
		return pairs
	}
	all := &pairs[withTx]
	if len(*all) == 0 {
		all = &pairs[without]
	}
	for _, topic := range routes.Topics {
		*all = append(*all, delivery.Pair{Stream: topic})
	}
	return pairs
}

// run works until ctx is cancelled.
func (r *deliveryRun) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.stop)()
	var beside sync.WaitGroup
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	for _, l := range r.lanes {
		go l.run()
	}
	keeper := &keeper{
		cfg: r.cfg, store: r.store, hands: r.hands, dispatcher: r.dispatcher, lanes: r.lanes, outages: r.outages, log: r.log, hooks: r.hooks, confirm: r.confirm,
	}
	beside.Go(func() { keeper.run(background) })
	beside.Go(func() { keeper.takeOver(background) })
	beside.Go(func() { keeper.watch(background) })
	err := r.dispatcher.run(r.stopping)
	r.stop()
	r.end(end)
	beside.Wait()
	return err
}

// end ends the lanes within StopTimeout. Leases are renewed until they have ended.
func (r *deliveryRun) end(end context.CancelFunc) {
	clock := handling.StopClock{time.Now(), r.cfg.StopTimeout}
	defer end()
	defer r.cutOff()
	for _, l := range r.lanes {
		l.in.close()
	}
	if r.haveEnded(clock.Part(handling.FinishBy)) {
		return
	}
	r.cutOff()
	if r.haveEnded(clock.Part(handling.AbandonBy - handling.FinishBy)) {
		return
	}
	r.abandon(clock)
	if r.haveEnded(clock.Part(handling.LeftBy - handling.AbandonBy)) {
		return
	}
	for _, l := range r.lanes {
		l.reportLeft()
	}
}

// abandon gives up the lanes whose handlers do not return although their contexts have ended, and gives back what
// they have beside that.
func (r *deliveryRun) abandon(clock handling.StopClock) {
	var rest []delivery.Delivery
	for _, l := range r.lanes {
		rest = append(rest, l.cutOff()...)
	}
	ctx, cancel := clock.By(handling.LeftBy)
	defer cancel()
	r.dispatcher.giveBack(ctx, rest)
}

func (r *deliveryRun) haveEnded(patience time.Duration) bool {
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
