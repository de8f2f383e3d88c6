package delivery

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/semaphore"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Run handles the deliveries of a group in this process: it claims them, deals them to lanes and renews
// their leases. It does not insert them. A worker inserts deliveries for the events of its database, and a
// consumer for events that it parks.
type Run struct {
	Store      *Store
	Dispatcher *Dispatcher
	Claimed    *claimedSet
	Lanes      []*lane
	Session    SessionSettings   // of the pool's connections; set by Prepare
	Hooks      *contain.Callback // calls hooks for deliveries that no lane has
	Stopping   context.Context   // ends when no new attempt may begin
	Cut        context.Context   // ends when attempts must end

	// Confirm tells the other processes from time to time that this process still handles its routes. Nil
	// means that this is not needed. It is set before Run.
	Confirm func(context.Context) error

	parts   Parts
	members *members
	log     *slog.Logger
	stop    context.CancelFunc // of Stopping
	cutOff  context.CancelFunc // of Cut
}

// Parts are the dependencies of a [Run].
type Parts struct {
	Rules      *Rules
	Db         *pgxpool.Pool
	Processor  *handling.Processor
	Slots      handling.CallSlots
	Breakers   *handling.ActionBreakers
	Pauses     *pauses.Set
	Outages    *outage.Logs
	Wake       <-chan struct{} // this process has recorded events
	Heard      <-chan struct{} // other processes have
	Read       readDelivery
	DeadLetter sendDeadLetter // for deliveries from Kafka; nil in a process without a client for Kafka
	Records    bool           // the process is a consumer
	Pairs      [2][]Claimable // for handlers with a transaction, and for those without, see PairsOf

	// Report returns what this process says of itself in event_member. Others counts what the group has to handle and
	// that has no delivery, and returns what else keeps the group from its events. Both may be nil.
	Report func() Report
	Others func(context.Context) (counts []tables.EventCount, reasons []string, err error)
}

// hookShare is the part of a lease that a hook may take if it delays the take-over loop.
const hookShare = 10

// NewRun returns a run with these parts.
func NewRun(parts Parts) *Run {
	r := &Run{parts: parts, Claimed: newClaimedSet(), log: parts.Processor.Log}
	rules := parts.Rules
	r.Stopping, r.stop = context.WithCancel(context.Background())
	r.Cut, r.cutOff = context.WithCancel(context.Background())
	r.Store = NewStore(parts.Db, rules.Schema, rules.Group, lease.NewHolder(), rules.Lease)
	if parts.Records {
		r.Store.ForRecords()
	}
	r.members = &members{
		store: r.Store, routes: routesOf(parts.Pairs), every: rules.Lease / 3, report: parts.Report, others: parts.Others,
		groups: tables.NewGroupReader(parts.Db, rules.Schema),
	}
	limits := contain.Limits{Patience: rules.Lease / hookShare, Grace: contain.HookLimits.Grace}
	r.Hooks = contain.NewCallback("a hook", r.log, limits)
	r.Dispatcher = &Dispatcher{
		cfg: rules, store: r.Store, Breakers: parts.Breakers, Pauses: parts.Pauses, outages: parts.Outages, log: r.log,
		Claimed: r.Claimed, wake: parts.Wake, heard: parts.Heard, cut: r.Cut, changed: make(chan struct{}, 1),
		PollSchedule: wakeup.PollSchedule{Idle: rules.PollInterval}, members: r.members,
	}
	return r
}

// Prepare waits for PostgreSQL and checks the tables, also with check, before anything is handled.
func (r *Run) Prepare(ctx context.Context, check func(context.Context) error) error {
	outages := r.parts.Outages
	answered := outage.Announce(r.log, "PostgreSQL, or for a connection of its pool", handling.CheckTimeout, pg.Address(r.parts.Db)...)
	defer answered()
	for ctx.Err() == nil {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, handling.CheckTimeout)
		var session SessionSettings
		row := r.parts.Db.QueryRow
		err := errors.Join(pg.CheckSessions(try, r.parts.Db), check(try), r.Store.Check(try),
			row(try, sqlSessionSettings).Scan(&session.Role, &session.User, &session.isolation))
		cancel()
		answered()
		switch {
		case errors.Is(err, pg.ErrEncoding):
			return err
		case pg.IsUndefined(err):
			return pg.NotMigrated(r.parts.Rules.Schema, err)
		case err == nil:
			outages.Report(handling.OutagePostgres, began, nil)
			r.Session = session
			r.makeLanes()
			return nil
		case ctx.Err() == nil:
			outages.Report(handling.OutagePostgres, began, err)
			wait.Sleep(ctx, outages.Backoff(handling.OutagePostgres))
		}
	}
	return nil
}

// makeLanes makes lanes for handlers with a transaction and for handlers without, if such handlers exist.
func (r *Run) makeLanes() {
	p := &r.parts
	parts := laneParts{
		cfg: p.Rules, processor: p.Processor, store: r.Store, slots: p.Slots, allLarge: semaphore.NewWeighted(maxLargeBytes), breakers: p.Breakers, pauses: p.Pauses,
		outages: p.Outages, readEvent: p.Read, deadLetter: p.DeadLetter, log: r.log, claimed: r.Claimed, session: r.Session,
		stopping: r.Stopping, cut: r.Cut,
		signalDue: r.Dispatcher.SignalHeads, signalUnknown: r.Dispatcher.signalUnknown, retryAt: r.Dispatcher.RetryAt,
	}
	for i, tx := range []bool{true, false} {
		if len(p.Pairs[i]) == 0 {
			continue
		}
		k := newLaneKind(p.Pairs[i], min(firstBatch, p.Rules.MaxPoll), p.Rules)
		if !tx {
			k.maxBatch = 1
		}
		parts.handled = func(l *lane, n, of int, took time.Duration) {
			ctx, cancel := context.WithTimeout(r.Cut, WriteTimeout)
			r.Dispatcher.release(ctx, k.noteHandled(l, n, of, took, p.Rules.MaxPoll))
			cancel()
			wait.Signal(r.Dispatcher.changed)
		}
		for range p.Rules.Concurrency + p.Rules.Spare[i] {
			l := newLane(parts, tx)
			l.activity.Ended = k.noteCall
			k.lanes = append(k.lanes, l)
		}
		r.Lanes = append(r.Lanes, k.lanes...)
		r.Dispatcher.Kinds = append(r.Dispatcher.Kinds, k)
	}
}

// Outages returns the outages that have not ended.
func (r *Run) Outages() []outage.Named { return r.parts.Outages.Current() }

// KafkaElsewhere returns when Kafka last answered another process of the group, as this process has last seen, or zero.
func (r *Run) KafkaElsewhere() time.Time {
	if at := r.members.elsewhere.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// Waiting returns what the group had to handle when this process last looked, and reasons for Health. It returns
// nothing if that is not known.
func (r *Run) Waiting() (counts []tables.EventCount, reasons []string) { return r.members.waiting() }

// PairsOf returns the pairs of action and stream for handlers with a transaction, and those for handlers without one,
// with the event types of the handlers. It adds pairs without an action, whose rows are for all handlers of their event
// type.
func PairsOf(routes handling.Routes) (pairs [2][]Claimable) {
	kinds := map[Pair]bool{} // with a transaction
	types := map[Pair][]string{}
	for name, route := range routes.ByName {
		for _, topic := range routes.TopicsOf(route) {
			for h := range route.Handlers() {
				p := Pair{Action: h.Action, Stream: topic}
				tx, known := kinds[p]
				kinds[p] = h.Kind != handling.NoTx && (tx || !known)
				if !slices.Contains(types[p], name) { // versions of a type may share an action
					types[p] = append(types[p], name)
				}
			}
		}
	}
	const withTx, without = 0, 1
	for p, tx := range kinds {
		if tx {
			pairs[withTx] = append(pairs[withTx], Claimable{p, types[p]})
		} else {
			pairs[without] = append(pairs[without], Claimable{p, types[p]})
		}
	}
	all := &pairs[withTx]
	if len(*all) == 0 {
		all = &pairs[without]
	}
	for _, topic := range routes.Topics {
		*all = append(*all, Claimable{Pair: Pair{Stream: topic}})
	}
	return pairs
}

// Run handles deliveries until ctx is cancelled, and ends the lanes within StopTimeout.
func (r *Run) Run(ctx context.Context) error {
	var stopped atomic.Pointer[time.Time]
	defer context.AfterFunc(ctx, func() {
		now := time.Now()
		stopped.Store(&now)
		r.stop()
	})()
	for _, l := range r.Lanes {
		go l.run()
	}
	keeper := &leaseKeeper{
		cfg: r.parts.Rules, store: r.Store, claimed: r.Claimed, dispatcher: r.Dispatcher, lanes: r.Lanes,
		outages: r.parts.Outages, log: r.log, breakers: r.parts.Breakers, hooks: r.Hooks, confirm: r.Confirm,
		members: r.members,
	}
	background, endBackground := context.WithCancel(context.WithoutCancel(ctx))
	var loops sync.WaitGroup
	heard := r.joinMembers()
	defer r.members.member.Close()
	loops.Go(func() { r.hear(background, heard) })
	loops.Go(func() { keeper.renewLoop(background) })
	loops.Go(func() { keeper.takeOverLoop(background) })
	loops.Go(func() { keeper.watchLoop(background) })
	loops.Go(func() { keeper.holderLoop(background) })
	if r.parts.DeadLetter != nil {
		loops.Go(func() { r.deadLettersLoop(background) })
	}
	loops.Go(func() { keeper.reportLoop(background) })
	loops.Go(func() { keeper.lookLoop(background) })
	err := r.Dispatcher.run(r.Stopping)
	r.stop()
	clock := handling.StopClock{Began: time.Now(), Timeout: r.parts.Rules.StopTimeout}
	if began := stopped.Load(); began != nil { // the dispatcher may have waited for the answer to a claim since then
		clock.Began = *began
	}
	r.endLanes(clock)
	endBackground()
	r.releaseLast(clock)
	loops.Wait()
	r.removeMember(clock)
	return err
}

// joinMembers has the returned channel signalled when another process of the group makes rows due that it has no
// handler for.
func (r *Run) joinMembers() <-chan struct{} {
	heard := make(chan struct{}, 1)
	r.members.hub = wakeup.Of(r.parts.Db, "deliveries of "+r.parts.Rules.Group+" in "+r.parts.Rules.Schema)
	r.members.member = r.members.hub.Join(heard, heard, r.log)
	return heard
}

// hear has due rows claimed after each signal, until ctx is cancelled.
func (r *Run) hear(ctx context.Context, heard <-chan struct{}) {
	for {
		select {
		case <-heard:
			r.Dispatcher.SignalDue()
		case <-ctx.Done():
			return
		}
	}
}

// removeMember removes the row of this process from event_member. Without that, the row is live for a few more seconds.
func (r *Run) removeMember(clock handling.StopClock) {
	ctx, cancel := clock.By(handling.CloseBy)
	defer cancel()
	if err := r.Store.removeMember(ctx); err != nil {
		r.log.Debug("outbox: the row of this process in event_member is not removed, it expires", "error", err)
	}
}
