package consumer

import (
	"context"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
)

// handle handles records in batches, until all are done or the worker is stopped.
func (w *partitionWorker) handle(records []*kgo.Record) {
	items := w.readAll(records)
	w.missed.pick(items)
	for len(items) > 0 && w.stopping.Err() == nil {
		n := w.handleBatch(items)
		if n == 0 {
			return
		}
		items = items[n:]
	}
}

// handleBatch handles the first items in a batch, and returns their number, or 0 if the worker is
// stopped. Items behind them are not handled, but their tasks may be marked as blocked. Whatever the batch
// has taken is released when it ends: slots, and trials of breakers.
func (w *partitionWorker) handleBatch(items []recordItem) (handled int) {
	defer w.slots.Release()
	defer w.releaseTrials()
	batch := w.untilHeld(items[:min(len(items), w.batch)])
	if w.requeueReplays(batch) != nil || w.findBlocked(batch) != nil || w.awaitDrained(batch) != nil || w.parkBlocked(batch) != nil {
		return 0
	}
	if batch = w.awaitBreakers(batch); len(batch) == 0 {
		return 0
	}
	began := time.Now()
	n, failed := w.tryBatch(batch)
	// Park all blocked tasks before anything else: their keys may become free at any moment, and later events
	// of these keys would then be handled first.
	w.noteShare(batch)
	if w.awaitDrained(batch) != nil || w.parkBlocked(batch) != nil {
		return 0
	}
	for i := range items[:n] {
		w.rest = items[i:n]
		if err := w.finishRecord(&items[i], items[i+1:], failed); err != nil {
			return 0
		}
		w.advance(items[i].record)
	}
	if w.releaseTrials() == 0 && n == len(batch) {
		w.resizeBatch(n, n, time.Since(began))
	}
	return n
}

// untilHeld returns the items up to the first one that will be dead and hold its key. It is parked before later ones of
// its key are handled.
func (w *partitionWorker) untilHeld(items []recordItem) []recordItem {
	if w.parking == nil || !w.cfg.HoldDead {
		return items
	}
	at := slices.IndexFunc(items, func(it recordItem) bool { return it.Class != "" && !it.isSkipped(w.cfg.DeadLetterUnknown) })
	if at < 0 {
		return items
	}
	return items[:at+1]
}

// resizeBatch adapts the size of batches to the number of records that are handled within
// TransactionTime. In a larger batch the notes of the other records would be inserted and deleted in
// vain.
func (w *partitionWorker) resizeBatch(done, tried int, took time.Duration) {
	switch {
	case done < tried:
		w.batch = done
	case took < handling.TransactionTime:
		w.batch = min(2*w.batch, w.cfg.MaxPoll)
	}
}

// readAll decodes records. It returns nil if the worker is stopped meanwhile. Codecs may do I/O, so
// each record may take HandlerTimeout.
func (w *partitionWorker) readAll(records []*kgo.Record) []recordItem {
	items, origins := make([]recordItem, len(records)), make([]envelope.Origin, len(records))
	id := w.group.topicID(w.partition.Topic)
	for i, r := range records {
		origins[i] = originOf(r, id)
		items[i].record = r
	}
	w.admit(items)
	if w.ending != nil {
		for i := range items {
			items[i] = newRecordItem(items[i].record, items[i].replay, &origins[i])
			items[i].Class, items[i].Err = handling.ClassUndecodable, w.ending
		}
		return items
	}
	if !w.takePlace() { // admit may have waited
		return nil
	}
	for next := 0; next < len(records); {
		if next = w.readFrom(next, items, origins); w.stopping.Err() != nil {
			return nil
		}
	}
	return items
}

// readFrom decodes records from first on until HandlerTimeout has passed, which mostly suffices for
// all of them. It returns the index of the next record.
//
// Decoders are functions of the host: they may panic or end their goroutine.
func (w *partitionWorker) readFrom(first int, items []recordItem, origins []envelope.Origin) (next int) {
	ctx, cancel := context.WithTimeout(w.held, w.cfg.HandlerTimeout)
	defer cancel()
	next = first
	w.activity.Begin(handling.Call{Context: ctx, Function: "decoder, codec or upcaster", Place: handling.PlaceOf(&origins[first])})
	defer w.activity.End()
	err := contain.Do(func() error {
		for ; next < len(items) && w.stopping.Err() == nil; next++ {
			it := &items[next]
			w.activity.Next(handling.PlaceOf(&origins[next]))
			*it = w.reader.read(ctx, it.record, it.replay, &origins[next])
			if ctx.Err() == nil || w.held.Err() != nil {
				continue
			}
			if it.Err == nil || next == first {
				next++
			} // otherwise read the record again: earlier records may have used up the time
			return nil
		}
		return nil
	})
	if err != nil { // ErrGoexit
		it := newRecordItem(items[next].record, items[next].replay, &origins[next])
		it.Class, it.Err = handling.ClassUndecodable, err
		items[next] = it
		next++
	}
	return next
}

// tryBatch runs those tasks of items that need a transaction, all in one.
//
// If the transaction commits, it marks their tasks as done, and returns the number of items that it has
// reached. It leaves out tasks that have failed without using it, and later ones of their keys. The
// transaction ends early, with fewer items, when the worker is stopped, when the topic is paused,
// after TransactionTime, and after half of MaxPollInterval.
//
// If another handler fails, tryBatch tries the items before its event again, without that event. If the
// first item fails, each task of the n items needs a transaction of its own. The errors are those of
// failed tasks, as far as it is known which tasks have failed.
func (w *partitionWorker) tryBatch(items []recordItem) (n int, failed []*handling.TaskError) {
	const conflictsOfBatch = 3 // then items are handled one by one: small transactions conflict less
	for conflicts := 0; ; {
		tasks := tasksInTx(items)
		switch {
		case len(tasks) == 0: // no statement ran, so no outage of PostgreSQL has ended
			return len(items), nil
		case !w.processor.Sharing(tasks), !w.mayCall(true):
			return len(items), nil
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, w.cfg.MaxPollInterval)
		done, err := w.processor.ProcessBatch(ctx, tasks, func(spent time.Duration) bool {
			return w.stopping.Err() != nil || w.isTopicPaused() || spent >= handling.TransactionTime || time.Since(began) > w.cfg.MaxPollInterval/2
		})
		late := handling.IsLate(ctx, err)
		cancel()
		w.slots.Release()
		switch {
		case err == nil:
			w.reportPostgresWorks(began)
			if n = itemsBefore(items, done.Next); n < len(items) {
				w.resizeBatch(n, len(items), time.Since(began))
			}
			for i := range items[:n] {
				w.noteCommitted(&items[i], done, began)
				items[i].noteDone(done.Excluded)
			}
			return n, done.Excluded.Errors()
		case w.held.Err() != nil, w.noteBlocked(items, err):
		case handling.IsConflict(err) && conflicts < conflictsOfBatch:
			conflicts++
			w.pause(handling.ConflictWait(conflicts))
		case w.processor.IsOutage(w.held, err, handling.InTx, late):
			w.awaitPostgres(began, err)
			if pg.IsWaitInVain(err) { // for one of them: the others need not wait for it
				return len(items), nil
			}
		default:
			n, one := handling.ItemsToRepeat(err, len(items), func(o *envelope.Origin) int { return itemsBefore(items, o) })
			for _, t := range one.Succeeded() {
				w.noteSucceeded(&items[itemsBefore(items, t.Meta.Origin)], t, began)
			}
			w.log.Debug("outbox: a transaction of records has failed, and those in front of the failed one are handled again", "partition", w.partition.Name(), "records", len(items),
				"in_front", n, "error", err)
			if n == 0 {
				return 1, []*handling.TaskError{one}
			}
			items = items[:n]
		}
	}
}

// itemsBefore returns how many items come before the event next. It returns all for nil.
func itemsBefore(items []recordItem, next *envelope.Origin) int {
	if next == nil {
		return len(items)
	}
	return slices.IndexFunc(items, func(it recordItem) bool { return it.Meta.Origin == next })
}
