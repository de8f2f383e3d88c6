package delivery

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/contain"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// leaseKeeper renews the leases of this process, takes over expired leases of other processes, watches
// for handlers that hang, finds out who holds locks, reports its state, and counts what waits. Each of its six
// loops is one goroutine.
type leaseKeeper struct {
	cfg        *Rules
	store      *Store
	claimed    *claimedSet
	dispatcher *Dispatcher
	lanes      []*lane
	outages    *outage.Logs
	log        *slog.Logger
	breakers   *handling.ActionBreakers
	hooks      *contain.Callback           // calls hooks for deliveries that no lane has
	confirm    func(context.Context) error // see [Run.Confirm]
	members    *members

	repairedUpTo int64 // the last key whose head was checked; only takeOverLoop
}

const (
	takeOverBatch = 500   // rows that are taken over in a transaction
	headsBatch    = 1_000 // keys whose heads are checked in a statement
	repairEvery   = 10    // rounds of takeOverLoop

	takeOverTimeout = 30 * time.Second

	confirmEvery = 10 * time.Minute
)

// renewLoop renews leases until ctx is cancelled.
func (k *leaseKeeper) renewLoop(ctx context.Context) {
	for ctx.Err() == nil {
		pause := k.cfg.Lease / 3
		if k.tryRenew(ctx) != nil {
			pause = k.cfg.Lease / retryShare
		}
		wait.Sleep(ctx, pause)
	}
}

// tryRenew renews, and reports the result if there was anything to renew.
func (k *leaseKeeper) tryRenew(ctx context.Context) error {
	began := time.Now()
	try, cancel := context.WithTimeout(ctx, k.cfg.Lease/3)
	defer cancel()
	tried, err := k.renew(try)
	if tried && ctx.Err() == nil {
		k.outages.Report(outageRenewing, began, err)
	}
	return err
}

// renew renews the leases of all claimed deliveries, if there are any. Claims that could not be renewed for longer than
// the lease are lost.
func (k *leaseKeeper) renew(ctx context.Context) (tried bool, err error) {
	began := time.Now()
	rows := k.claimed.renewable()
	if tried = len(rows) > 0; tried {
		rows, err = k.store.Renew(ctx, rows)
	}
	if err != nil {
		rows = nil
	}
	if lost := k.claimed.noteRenewed(rows, began, k.cfg.Lease); lost > 0 {
		k.log.Warn("outbox: the leases of deliveries could not be renewed in time, other processes may handle them",
			"batches", lost)
	}
	return tried, err
}

// retryShare says after which part of a lease PostgreSQL is tried again in an outage. It is less than the
// half lease after which other processes take over, see takeOverLoop.
const retryShare = 6

// awaitRetry waits before PostgreSQL is tried again in an outage of this name.
func (c *Rules) awaitRetry(ctx context.Context, outages *outage.Logs, what string) {
	wait.Sleep(ctx, min(outages.Backoff(what), c.Lease/retryShare))
}

// watchLoop logs handlers that run for long, and abandons those that hang, until ctx is cancelled.
func (k *leaseKeeper) watchLoop(ctx context.Context) {
	const interval = time.Second
	for ctx.Err() == nil {
		pause := min(interval, k.cfg.SlowHandler/2)
		if k.cfg.SpareAfter > 0 {
			pause = min(pause, k.cfg.SpareAfter/2)
		}
		wait.Sleep(ctx, pause)
		for _, l := range k.lanes {
			l.slow.Report(&l.activity, l.cfg.SlowHandler, l.log)
			slots := l.held.Call() // before the call is looked at: it has these slots, if it hangs
			if call, ok := l.activity.Current(); ok && time.Since(call.Began) > k.cfg.HandlerTimeout+handling.StuckGrace {
				lost := k.claimed.giveUp(call)
				l.activity.Sever() // the next process waits for the note in event_handled as long as the transaction lives
				l.held.GiveUp(slots)
				if lost {
					k.dispatcher.noteBegun(ctx, call)
				}
				k.release(ctx, k.claimed.othersOf(call))
			}
		}
		k.relieveLanes(ctx)
	}
}

// holderLoop looks for sessions that hold locks for which statements of this process wait, until ctx is cancelled. A
// lock wait that has ended shows no holder, so it looks during the waits. It ends a session of another process of this
// kind whose transaction has taken longer than any that is not given up.
func (k *leaseKeeper) holderLoop(ctx context.Context) {
	const often = 500 * time.Millisecond
	bound := 2 * handling.LimitsOf(k.cfg.HandlerTimeout).Call
	for ctx.Err() == nil {
		wait.Sleep(ctx, often)
		k.lookForHolders(ctx, bound)
	}
}

func (k *leaseKeeper) lookForHolders(ctx context.Context, bound time.Duration) {
	began := time.Now()
	holders, looked, err := k.store.waits.Look(ctx, k.store.db, k.cfg.Schema, bound)
	if !looked && k.outages.Fails(outageHolders) { // nothing may wait any more
		err = pg.Beside(ctx, k.store.db, func(conn *pgx.Conn) error { return conn.Ping(ctx) })
		looked = true
	}
	if looked && ctx.Err() == nil && (err != nil || k.outages.Failing()) {
		k.outages.Report(outageHolders, began, err)
	}
	for _, h := range holders {
		message := "outbox: statements wait for a lock that another session holds"
		if h.Ended {
			message = "outbox: a session was ended, because statements waited for its lock and its transaction took too long"
		}
		k.log.Warn(message, h.Attrs()...)
	}
}

// reportLoop renews the row of this process within a second after what it says of itself has changed, until ctx is
// cancelled. If that fails, takeOverLoop renews the row later.
func (k *leaseKeeper) reportLoop(ctx context.Context) {
	const often = time.Second
	for ctx.Err() == nil {
		wait.Sleep(ctx, min(often, k.cfg.Lease/3))
		if k.members.hasNews() {
			_ = k.renewMember(ctx) // its outage is reported
		}
	}
}

// memberTimeout bounds how long the row of this process is renewed: a process without events notices an outage of
// PostgreSQL by that.
const memberTimeout = 5 * time.Second

// renewMember renews the row of this process, and reports the result.
func (k *leaseKeeper) renewMember(ctx context.Context) error {
	began := time.Now()
	try, cancel := context.WithTimeout(ctx, min(memberTimeout, k.cfg.Lease/3))
	defer cancel()
	err := k.members.renew(try)
	if ctx.Err() == nil {
		k.outages.Report(OutageMember, began, err)
	}
	return err
}

// lookLoop counts what the group has to handle, for Health, until ctx is cancelled.
func (k *leaseKeeper) lookLoop(ctx context.Context) {
	for ctx.Err() == nil {
		k.members.look(ctx, k.log)
		wait.Sleep(ctx, k.members.every)
	}
}

// relieveLanes releases deliveries that wait behind slow handlers. Deliveries in the same
// transaction as a slow handler have to wait for its end.
func (k *leaseKeeper) relieveLanes(ctx context.Context) {
	for _, kind := range k.dispatcher.Kinds {
		waiting, replaced := kind.takeFromSlow()
		k.release(ctx, waiting)
		if replaced {
			wait.Signal(k.dispatcher.changed)
		}
		for _, l := range kind.slowLanes() {
			if !l.tx {
				bounded, cancel := context.WithTimeout(ctx, WriteTimeout)
				waiting := l.relieve(bounded)
				cancel()
				k.release(ctx, waiting)
			}
		}
	}
}

// release releases deliveries that lanes will not begin.
func (k *leaseKeeper) release(ctx context.Context, waiting []Delivery) {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	k.dispatcher.release(ctx, waiting)
}
