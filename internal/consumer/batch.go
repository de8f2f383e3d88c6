package consumer

import (
	"context"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
)

// handle handles records, unless the worker is to end before.
func (w *partitionWorker) handle(records []*kgo.Record) {
	items := w.readAll(records)
	for len(items) > 0 && w.stopping.Err() == nil {
		batch := items[:min(len(items), w.batch)]
		if w.requeueReplays(batch) != nil || w.findBlocked(batch) != nil || w.parkBlocked(batch) != nil {
			return
		}
		batch, trials := w.awaitBreakers(batch)
		w.trials = slices.Clone(trials)
		if len(batch) == 0 {
			return
		}
		began := time.Now()
		n, committed, failed := w.tryBatch(batch)
		// All of them, and at once: soon their keys may be free, and what is behind them would be handled before they are.
		if w.parkBlocked(batch) != nil {
			return
		}
		for i := range items[:n] {
			if err := w.finishRecord(&items[i], items[i+1:], committed, failed); err != nil {
				return
			}
			w.advance(items[i].record)
		}
		w.forgetTrials(trials)
		if n == len(batch) && len(trials) == 0 {
			w.resizeBatch(n, n, time.Since(began))
		}
		items = items[n:]
	}
}

// resizeBatch adapts how many records are tried together to how many are done in
// TransactionTime. The notes of the others would be made and taken back again and again.
func (w *partitionWorker) resizeBatch(done, tried int, took time.Duration) {
	switch {
	case done < tried:
		w.batch = done
	case took < handling.TransactionTime:
		w.batch = min(2*w.batch, w.cfg.MaxPoll)
	}
}

// readAll decodes records, or none if the worker is to end. Codecs may do I/O, so each
// record has as long as a handler.
func (w *partitionWorker) readAll(records []*kgo.Record) []recordItem {
	items, origins := make([]recordItem, len(records)), make([]envelope.Origin, len(records))
	id := w.group.topicID(w.partition.Topic)
	for i, r := range records {
		origins[i] = originOf(r, id)
		items[i].record, items[i].replay = w.admit(r)
	}
	for next := 0; next < len(records); {
		if next = w.readFrom(next, items, origins); w.stopping.Err() != nil {
			return nil
		}
	}
	return items
}

// readFrom decodes records from first on until the time for one of them is up, which
// mostly is enough for all. It returns the index of the record to go on with.
//
// Decoders are the host's, and may end their goroutine.
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
			} // else once more: the records before may have used up the time
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

// tryBatch runs the tasks with a transaction, in one for all. It returns how many items
// are done but for their other tasks; or how many need a transaction of their own for each task, and false, with the error
// of the one that has failed, if that is certain. If a handler fails, it runs those in front of its event again.
//
// What is done is committed before the rest when the worker is to end, when the topic is
// paused, after TransactionTime, and after half of MaxPollInterval, so that a batch of slow
// handlers does not run out of it.
func (w *partitionWorker) tryBatch(items []recordItem) (n int, committed bool, failed *handling.TaskError) {
	const conflictsOfBatch = 3 // small transactions block each other less
	for conflicts := 0; ; {
		tasks := tasksInTx(items)
		switch {
		case len(tasks) == 0: // which says nothing about PostgreSQL
			return len(items), true, nil
		case !w.processor.Sharing(tasks), !w.mayCall(true):
			return len(items), false, nil
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, w.cfg.MaxPollInterval)
		next, err := w.processor.ProcessBatch(ctx, tasks, func(spent time.Duration) bool {
			return w.stopping.Err() != nil || w.isTopicPaused() || spent >= handling.TransactionTime || time.Since(began) > w.cfg.MaxPollInterval/2
		})
		late := handling.IsLate(ctx, err)
		cancel()
		w.releaseSlots()
		switch {
		case err == nil:
			w.reportPostgresWorks(began)
			if n = itemsBefore(items, next); n < len(items) {
				w.resizeBatch(n, len(items), time.Since(began))
			}
			for _, t := range tasksInTx(items[:n]) {
				w.breakers.Note(t.Action, 1, nil)
			}
			return n, true, nil
		case w.held.Err() != nil, w.noteBlocked(items, err):
		case handling.IsConflict(err) && conflicts < conflictsOfBatch:
			conflicts++
			w.pause(handling.ConflictWait(conflicts))
		case w.processor.IsOutage(w.held, err, handling.InTx, late):
			w.awaitPostgres(began, err)
		default:
			n, failed = handling.ItemsToRepeat(err, len(items), func(o *envelope.Origin) int { return itemsBefore(items, o) })
			w.log.Debug("outbox: a transaction of records has failed, and those in front of the failed one are handled again", "partition", w.partition.Name(), "records", len(items),
				"in_front", n, "error", err)
			if n == 0 {
				return 1, false, failed
			}
			items = items[:n]
		}
	}
}

// itemsBefore returns how many items come before the one that is next, all if none is.
func itemsBefore(items []recordItem, next *envelope.Origin) int {
	if next == nil {
		return len(items)
	}
	return slices.IndexFunc(items, func(it recordItem) bool { return it.Meta.Origin == next })
}
