package delivery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// takeOverLoop takes over deliveries whose leases have expired, until ctx is cancelled. It runs separately
// from renewLoop, so that renewing never waits for a long take-over.
//
// In an outage of PostgreSQL no process can renew its leases, and the processes come back one after the
// other. Therefore the loop takes nothing over until PostgreSQL has answered this process for half a lease.
// TakeOver waits as long after a start of PostgreSQL. A process that starts waits too, because the outage
// may have restarted it.
func (k *leaseKeeper) takeOverLoop(ctx context.Context) {
	k.repairedUpTo = math.MinInt64
	round := takeOverRound{confirmed: time.Now(), clockChecks: 1}
	for ; ctx.Err() == nil; round.n++ {
		k.tryTakeOver(ctx, &round)
		pause := k.cfg.Lease / 3
		if remaining := round.answers.remaining(k.cfg.Lease / 2); remaining > 0 {
			pause = min(pause, remaining)
		}
		wait.Sleep(ctx, pause)
	}
}

// tryTakeOver is a round of takeOverLoop. A round that leaves out the step that has failed ends no outage.
func (k *leaseKeeper) tryTakeOver(ctx context.Context, round *takeOverRound) {
	try, cancel := context.WithTimeout(ctx, takeOverTimeout)
	defer cancel()
	began := time.Now()
	err := k.renewMember(try)
	round.answers.note(err, time.Since(began) > k.cfg.Lease/3)
	if err != nil {
		return
	}
	began = time.Now()
	err = k.takeOverOnce(try, round)
	if try.Err() != nil || pg.Code(err) == "" || pg.IsOutage(err) { // not if PostgreSQL has answered, with an error
		round.answers.note(err, false)
	}
	if ctx.Err() == nil && (err != nil || !round.failed) {
		k.outages.Report(outageTakingOver, began, err)
	}
	if ctx.Err() == nil && err == nil && len(k.claimed.renewable()) == 0 {
		k.outages.Report(outageRenewing, began, nil) // there may be nothing more to renew, and PostgreSQL takes writes
	}
}

// takeOverRound is the state that takeOverLoop keeps between rounds.
type takeOverRound struct {
	n         int
	repairs   bool // heads are to be repaired
	failed    bool // the last try to take over deliveries has failed
	answers   answering
	announced bool      // the deliveries of other processes are logged
	confirmed time.Time // the last success of confirm

	clockChecks int // how often deliveries are to be looked for that wait because the clock was set back
}

// takeOverOnce confirms, saves successes, takes over, repairs heads, retries dead deliveries, and looks for what waits
// because the clock was set back, each when its time has come. A step that fails keeps no other one from its work. The
// first two have little to do, and others suffer for long if they do not.
func (k *leaseKeeper) takeOverOnce(ctx context.Context, round *takeOverRound) error {
	var errs []error
	for _, step := range []func(context.Context, *takeOverRound) error{
		k.confirmAtTimes, k.saveSuccesses, k.takeOverInTime, k.repairAtTimes, k.retryDead, k.checkClock,
	} {
		if err := step(ctx, round); err != nil {
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// confirmAtTimes confirms once in confirmEvery.
func (k *leaseKeeper) confirmAtTimes(ctx context.Context, round *takeOverRound) error {
	began := time.Now()
	if k.confirm == nil || began.Sub(round.confirmed) <= confirmEvery {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	if err := k.confirm(ctx); err != nil {
		return fmt.Errorf("confirm the handlers of this process: %w", err)
	}
	round.confirmed = began
	return nil
}

// takeOverInTime takes over if PostgreSQL has answered for long enough.
func (k *leaseKeeper) takeOverInTime(ctx context.Context, round *takeOverRound) error {
	if !round.announced {
		if err := k.announceOthers(ctx); err != nil {
			return err
		}
		round.announced = true
	}
	if round.answers.remaining(k.cfg.Lease/2) > 0 {
		return nil
	}
	err := k.takeOver(ctx)
	round.failed = err != nil
	return err
}

// repairAtTimes repairs heads and reports what is unhandled once in repairEvery rounds, and again after a failure.
func (k *leaseKeeper) repairAtTimes(ctx context.Context, round *takeOverRound) error {
	round.repairs = round.repairs || round.n%repairEvery == 0
	if !round.repairs {
		return nil
	}
	err := k.repairHeads(ctx)
	if err == nil {
		err = k.reportUnhandled(ctx)
	}
	round.repairs = err != nil
	return err
}

// checkClock looks for what waits because the clock was set back, if it was.
func (k *leaseKeeper) checkClock(ctx context.Context, round *takeOverRound) error {
	if k.store.expiring.wasSetBack() {
		round.clockChecks = 2 // a transaction may end behind the first one
	}
	if round.clockChecks == 0 {
		return nil
	}
	err := k.dueAgain(ctx)
	if err == nil {
		round.clockChecks--
	}
	return err
}

// dueAgain has deliveries wait no longer than they had to before the clock of the database was set back.
func (k *leaseKeeper) dueAgain(ctx context.Context) error {
	for {
		rows, err := k.store.dueAgain(ctx, takeOverBatch)
		if err != nil {
			return err
		}
		if rows > 0 {
			k.log.Warn("outbox: the clock of PostgreSQL was set back; deliveries wait no longer for that", "deliveries", rows)
			k.dispatcher.SignalHeads()
		}
		if rows < takeOverBatch {
			return nil
		}
	}
}

// announceOthers logs once how many deliveries other processes have claimed. This process may be the
// restart of a killed process. Then later deliveries of their keys wait until the leases have expired.
func (k *leaseKeeper) announceOthers(ctx context.Context) error {
	rows, more, longest, err := k.store.countOthers(ctx)
	if more {
		longest = max(longest, k.cfg.Lease) // the leases that were not read end later
	}
	if rows > 0 {
		k.log.Info("outbox: other processes have deliveries, and later ones of the same keys wait for them; "+
			"the deliveries of a process that is gone are taken over within at_most",
			"deliveries", rows, "more", more, "at_most", (max(longest, k.cfg.Lease/2) + k.cfg.Lease/3).Round(time.Millisecond))
	}
	return err
}

// answering records since when PostgreSQL has answered one goroutine. A zero time means that it does not
// answer.
type answering struct{ since time.Time }

// note records the result of a try. A slow success may have waited for the end of an outage, so time counts
// from its end.
func (a *answering) note(err error, slow bool) {
	switch {
	case err != nil:
		a.since = time.Time{}
	case slow || a.since.IsZero():
		a.since = time.Now()
	}
}

// remaining returns how long it takes until PostgreSQL has answered for a time.
func (a *answering) remaining(enough time.Duration) time.Duration {
	if a.since.IsZero() {
		return enough
	}
	return enough - time.Since(a.since)
}

// takeOver takes over all deliveries whose leases have expired.
func (k *leaseKeeper) takeOver(ctx context.Context) error {
	for {
		rows, err := k.store.TakeOver(ctx, takeOverBatch, k.cfg.HoldDead)
		if err != nil {
			return err
		}
		for _, e := range rows {
			level, message := slog.LevelWarn, "outbox: the lease of a delivery has expired, it is retried by itself"
			if e.Dead {
				level, message = slog.LevelError, "outbox: event is dead, its lease has expired in its last attempt"
			}
			k.log.Log(ctx, level, message, "stream", e.Stream, "type", e.Type, "event_id", e.EventID,
				"aggregate_type", e.AggregateType, "aggregate_id", e.AggregateID,
				"action", e.Action, "attempt", e.Attempt, "delivery_id", e.ID)
		}
		if len(rows) > 0 {
			k.dispatcher.signalSuspects()
			k.members.notify()
			k.hooks.Notify(ctx, func() { k.notify(rows) })
		}
		if len(rows) < takeOverBatch {
			return nil
		}
	}
}

// notify calls hooks for deliveries that were taken over.
func (k *leaseKeeper) notify(rows []Expired) {
	h := k.cfg.Hooks
	for _, e := range rows {
		m := ReceivedOf(&Delivery{
			Ref: Ref{ID: e.ID}, EventID: e.EventID, Type: e.Type, Stream: e.Stream, Attempt: e.Attempt,
			PartitionKey: e.RecordKey, FromKafka: e.FromKafka, Partition: e.Partition, Position: e.Position,
		}, new(envelope.Origin))
		if h.Failed != nil {
			h.Failed(&m, e.Action, errGone, !e.Dead)
		}
		if e.Dead && h.DeadLettered != nil {
			h.DeadLettered(&m, e.Action, "", errGone)
		}
	}
}

// goneError is the error of an attempt whose process has ended.
type goneError struct{}

var errGone = goneError{}

func (goneError) Error() string { return "the process that had the event was gone before it was done" }

// ErrorType names the error for metrics.
func (goneError) ErrorType() string { return codeStale }

// reportUnhandled logs, once for each type, that deliveries wait for a handler that no process of the group has.
func (k *leaseKeeper) reportUnhandled(ctx context.Context) error {
	kinds, err := k.store.unhandled(ctx)
	if err != nil {
		return err
	}
	for _, u := range k.members.fresh(kinds) {
		k.log.Warn("outbox: deliveries wait, no process of the group has a handler for them at the moment",
			"type", u.Type, "stream", u.Stream, "action", u.Action)
	}
	return nil
}

// retryDead requeues deliveries that have been dead for as long as RetryDeadAfter says.
func (k *leaseKeeper) retryDead(ctx context.Context, _ *takeOverRound) error {
	if len(k.cfg.RetryDeadAfter) == 0 {
		return nil
	}
	retried, err := k.store.retryDead(ctx, k.cfg.RetryDeadAfter, k.cfg.HoldDead)
	if retried > 0 {
		k.log.Info("outbox: dead deliveries are retried, as RetryDeadAfter says", "deliveries", retried)
		k.dispatcher.SignalHeads()
	}
	return err
}

// saveSuccesses tells the other processes when actions have last succeeded here.
func (k *leaseKeeper) saveSuccesses(ctx context.Context, _ *takeOverRound) error {
	unsaved := k.breakers.Unsaved()
	if len(unsaved) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	if err := k.store.SaveSuccesses(ctx, unsaved); err != nil {
		return err
	}
	k.breakers.NoteSaved(unsaved)
	return nil
}

// repairHeads promotes the first delivery of keys whose deliveries are all parked.
func (k *leaseKeeper) repairHeads(ctx context.Context) error {
	began := time.Now()
	last, repaired, err := k.store.RepairHeads(ctx, k.repairedUpTo, headsBatch)
	if err != nil {
		return err
	}
	k.outages.Report(outagePromoting, began, nil) // a lane that has failed to promote may have nothing more to promote
	k.repairedUpTo = last
	if repaired > 0 {
		k.log.Warn("outbox: all deliveries of some keys were parked; the first one of each key is due now", "keys", repaired)
		k.dispatcher.SignalHeads()
	}
	return nil
}
