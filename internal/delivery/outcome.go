package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/wait"
)

// lose ends the batch under way, because one of its deliveries is with another process, or is not the first
// of its key any more.
func (l *lane) lose(r Ref) {
	l.claimed.lose(r)
	l.signalUnknown()
}

// remove notes that an item has ended, so its lease is not renewed any more.
func (l *lane) remove(it *laneItem) {
	it.ended = true
	l.claimed.remove(it.Ref)
}

// lockRows locks the rows of tasks before their handlers run. It is for isolation levels above READ
// COMMITTED, under which a transaction could not finish a row that was renewed meanwhile.
func (l *lane) lockRows(ctx context.Context, tx handling.Tx, tasks []handling.Task) (excluded []int, err error) {
	ids := make(map[int64]bool, len(tasks))
	for _, t := range tasks {
		ids[t.Meta.Origin.DeliveryID] = true
	}
	if err := l.store.LockIn(ctx, tx.Own(), l.deliveriesWith(ids)); err != nil {
		return nil, err
	}
	l.claimed.setLocked(l.ctx, true)
	return nil, nil
}

// transactionEnded is called after a transaction for which lockRows may have locked rows. Unless all of them have ended
// in it, it renews their leases, because they could not be renewed while they were locked.
func (l *lane) transactionEnded(all bool) {
	if l.finishing.Begin == nil {
		return
	}
	l.claimed.setLocked(l.ctx, false)
	if all || !l.mayContinue() {
		return
	}
	ctx, cancel := context.WithTimeout(l.ctx, WriteTimeout)
	defer cancel()
	if _, err := l.store.Renew(ctx, l.claimed.withContext(l.ctx)); err != nil {
		l.log.Warn("outbox: deliveries could not be renewed after a transaction that has not ended them, "+
			"other processes may handle them", "error", err)
	}
}

// complete finishes the deliveries of tasks in the transaction of their handlers.
func (l *lane) complete(ctx context.Context, tx handling.Tx, results []handling.TaskResult) error {
	ids := make(map[int64]bool, len(results))
	for _, r := range results { // an event that is upcast may have several tasks
		ids[r.Meta.Origin.DeliveryID] = true
	}
	for _, r := range results {
		if r.Excluded {
			delete(ids, r.Meta.Origin.DeliveryID)
		}
	}
	if l.finished, l.promoted = l.deliveriesWith(ids), 0; len(l.finished) == 0 {
		return nil
	}
	promoted, err := l.store.FinishIn(ctx, tx.Own(), l.finished, l.session.Restoration(tx, len(results)))
	l.promoted = promoted
	return AsUnfinished(tx, err)
}

// transactionTimeout is the code of a session that transaction_timeout has ended.
const transactionTimeout = "25P04"

// AsUnfinished adds [handling.ErrUnfinished] to an error that was caused by a handler's use of its
// transaction. It returns other errors unchanged.
func AsUnfinished(tx handling.Tx, err error) error {
	switch {
	case pg.Code(err) == transactionTimeout: // before the others: it has ended because of its handlers
	case pg.Code(err) == "", pg.IsTransient(err), errors.Is(err, ErrLost), pg.IsWaitInVain(err):
		return err
	case !tx.ChangedSettings() && (pg.IsOutage(err) || pg.IsLocked(err) || pg.IsCancelled(err)):
		return err
	}
	return fmt.Errorf("%w: %w", handling.ErrUnfinished, err)
}

// sqlRestoreSettings undoes settings of a handler that would keep the statements after it in its
// transaction from working, and bounds these statements. $1 is the role and $2 the user of [SessionSettings], the
// others come from [pg.Session.EndBounds].
const sqlRestoreSettings = `
SELECT CASE WHEN session_user <> $2::text THEN set_config('session_authorization', $2::text, true) END,
       set_config('role', $1::text, true), set_config('lock_timeout', $3::text, true), set_config('statement_timeout', $4::text, true),
       set_config('idle_in_transaction_session_timeout', $5::text, true)`

// Restoration queues statements that prepare the end of a transaction with handlers. It reports whether they undo
// settings that a handler has changed.
type Restoration = func(*pgx.Batch, *pg.Session) (undo bool)

// Restoration returns the one for a transaction with a number of tasks. It undoes settings of handlers if that is
// needed. With a single task, it also undoes settings that functions inside PostgreSQL have changed.
func (s SessionSettings) Restoration(tx handling.Tx, tasks int) Restoration {
	return func(b *pgx.Batch, session *pg.Session) (undo bool) {
		if tx.ChangedSettings() || tasks == 1 {
			b.Queue(sqlRestoreSettings, append([]any{s.Role, s.User}, session.EndBounds()...)...)
		} else {
			guardtx.QueueEnd(b, session)
		}
		return tx.ChangedSettings()
	}
}

// deliveriesWith returns the deliveries of the batch that have these ids.
func (l *lane) deliveriesWith(ids map[int64]bool) []Delivery {
	all := make([]Delivery, 0, len(ids))
	for i := range l.items {
		if it := &l.items[i]; ids[it.ID] {
			all = append(all, it.Delivery)
		}
	}
	return all
}

// promoteFollowers has rows claimed that the last transaction has promoted, which is committed now. Under
// isolation levels above READ COMMITTED they could not be promoted in it, so it promotes them first.
func (l *lane) promoteFollowers() {
	if l.promoted < 0 {
		began := time.Now()
		ctx, cancel := context.WithTimeout(l.cut, WriteTimeout)
		defer cancel()
		var err error
		l.promoted, err = l.store.Promote(ctx, l.finished)
		l.outages.Report(outagePromoting, began, err) // if this fails, RepairHeads promotes them later
	}
	if l.promoted > 0 {
		l.signalDue()
	}
	l.promoted = 0
}

// recordOutcome writes down the outcome of an item whose task is not done.
func (l *lane) recordOutcome(it *laneItem, t handling.Task, o handling.Outcome) {
	switch o.Result {
	case handling.Interrupted:
		l.log.WarnContext(handling.EventContext(l.ctx, &t.Meta),
			"outbox: a delivery was taken over by another process before it was done, its transaction is rolled back",
			handling.EventAttrs(&t.Meta, "action", it.Action, "attempt", t.Meta.Attempt, "error", o.Err)...)
		l.lose(it.Ref)
	case handling.Postponed:
		l.postpone(it, t, o)
	case handling.Stopped: // the rest of the batch is released after a stop
		if _, hung := l.claimed.hungIn(&it.Delivery); !hung && !it.Suspect && mustBeFinished(it, t) {
			_, _ = l.writeFailure(it, Failure{Of: it.Delivery, MaxAttempts: it.MaxAttempts, Code: codeStale, Message: "its process has stopped before it was done", Uncounted: true, Postponed: true})
		}
	case handling.Done: // nothing to write
	case handling.Again:
		l.retry(it, t, o)
	case handling.Dead:
		l.markDead(it, o)
	}
}

// mustBeFinished reports whether a handler without a transaction has begun with an event that may expire, and its row
// does not say so otherwise. The next process handles it after its expiry, too, as a row that was taken over.
func mustBeFinished(it *laneItem, t handling.Task) bool {
	return t.Begun && t.Kind == handling.NoTx && !t.Meta.Expires.IsZero() && it.FirstFailed.IsZero()
}

// postpone has a delivery retried after an outage of PostgreSQL. The attempt does not count.
func (l *lane) postpone(it *laneItem, t handling.Task, o handling.Outcome) {
	f := l.failureOf(it, o)
	f.Uncounted, f.Postponed, f.Wait = true, true, o.Wait
	if mustBeFinished(it, t) {
		f.Code = codeStale
	}
	if _, err := l.writeFailure(it, f); err != nil { // lost: the process that has it now decides
		return
	}
	l.attempts.ReportAgain(&t, o)
	l.signalDue()
	l.retryAt(time.Now().Add(f.Wait))
}

// retry has a failed delivery retried after a wait.
func (l *lane) retry(it *laneItem, t handling.Task, o handling.Outcome) {
	usual := l.cfg.Of(it.Stream).MaxRetries
	if o.Retries > usual || it.FromKafka {
		// The row's maximum bounds attempts whose process was lost, because they leave no error. From here
		// on there may be as many such attempts as for an event that has not failed yet, but no more
		// attempts than the error permits. A requeued delivery that was parked with its last attempt gets
		// more attempts again.
		it.MaxAttempts = max(it.MaxAttempts, Attempts(min(o.Retries, it.Attempt-1+Attempts(usual))))
	}
	f := l.failureOf(it, o)
	f.Uncounted, f.Wait = o.Uncounted, o.Wait
	promoted, err := l.writeFailure(it, f)
	if err != nil { // lost: the process that has it now decides
		return
	}
	l.attempts.ReportAgain(&t, o)
	if promoted > 0 {
		l.signalDue()
	}
	l.retryAt(time.Now().Add(f.Wait))
}

// markDead makes a delivery dead. For a record it sends the dead letter first. As long as that fails, the
// delivery has no attempt left, and the process that claims it next sends the dead letter. A worker cannot send it: the
// next consumer does, see dead_letters.go.
func (l *lane) markDead(it *laneItem, o handling.Outcome) {
	f := l.failureOf(it, o)
	f.Dead, f.Held, f.Uncounted = true, l.cfg.HoldDead, it.hasNoAttemptLeft()
	topic := ""
	switch {
	case it.ValueIn != "": // Kafka has its dead letter
		topic = deadletter.TopicOf(it.ValueIn)
	case it.FromKafka && l.deadLetter == nil:
		f.DeadLetterOwed = true
	case it.FromKafka:
		var place string
		var err error
		if topic, place, err = l.deadLetter(l.ctx, &it.Delivery, o); err != nil {
			l.awaitDeadLetter(it, f, err)
			return
		}
		f.DeadLetter = l.cfg.stripped(f.Code, place)
	}
	if _, err := l.writeFailure(it, f); err != nil { // lost: the process that has it now decides
		return
	}
	l.attempts.ReportDead(it.Meta, topic, o)
	if f.DeadLetterOwed {
		l.log.Warn("outbox: the dead letter of an event from Kafka is not sent, the next consumer of the group sends it",
			handling.EventAttrs(&it.Meta, "action", it.Action, "delivery", it.ID)...)
	}
	l.signalDue()
}

// ErrNotTried is returned for a dead letter that was not sent, because its topic takes nothing and another dead letter
// is being tried.
var ErrNotTried = errors.New("the dead-letter topic takes nothing, and another dead letter is being tried")

// deadLetterWait is how long a delivery waits whose dead letter could not be sent, if the error has no wait. Kafka may
// still get the dead letter in that time.
const deadLetterWait = 10 * time.Second

// awaitDeadLetter has a delivery claimed again after an error, only to send its dead letter. If it was claimed for that
// before, its handler has not failed again.
func (l *lane) awaitDeadLetter(it *laneItem, f Failure, err error) {
	f.Dead, f.Held, f.Wait, f.Last, f.Postponed = false, false, deadLetterWait, !f.Uncounted, f.Uncounted
	if later, ok := handling.WaitOf(err); ok { // Kafka has not taken it, which is reported as an outage
		f.Wait = later
	} else {
		l.log.Warn("outbox: the dead letter of an event cannot be made, it is tried again",
			handling.EventAttrs(&it.Meta, "action", it.Action, "delivery", it.ID, "error", err)...)
	}
	if _, err := l.writeFailure(it, f); err == nil {
		l.retryAt(time.Now().Add(f.Wait))
	}
}

// earlierError is the last error in the row of a delivery from before its claim.
type earlierError struct{ class, message string }

func (e *earlierError) Error() string { return e.message }

// ErrorType names the error for metrics.
func (e *earlierError) ErrorType() string { return e.class }

func (l *lane) failureOf(it *laneItem, o handling.Outcome) Failure {
	return Failure{
		Of: it.Delivery, MaxAttempts: it.MaxAttempts,
		Code: short.Storable(o.Class, 100), Message: short.Storable(o.Message(), short.MaxText),
	}
}

// writeFailure writes a failure down, and parks the deliveries behind it in its key. It retries until that
// succeeds or the delivery is lost.
func (l *lane) writeFailure(it *laneItem, f Failure) (promoted int64, err error) {
	l.flush() // the handled deliveries before it in its key have to finish first
	var rest []Delivery
	for i := range l.items {
		if other := &l.items[i]; other != it && !other.ended && it.Key.Ordered && other.Key == it.Key {
			rest = append(rest, other.Delivery)
		}
	}
	err = l.write(func(ctx context.Context) (err error) {
		promoted, err = l.store.Fail(ctx, f, rest)
		return err
	})
	for i := range l.items {
		if other := &l.items[i]; other == it || !other.ended && it.Key.Ordered && other.Key == it.Key {
			l.remove(other)
		}
	}
	return promoted, err
}

// flush finishes the deliveries that were handled without a transaction.
func (l *lane) flush() {
	l.progress.writing.Lock()
	defer l.progress.writing.Unlock()
	handled := l.progress.takeHandled()
	clear(l.dropped)
	if len(handled) == 0 {
		return
	}
	var promoted int64
	err := l.write(func(ctx context.Context) (err error) {
		promoted, err = l.store.Finish(ctx, handled)
		return err
	})
	if !l.noteLost(handled, err) {
		l.noteFinished(handled, promoted)
	}
}

// relieve is called by the leaseKeeper during a slow call of the lane. It finishes the deliveries that the
// lane has handled, and returns the deliveries that have not begun. The lane will not begin them. If the
// lane is writing itself, no call is running, and relieve does nothing.
func (l *lane) relieve(ctx context.Context) (waiting []Delivery) {
	if !l.progress.writing.TryLock() {
		return nil
	}
	defer l.progress.writing.Unlock()
	if handled := l.progress.takeHandled(); len(handled) > 0 {
		promoted, err := l.store.Finish(ctx, handled)
		switch {
		case l.noteLost(handled, err):
		case err != nil:
			l.progress.putBack(handled)
		default:
			l.noteFinished(handled, promoted)
		}
	}
	return l.progress.takeAhead()
}

// noteLost ends the batch under way if one of its handled deliveries is with another process. It reports
// whether that is so.
func (l *lane) noteLost(handled []Delivery, err error) bool {
	lost := errors.Is(err, ErrLost)
	if lost {
		l.log.Warn("outbox: deliveries were taken over by another process before they were written down as done, "+
			"their handlers run once more", "deliveries", len(handled), "error", err)
		l.lose(handled[0].Ref)
	}
	return lost
}

// noteFinished notes that deliveries have finished, and how many rows were promoted.
func (l *lane) noteFinished(finished []Delivery, promoted int64) {
	for _, d := range finished {
		l.claimed.remove(d.Ref)
	}
	if promoted > 0 {
		l.signalDue()
	}
}

// releaseRest releases the deliveries of the batch that have not ended.
func (l *lane) releaseRest() {
	var rest []Delivery
	for i := range l.items {
		if it := &l.items[i]; !it.ended {
			rest = append(rest, it.Delivery)
		}
	}
	if len(rest) == 0 {
		return
	}
	err := l.write(func(ctx context.Context) error { return l.store.Release(ctx, rest) })
	if err != nil {
		l.signalUnknown()
		if l.cut.Err() == nil {
			l.log.Warn(notReleased, "deliveries", len(rest), "error", err)
		}
	}
	for _, d := range rest {
		l.claimed.remove(d.Ref)
	}
	l.signalDue()
}

// write runs a statement until it succeeds. It stops with the error if the delivery is lost, or the process
// stops.
func (l *lane) write(statement func(context.Context) error) error {
	for {
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(l.ctx), WriteTimeout)
		err := statement(ctx)
		cancel()
		switch {
		case err == nil:
			l.postgresAnswered(began)
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

// LockPause is the pause before a statement is tried again that has waited for a lock in vain.
const LockPause = 100 * time.Millisecond

// WriteTimeout bounds a statement that writes down the outcome of a delivery.
const WriteTimeout = 10 * time.Second

// awaitPostgres reports an outage of PostgreSQL, and waits before the next try. Neither a wait for a lock in vain is an
// outage, for which [leaseKeeper] logs who has the lock, nor a deadlock.
func (l *lane) awaitPostgres(began time.Time, err error) {
	if pg.IsWaitInVain(err) || pg.IsTransient(err) {
		wait.Sleep(l.stopping, LockPause)
		return
	}
	l.outages.Report(handling.OutagePostgres, began, err)
	l.cfg.awaitRetry(l.stopping, l.outages, handling.OutagePostgres)
}

// postgresAnswered ends an outage of PostgreSQL, if there is one.
func (l *lane) postgresAnswered(began time.Time) {
	if l.outages.Failing() {
		l.outages.Report(handling.OutagePostgres, began, nil)
	}
}
