package delivery

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
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Run handles the deliveries of a group in this process: it claims them, gives them to lanes and
// renews their leases. Who makes deliveries is another matter: a [Worker] makes them of the events of its
// database, and a [Consumer] of records whose handlers have failed.
type Run struct {
	Parts
	log        *slog.Logger
	Store      *Store
	Dispatcher *Dispatcher
	Claimed    *hands
	Lanes      []*lane
	Session    PoolSession       // of the connections of the pool
	Hooks      *contain.Callback // calls the hooks of what no lane has
	Stopping   context.Context
	stop       context.CancelFunc // no other attempt begins
	Cut        context.Context
	cutOff     context.CancelFunc // attempts end
}

// Parts are what a [Run] is given.
type Parts struct {
	Rules      *Rules
	Db         *pgxpool.Pool
	Processor  *handling.Processor
	Slots      handling.CallSlots
	Breakers   *handling.ActionBreakers
	Pauses     *pauses.Set
	Outages    *outage.Logs
	Wake       <-chan struct{} // this process has recorded events
	Heard      <-chan struct{} // others have
	Read       readDelivery
	DeadLetter sendDeadLetter
	Records    bool      // deliveries are of records
	Pairs      [2][]Pair // what handlers with a transaction get, and those without

	// Confirm says every now and then that this process still takes what it took. Nil if nobody asks.
	Confirm func(context.Context) error
}

// hookShare is which part of a lease a hook may take that is called where it holds up all else.
const hookShare = 10

func NewRun(parts Parts) *Run {
	r := &Run{Parts: parts, Claimed: newHands(), log: parts.Processor.Log}
	r.Stopping, r.stop = context.WithCancel(context.Background())
	r.Cut, r.cutOff = context.WithCancel(context.Background())
	r.Store = NewStore(r.Db, r.Rules.Schema, r.Rules.Group, lease.NewHolder(), r.Rules.Lease)
	if r.Records {
		r.Store.ForRecords()
	}
	r.Hooks = contain.NewCallback("a hook", r.log, contain.Limits{Patience: r.Rules.Lease / hookShare, Grace: contain.HookLimits.Grace})
	r.Dispatcher = &Dispatcher{
		cfg: r.Rules, store: r.Store, Breakers: r.Breakers, Pauses: r.Pauses, outages: r.Outages, log: r.log, Claimed: r.Claimed, wake: r.Wake, heard: r.Heard, cut: r.Cut, freeNow: make(chan struct{}, 1),
		Rhythm: wakeup.Rhythm{Idle: r.Rules.PollInterval},
	}
	return r
}

// Prepare waits for PostgreSQL, and checks that the tables are as this release needs them, with check
// among it, before anything is handled.
func (r *Run) Prepare(ctx context.Context, check func(context.Context) error) error {
	answered := outage.Announce(r.log, "PostgreSQL, or for a connection of its pool", handling.CheckTimeout)
	defer answered()
	for ctx.Err() == nil {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, handling.CheckTimeout)
		var first PoolSession
		err := errors.Join(check(try), r.Store.Check(try), r.Db.QueryRow(try, sqlSession).Scan(&first.Role, &first.User, &first.isolation))
		cancel()
		answered()
		switch {
		case pg.IsUndefined(err):
			return pg.NotMigrated(r.Rules.Schema, err)
		case err == nil:
			r.Outages.Report(handling.OutagePostgres, began, nil)
			r.Session = first
			r.makeLanes()
			return nil
		case ctx.Err() == nil:
			r.Outages.Report(handling.OutagePostgres, began, err)
			wait.Sleep(ctx, r.Outages.Backoff(handling.OutagePostgres))
		}
	}
	return nil
}

// makeLanes makes the lanes of each kind of handlers that there is.
func (r *Run) makeLanes() {
	parts := laneParts{
		cfg: r.Rules, processor: r.Processor, store: r.Store, slots: r.Slots, breakers: r.Breakers, pauses: r.Pauses, outages: r.Outages, event: r.Read, deadLetter: r.DeadLetter,
		log: r.log, hands: r.Claimed, session: r.Session, stopping: r.Stopping, cut: r.Cut, promoted: r.Dispatcher.SignalDue, lost: r.Dispatcher.signalStrays, retryAt: r.Dispatcher.RetryAt,
	}
	for i, tx := range []bool{true, false} {
		k := &LaneKind{Pairs: r.Pairs[i], most: r.Rules.MaxPoll, load: map[*lane]int{}, slow: map[*lane]bool{}}
		if !tx {
			k.most = 1
		}
		if len(k.Pairs) == 0 {
			continue
		}
		parts.freed = func(l *lane, n int, took time.Duration) {
			k.freed(l, n, took, r.Rules.MaxPoll)
			wait.Signal(r.Dispatcher.freeNow)
		}
		for range r.Rules.Concurrency {
			k.lanes = append(k.lanes, newLane(parts, tx))
		}
		r.Lanes = append(r.Lanes, k.lanes...)
		r.Dispatcher.Kinds = append(r.Dispatcher.Kinds, k)
	}
}

// PairsOf returns what handlers with a transaction get, and what others get. Rows without an
// action are for all handlers of their type.
func PairsOf(routes handling.Routes, withoutAction bool) (pairs [2][]Pair) {
	kinds := map[Pair]bool{} // with a transaction
	for _, route := range routes.ByName {
		for _, topic := range routes.TopicsOf(route) {
			for h := range route.Handlers() {
				p := Pair{Action: h.Action, Stream: topic}
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
		*all = append(*all, Pair{Stream: topic})
	}
	return pairs
}

// Run works until ctx is cancelled.
func (r *Run) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, r.stop)()
	var beside sync.WaitGroup
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	for _, l := range r.Lanes {
		go l.run()
	}
	keeper := &keeper{
		cfg: r.Rules, store: r.Store, hands: r.Claimed, dispatcher: r.Dispatcher, lanes: r.Lanes, outages: r.Outages, log: r.log, hooks: r.Hooks, confirm: r.Confirm,
	}
	beside.Go(func() { keeper.run(background) })
	beside.Go(func() { keeper.takeOver(background) })
	beside.Go(func() { keeper.watch(background) })
	err := r.Dispatcher.run(r.Stopping)
	r.stop()
	r.end(end)
	beside.Wait()
	return err
}

// end ends the lanes within StopTimeout. Leases are renewed until they have ended.
func (r *Run) end(end context.CancelFunc) {
	clock := handling.StopClock{Began: time.Now(), Timeout: r.Rules.StopTimeout}
	defer end()
	defer r.cutOff()
	for _, l := range r.Lanes {
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
	for _, l := range r.Lanes {
		l.reportLeft()
	}
}

// abandon gives up the lanes whose handlers do not return although their contexts have ended, and gives back what
// they have beside that.
func (r *Run) abandon(clock handling.StopClock) {
	var rest []Delivery
	for _, l := range r.Lanes {
		rest = append(rest, l.cutOff()...)
	}
	ctx, cancel := clock.By(handling.LeftBy)
	defer cancel()
	r.Dispatcher.giveBack(ctx, rest)
}

func (r *Run) haveEnded(patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for _, l := range r.Lanes {
		select {
		case <-l.ended:
		case <-timer.C:
			return false
		}
	}
	return true
}
