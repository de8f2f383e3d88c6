package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

// Save stores results, except for those whose rows another transaction has locked. It repeats until PostgreSQL has
// them or the lease is lost: without them, events that Kafka has accepted would be sent again. Results that take too
// long are saved in halves.
func (r *retrier) Save(results []cursor.RetryResult) error {
	for uncertain := false; ; uncertain = true {
		err := r.trySave(results, uncertain)
		switch {
		case err == nil, errors.Is(err, lease.ErrLeaseLost), pg.IsUndefined(err):
			return err
		case r.Held.Err() != nil:
			return context.Cause(r.Held)
		case tookTooLong(err) && len(results) > 1:
			if err := r.Save(results[:len(results)/2]); err != nil {
				return err
			}
			return r.Save(results[len(results)/2:])
		case errors.Is(err, cursor.ErrStale): // the session has to start the transactions again; PostgreSQL works
			wait.Sleep(r.Held, minStartWait)
			continue
		}
		r.Outage.Report(err)
		wait.Sleep(r.Held, r.Outage.Backoff())
	}
}

// trySave writes results under the lock with which the session parks events. Only rows that it has removed itself are
// counted off: if an operator has resolved a row, a recount may have left it out already. After a try of unknown
// outcome any of the keys may have lost its head.
func (r *retrier) trySave(results []cursor.RetryResult, uncertain bool) error {
	if x := r.Exactly; x != nil {
		if !x.lockReady(r.Held) { // the next start removes the rows of the events that were sent
			return lease.ErrLeaseLost
		}
		defer x.mu.Unlock()
	}
	r.Parked.mu.Lock()
	defer r.Parked.mu.Unlock()
	ctx, cancel := r.WithStatementTimeout()
	defer cancel()
	var step trace.Step
	if trace.On {
		step = trace.Begin("save", "epoch", r.Lease.Epoch, "results", resultWords(results))
	}
	saved, err := r.saveResults(ctx, results)
	if trace.On {
		step.End("ok", err == nil, "no", errors.Is(err, lease.ErrLeaseLost))
	}
	if err != nil {
		return err
	}
	left := slices.Clone(saved.Headless)
	for _, result := range results {
		key := result.Event.Key
		locked := slices.Contains(saved.Locked, result.Row)
		switch removed := result.Status == statusResolved || result.Status == statusDead && !r.Rules.HoldDead; {
		case locked:
			r.keep(result)
			left = append(left, key)
		case !slices.Contains(saved.Rows, result.Row):
			r.Parked.mistaken.Store(true)
		case removed:
			r.Parked.rowRemoved(key)
		default:
			left = append(left, key)
		}
		if !locked && !r.Parked.overrules(result) {
			delete(r.Parked.unsaved, result.Row)
		}
		if uncertain {
			saved.Headless = append(saved.Headless, key)
		}
	}
	r.Parked.rowsLeft(left)
	r.Parked.putHeadless(saved.Headless)
	return nil
}

func (r *retrier) saveResults(ctx context.Context, results []cursor.RetryResult) (cursor.Saved, error) {
	if r.Exactly != nil {
		return r.Exactly.save(ctx, results)
	}
	return r.Store.SaveResults(ctx, r.Lease, results, r.Rules.KeepSent)
}

// keep remembers a result whose row is locked.
func (r *retrier) keep(result cursor.RetryResult) {
	if e := result.Event; r.Parked.keep(result) {
		r.Log.Info("outbox: another transaction has locked a row of outbox_failed; its key waits", "row", result.Row, "id", e.ID, "key", e.Key)
	}
}

// saveUnsaved tries again to save the results whose rows were locked. Run calls it, and no other retrier.
func (r *retrier) saveUnsaved() error {
	for some := range slices.Chunk(r.Parked.Unsaved(), maxSaved) {
		if err := r.Save(some); err != nil {
			return err
		}
	}
	return nil
}

// maxSaved bounds the results that are saved at once.
const maxSaved = 500

// saveAnswered removes the rows of events that Kafka has accepted, as it has answered late. Those that are being probed
// are left to the next round.
func (r *retrier) saveAnswered() error {
	for refs := range slices.Chunk(r.Unanswered.Accepted(), maxSaved) {
		if err := r.saveSomeAnswered(refs); err != nil {
			return err
		}
	}
	return nil
}

func (r *retrier) saveSomeAnswered(refs []eventRef) error {
	r.Probed.mu.Lock()
	defer r.Probed.mu.Unlock()
	ids, eventIDs := make([]int64, len(refs)), make([]string, len(refs))
	for i, ref := range refs {
		ids[i], eventIDs[i] = ref.ID, ref.EventID
	}
	recorded := r.Unanswered.areRecorded(refs)
	ctx, cancel := r.WithStatementTimeout()
	rows, err := r.Store.RowsOf(ctx, ids, eventIDs)
	cancel()
	if err != nil {
		return err
	}
	found := make(map[eventRef]bool, len(rows))
	for i := range rows {
		found[refOf(&rows[i].Event)] = true
	}
	// An operator has resolved those without a row.
	r.Unanswered.Remove(slices.DeleteFunc(recorded, func(ref eventRef) bool { return found[ref] }))
	rows = slices.DeleteFunc(rows, func(row cursor.FailedRow) bool { return r.Probed.keys[row.Key] })
	results, removed := make([]cursor.RetryResult, len(rows)), make([]eventRef, len(rows))
	for i := range rows {
		removed[i] = refOf(&rows[i].Event)
		sent := r.Unanswered.sentTo(removed[i])
		results[i] = cursor.RetryResult{Event: &rows[i], Row: rows[i].Row, Status: statusResolved,
			Partition: sent.Partition.Number, Offset: sent.Offset, SentAt: sent.Time}
	}
	if len(results) > 0 {
		if err := r.Save(results); err != nil {
			return err
		}
	}
	r.Unanswered.Remove(removed)
	return nil
}

// lastTries is how long Finish waits for rows that another transaction has locked, and for PostgreSQL.
const lastTries = 500 * time.Millisecond

// Finish is called when Run, RunProbes and RunSuspects have ended and all producers are closed. It saves what is
// unsaved, and logs which results it gives up: the next holder of the lease sends these events again.
func (r *retrier) Finish() {
	began := time.Now()
	lasts := func() bool { return r.Held.Err() == nil && time.Since(began) < lastTries }
	err := r.saveAnswered()
	for err != nil && lasts() {
		wait.Sleep(r.Held, lastTries/10)
		err = r.saveAnswered()
	}
	if err != nil && r.Held.Err() == nil && !errors.Is(err, lease.ErrLeaseLost) { // the loss of the lease is no outage
		r.Outage.Report(err)
	}
	for err = nil; len(r.Parked.Unsaved()) > 0 && lasts(); {
		if err = r.trySave(r.Parked.Unsaved(), err != nil); err != nil || len(r.Parked.Unsaved()) > 0 {
			wait.Sleep(r.Held, lastTries/10)
		}
	}
	for _, lost := range r.Parked.Unsaved() {
		e := lost.Event
		r.Log.Warn("outbox: stopped before the result of a retry was saved, another transaction has locked its row; the event will be sent again",
			"row", lost.Row, "id", e.ID, "event_id", string(e.EventID), "type", string(e.EventType), "key", e.Key, "status", lost.Status, "error", err)
	}
}
