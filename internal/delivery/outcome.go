package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// lose ends the work on the batch, of which a delivery is not with this worker any more, or not the first of its key.
func (l *lane) lose(r Ref) {
	l.hands.lose(r)
	l.lost()
}

// drop notes that a delivery is not with this worker any more.
func (l *lane) drop(it *laneItem) {
	it.gone = true
	l.hands.drop(it.Ref)
}

// complete ends the deliveries of tasks, in the transaction of their handlers.
func (l *lane) complete(ctx context.Context, tx handling.Tx, results []handling.TaskResult) error {
	ids := map[int64]bool{}
	for _, r := range results { // an event that is upcast may have several tasks
		ids[r.Meta.Origin.DeliveryID] = true
	}
	l.finished, l.promotedIn = l.those(ids), 0
	// Functions inside PostgreSQL may have changed settings, too.
	if tx.ChangedSettings() || len(results) == 1 {
		if _, err := tx.Own().Exec(ctx, SQLOwnSettings, l.session.Role, l.session.User); err != nil {
			return Unfinished(tx, err)
		}
	}
	promoted, err := l.store.FinishIn(ctx, tx.Own(), l.finished)
	l.promotedIn = promoted
	return Unfinished(tx, err)
}

// Unfinished says if an error is due to what a handler has done to its transaction.
func Unfinished(tx handling.Tx, err error) error {
	switch {
	case pg.Code(err) == "", pg.IsTransient(err), errors.Is(err, ErrLost):
		return err
	case !tx.ChangedSettings() && (pg.IsOutage(err) || pg.IsLocked(err) || pg.IsCancelled(err)):
		return err
	}
	return fmt.Errorf("%w: %w", handling.ErrUnfinished, err)
}

// SQLOwnSettings undoes what a handler has set for its transaction, and what would keep
// statements of the worker from working.
const SQLOwnSettings = `
SELECT CASE WHEN session_user <> $2::text THEN set_config('session_authorization', $2::text, true) END, set_config('role', $1::text, true), set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true)`

// those returns the deliveries with these ids.
func (l *lane) those(ids map[int64]bool) (all []Delivery) {
	for i := range l.work {
		if it := &l.work[i]; ids[it.ID] {
			all = append(all, it.Delivery)
		}
	}
	return all
}

// promoteBehind has rows claimed that were promoted in a transaction which is committed now. Under
// another isolation level than READ COMMITTED they still have to be.
func (l *lane) promoteBehind() {
	if l.promotedIn < 0 {
		began := time.Now()
		var err error
		l.promotedIn, err = l.store.Promote(l.cut, l.finished)
		l.outages.Report(outagePromoting, began, err) // if it fails, what repairs heads does it
	}
	if l.promotedIn > 0 {
		l.promoted()
	}
	l.promotedIn = 0
}

// postpone has a delivery tried again after an outage of PostgreSQL, without counting an attempt.
func (l *lane) postpone(it *laneItem, t handling.Task, o handling.Outcome) {
	f := l.failureOf(it, o)
	f.Uncounted, f.Wait = true, o.Wait
	if _, err := l.writeFailure(it, f); err != nil { // lost: whoever has it now decides
		return
	}
	l.attempts.ReportAgain(&t, o)
	l.breakers.Forget(it.Action)
	l.promoted()
	l.retryAt(time.Now().Add(f.Wait))
}

// again has a delivery tried again that has failed.
func (l *lane) again(it *laneItem, t handling.Task, o handling.Outcome) {
	usual := l.cfg.Of(it.Stream).MaxRetries
	if o.Retries > usual || it.FromKafka {
		// Workers that are gone count, too, and know of no error: from here on they may use up
		// as many attempts as of an event that has not failed yet, or as there are. Of what was parked with its
		// last attempt, and requeued, there are more again.
		it.MaxAttempts = max(it.MaxAttempts, Attempts(min(o.Retries, it.Attempt-1+Attempts(usual))))
	}
	f := l.failureOf(it, o)
	f.Wait = o.Wait
	promoted, err := l.writeFailure(it, f)
	if err != nil { // lost: whoever has it now decides
		return
	}
	l.attempts.ReportAgain(&t, o)
	if promoted > 0 {
		l.promoted()
	}
	l.retryAt(time.Now().Add(f.Wait))
}

// giveUp makes a delivery dead. Of a record it sends the dead letter before: while that cannot
// be sent, the delivery has no attempt left, and whoever claims it next sends it.
func (l *lane) giveUp(it *laneItem, o handling.Outcome) {
	f := l.failureOf(it, o)
	f.Dead, f.Held, f.Uncounted = true, l.cfg.HoldDead, it.isSpent()
	topic := ""
	if l.deadLetter != nil {
		var err error
		if topic, err = l.deadLetter(l.held, &it.Delivery, o); err != nil {
			l.awaitDeadLetter(it, f)
			return
		}
	}
	if _, err := l.writeFailure(it, f); err != nil { // lost: whoever has it now decides
		return
	}
	l.attempts.ReportDead(it.Meta, topic, o)
	l.promoted()
}

// unsentWait is how long a delivery waits whose dead letter was not sent.
const unsentWait = 5 * time.Second

// awaitDeadLetter has a delivery claimed again that is given up when its dead letter is sent.
func (l *lane) awaitDeadLetter(it *laneItem, f Failure) {
	f.Dead, f.Held, f.Wait, f.Last = false, false, unsentWait, !f.Uncounted
	if _, err := l.writeFailure(it, f); err == nil {
		l.retryAt(time.Now().Add(f.Wait))
	}
}

// pastError is the error of an attempt that was made before its delivery was claimed.
type pastError struct{ class, message string }

func (e *pastError) Error() string { return e.message }

// ErrorType names the error for metrics.
func (e *pastError) ErrorType() string { return e.class }

func (l *lane) failureOf(it *laneItem, o handling.Outcome) Failure {
	return Failure{Of: it.Delivery, Code: short.Storable(o.Class, 100), Message: short.Storable(o.Err.Error(), short.MaxText), MaxAttempts: it.MaxAttempts}
}

// writeFailure writes a failure down, until that is done or the delivery is lost. The deliveries behind it in
// its key wait behind it again.
func (l *lane) writeFailure(it *laneItem, f Failure) (promoted int64, err error) {
	l.flush() // of its key, what is handled is done before
	var rest []Delivery
	for i := range l.work {
		if other := &l.work[i]; other != it && !other.gone && it.Key.Ordered && other.Key == it.Key {
			rest = append(rest, other.Delivery)
		}
	}
	err = l.write(func(ctx context.Context) (err error) {
		promoted, err = l.store.Fail(ctx, f, rest)
		return err
	})
	for i := range l.work {
		if other := &l.work[i]; other == it || !other.gone && it.Key.Ordered && other.Key == it.Key {
			l.drop(other)
		}
	}
	return promoted, err
}

// flush writes down what is handled without a transaction.
func (l *lane) flush() {
	l.progress.writing.Lock()
	defer l.progress.writing.Unlock()
	done := l.progress.takeDone()
	if len(done) == 0 {
		return
	}
	var promoted int64
	err := l.write(func(ctx context.Context) (err error) {
		promoted, err = l.store.Finish(ctx, done)
		return err
	})
	if !l.noteLost(done, err) {
		l.forget(done, promoted)
	}
}

// relieve writes down what a lane has handled that is at a call for long, and returns what it has not begun: it does not
// any more. If the lane is at no call, but writes itself, there is nothing to do.
func (l *lane) relieve(ctx context.Context) (rest []Delivery) {
	if !l.progress.writing.TryLock() {
		return nil
	}
	defer l.progress.writing.Unlock()
	if done := l.progress.takeDone(); len(done) > 0 {
		promoted, err := l.store.Finish(ctx, done)
		switch {
		case l.noteLost(done, err):
		case err != nil:
			l.progress.putBack(done)
		default:
			l.forget(done, promoted)
		}
	}
	return l.progress.takeAhead()
}

// noteLost ends the work on the batch if one of its deliveries that are done is with another worker.
func (l *lane) noteLost(done []Delivery, err error) bool {
	lost := errors.Is(err, ErrLost)
	if lost {
		l.log.Warn("outbox: deliveries were taken over by another worker before they were written down as done; their handlers run once more", "deliveries", len(done), "error", err)
		l.lose(done[0].Ref) // and with them what is behind them
	}
	return lost
}

// forget notes that deliveries are not with this worker any more, and that some were promoted with that.
func (l *lane) forget(done []Delivery, promoted int64) {
	for _, d := range done {
		l.hands.drop(d.Ref)
	}
	if promoted > 0 {
		l.promoted()
	}
}

// giveBack gives back what was not tried.
func (l *lane) giveBack() {
	var rest []Delivery
	for i := range l.work {
		if it := &l.work[i]; !it.gone {
			rest = append(rest, it.Delivery)
		}
	}
	if len(rest) == 0 {
		return
	}
	if err := l.write(func(ctx context.Context) error { return l.store.Return(ctx, rest) }); err != nil && l.cut.Err() == nil {
		l.log.Warn("outbox: deliveries are not given back, others wait until their lease expires", "deliveries", len(rest), "error", err)
	}
	for _, d := range rest {
		l.hands.drop(d.Ref)
	}
	l.promoted()
}

// write runs a statement until it works. It gives up if that is lost which it is about, or with
// the stop of the worker.
func (l *lane) write(statement func(context.Context) error) error {
	for {
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(l.held), WriteTimeout)
		err := statement(ctx)
		cancel()
		switch {
		case err == nil:
			l.works(began)
			return nil
		case errors.Is(err, ErrLost), l.cut.Err() != nil:
			return err
		}
		l.awaitPostgres(began, err)
		if l.stopping.Err() != nil {
			return err
		}
	}
}

// WriteTimeout bounds a statement with which a worker writes down what became of a delivery.
const WriteTimeout = 10 * time.Second

// awaitPostgres waits a little while PostgreSQL is unavailable.
func (l *lane) awaitPostgres(began time.Time, err error) {
	l.outages.Report(handling.OutagePostgres, began, err)
	l.cfg.awaitAgain(l.stopping, l.outages)
}

// works ends an outage of PostgreSQL, if there is one.
func (l *lane) works(began time.Time) {
	if l.outages.Failing() {
		l.outages.Report(handling.OutagePostgres, began, nil)
	}
}
