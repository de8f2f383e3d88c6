package delivery

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// keeper renews the leases of what a worker has, and takes what workers had that are gone.
type keeper struct {
	cfg        *Rules
	store      *Store
	hands      *hands
	dispatcher *Dispatcher
	lanes      []*lane
	outages    *outage.Logs
	log        *slog.Logger
	hooks      *contain.Callback // calls the hooks of what no lane has
	confirm    func(context.Context) error

	repaired int64 // the last key whose head was looked at
}

const (
	expireBatch = 500   // rows that are taken over in a transaction
	headsBatch  = 1_000 // keys whose heads are looked at in a statement
	repairOften = 10    // every so many rounds

	takeOverTimeout = 30 * time.Second

	confirmEvery = 10 * time.Minute // that this process still takes what it took
)

// run renews leases until ctx is cancelled.
func (k *keeper) run(ctx context.Context) {
	for ctx.Err() == nil {
		began, pause := time.Now(), k.cfg.Lease/3
		try, cancel := context.WithTimeout(ctx, k.cfg.Lease/3)
		err := k.renew(try)
		cancel()
		if ctx.Err() == nil {
			k.outages.Report(outageRenewing, began, err)
		}
		if err != nil {
			pause = k.cfg.Lease / backShare
		}
		wait.Sleep(ctx, pause)
	}
}

// backShare is in which part of a lease a worker looks whether PostgreSQL is back: sooner than others
// take over what it has, see takeOver.
const backShare = 6

// awaitAgain waits before PostgreSQL is tried again.
func (c *Rules) awaitAgain(ctx context.Context, outages *outage.Logs) {
	wait.Sleep(ctx, min(outages.Backoff(handling.OutagePostgres), c.Lease/backShare))
}

// takeOver takes rows from workers that are gone, until ctx is cancelled. It works beside run, because
// leases do not wait for what may be much.
//
// In an outage of PostgreSQL no worker can renew what it has, and they come back one after the other.
// So it takes nothing until PostgreSQL has answered here for half a lease, as long as Expire waits after
// a start of PostgreSQL. This process may have been started because of the outage, so it waits, too.
func (k *keeper) takeOver(ctx context.Context) {
	k.repaired = math.MinInt64
	confirmed := time.Now()
	var answers answering
	announced := false
	for n := 0; ctx.Err() == nil; n++ {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, takeOverTimeout)
		err := k.store.Check(try)
		answers.note(err, time.Since(began) > k.cfg.Lease/3)
		if err == nil && !announced {
			err = k.announceOthers(try)
			announced = err == nil
		}
		if err == nil && answers.rest(k.cfg.Lease/2) <= 0 {
			err = k.expire(try)
		}
		if err == nil && n%repairOften == 0 {
			err = k.repair(try)
		}
		if err == nil && len(k.cfg.RetryDeadAfter) > 0 {
			err = k.retryDead(try)
		}
		if err == nil && k.confirm != nil && time.Since(confirmed) > confirmEvery {
			if err = k.confirm(try); err == nil {
				confirmed = began
			}
		}
		cancel()
		answers.note(err, false)
		if ctx.Err() == nil {
			k.outages.Report(outageTakingOver, began, err)
		}
		pause := k.cfg.Lease / 3
		if rest := answers.rest(k.cfg.Lease / 2); rest > 0 {
			pause = min(pause, rest)
		}
		wait.Sleep(ctx, pause)
	}
}

// announceOthers says once what a worker waits for that has just begun, and may be the restart of one that
// was killed: for the keys of deliveries that others have.
func (k *keeper) announceOthers(ctx context.Context) error {
	rows, longest, err := k.store.Others(ctx)
	if rows > 0 {
		k.log.Info("outbox: other workers have deliveries, for which later ones of their keys wait; those of a worker that is gone are taken over within at_most",
			"deliveries", rows, "at_most", (max(longest, k.cfg.Lease/2) + k.cfg.Lease/3).Round(time.Millisecond))
	}
	return err
}

// answering is since when PostgreSQL answers, as far as one goroutine knows.
type answering struct{ since time.Time } // zero: it does not

// note takes the result of a try. One that took long may have waited for the end of an outage.
func (a *answering) note(err error, long bool) {
	switch {
	case err != nil:
		a.since = time.Time{}
	case long || a.since.IsZero():
		a.since = time.Now()
	}
}

// rest returns how long it takes until PostgreSQL has answered for some time.
func (a *answering) rest(enough time.Duration) time.Duration {
	if a.since.IsZero() {
		return enough
	}
	return enough - time.Since(a.since)
}

// renew renews what is here. What could not be renewed for as long as the lease lasts is lost.
func (k *keeper) renew(ctx context.Context) (err error) {
	began := time.Now()
	rows := k.hands.all()
	if len(rows) > 0 {
		rows, err = k.store.Renew(ctx, rows)
	}
	if err != nil {
		rows = nil
	}
	if lost := k.hands.renewedAt(rows, began, k.cfg.Lease); lost > 0 {
		k.log.Warn("outbox: the leases of deliveries could not be renewed in time, others may handle them", "batches", lost)
	}
	return err
}

// expire takes rows from workers that are gone.
func (k *keeper) expire(ctx context.Context) error {
	for {
		rows, err := k.store.Expire(ctx, expireBatch, k.cfg.HoldDead)
		if err != nil {
			return err
		}
		for _, e := range rows {
			level, message := slog.LevelWarn, "outbox: the worker of a delivery is gone, it is handled again by itself"
			if e.Dead {
				level, message = slog.LevelError, "outbox: delivery is dead, the workers that had it were gone before it was done, each time"
			}
			k.log.Log(ctx, level, message, "stream", e.Stream, "type", e.Type, "event_id", e.EventID, "aggregate_type", e.AggregateType, "aggregate_id", e.AggregateID,
				"action", e.Action, "attempt", e.Attempt, "delivery_id", e.ID)
		}
		if len(rows) > 0 {
			k.dispatcher.signalExpired()
			k.hooks.Notify(ctx, func() { k.notify(rows) })
		}
		if len(rows) < expireBatch {
			return nil
		}
	}
}

// retryDead gives deliveries their attempts again that have been dead for as long as the host wants.
func (k *keeper) retryDead(ctx context.Context) error {
	retried, err := k.store.RetryDead(ctx, k.cfg.RetryDeadAfter)
	if retried > 0 {
		k.log.Info("outbox: dead deliveries are tried again, as RetryDeadAfter says", "deliveries", retried)
		k.dispatcher.SignalDue()
	}
	return err
}

// notify calls hooks for rows of workers that are gone.
func (k *keeper) notify(rows []Expired) {
	h := k.cfg.Hooks
	for _, e := range rows {
		m := ReceivedOf(&Delivery{
			Ref: Ref{ID: e.ID}, EventID: e.EventID, Type: e.Type, Stream: e.Stream, Attempt: e.Attempt,
			PartitionKey: e.RecordKey, FromKafka: e.FromKafka, Partition: e.Partition, Position: e.Position,
		}, new(envelope.Origin))
		if h.Failed != nil {
			h.Failed(&m, e.Action, errGone)
		}
		switch {
		case e.Dead && h.DeadLettered != nil:
			h.DeadLettered(&m, e.Action, "", errGone)
		case !e.Dead && h.Retried != nil:
			h.Retried(&m, e.Action, errGone)
		}
	}
}

// goneError is the error of an attempt whose process has ended.
type goneError struct{}

var errGone = goneError{}

func (goneError) Error() string { return "the worker that had the event was gone before it was done" }

// ErrorType names the error for metrics.
func (goneError) ErrorType() string { return CodeStale }

// repair looks for keys whose rows all wait.
func (k *keeper) repair(ctx context.Context) error {
	last, repaired, err := k.store.RepairHeads(ctx, k.repaired, headsBatch)
	if err != nil {
		return err
	}
	k.repaired = last
	if repaired > 0 {
		k.log.Warn("outbox: deliveries waited behind none; somebody else has changed event_delivery", "keys", repaired)
		k.dispatcher.SignalDue()
	}
	return nil
}

// watch reports handlers that run for long, and gives up those that hang, until ctx is cancelled.
func (k *keeper) watch(ctx context.Context) {
	const often = time.Second
	for ctx.Err() == nil {
		wait.Sleep(ctx, min(often, k.cfg.SlowHandler/2))
		for _, l := range k.lanes {
			l.slow.Report(&l.activity, l.cfg.SlowHandler, l.log)
			if call, ok := l.activity.Current(); ok && time.Since(call.Began) > k.cfg.HandlerTimeout+handling.StuckGrace {
				k.hands.loseAll(call.Place.DeliveryID)
				l.activity.Sever() // or whoever takes the event waits for its note in event_handled
				k.giveBack(ctx, k.hands.beside(call))
			}
		}
		k.relieve(ctx)
	}
}

// relieve gives back what waits behind handlers that take long. What came with a handler's event in its transaction
// waits for that.
func (k *keeper) relieve(ctx context.Context) {
	for _, kind := range k.dispatcher.Kinds {
		k.giveBack(ctx, kind.takeFromSlow())
		for _, l := range kind.slowLanes() {
			if !l.tx {
				bounded, cancel := context.WithTimeout(ctx, WriteTimeout)
				rest := l.relieve(bounded)
				cancel()
				k.giveBack(ctx, rest)
			}
		}
	}
}

// giveBack gives back what lanes do not get to.
func (k *keeper) giveBack(ctx context.Context, waiting []Delivery) {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	k.dispatcher.giveBack(ctx, waiting)
}
