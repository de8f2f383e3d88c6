package consumer

import (
	"context"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/starts"
)

// turn is what a worker needs while it handles a suspect: the place in limits.alone, and the note in PostgreSQL that the
// record is handled alone. The worker takes both before it decodes the record and before each call of a handler. While
// it waits for anything else it gives them back: the record has not ended the process so far, and another partition may
// have its turn. So no wait of a partition, as for the end of an outage or of a pause, keeps the others from theirs.
//
// The place is taken before the slots of a call. Who has slots never waits for the place.
type turn struct {
	// Only run uses these.
	active bool  // a suspect is being handled
	offset int64 // of it
	noted  bool  // in PostgreSQL
	ends   int   // how often processes have ended at it, when it was noted first here

	mu    sync.Mutex
	held  bool
	since time.Time // since when the worker waits for the place; zero if it does not
}

// beginAlone begins to handle a record alone. It returns false if the worker is stopped.
func (w *partitionWorker) beginAlone(offset int64) bool {
	w.turn.active, w.turn.offset, w.turn.noted = true, offset, false
	return w.awaitResume() && w.takeTurn()
}

// endAlone gives the place back when a record is handled. Its note goes with that of the next one.
func (w *partitionWorker) endAlone() {
	w.turn.active = false
	w.turn.release(w.limits.alone)
}

// takeTurn waits until the worker may decode a record or call a handler: at once, unless the record is a suspect. It
// returns false if the worker is stopped.
func (w *partitionWorker) takeTurn() bool {
	for failed := false; w.turn.active && w.stopping.Err() == nil; failed = true {
		if !w.turn.take(w.stopping, w.limits.alone) {
			return false
		}
		if w.turn.noted {
			break
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, delivery.WriteTimeout)
		ends, err := w.group.suspect(ctx, w.partition, w.turn.offset, false)
		cancel()
		if err == nil {
			w.turn.noted, w.turn.ends = true, ends
			if failed {
				w.reportPostgresWorks(began)
			}
			break
		}
		w.turn.release(w.limits.alone)
		if w.held.Err() == nil {
			w.awaitPostgres(began, err)
		}
	}
	return w.stopping.Err() == nil
}

// hasTurn reports whether the worker still has what takeTurn has taken: a wait may have given it back since.
func (w *partitionWorker) hasTurn() bool { return !w.turn.active || w.turn.isHeld() }

// giveTurn takes the note back that a record is handled alone, and gives the place to another worker. If PostgreSQL
// does not answer, the note stays, and takeTurn makes no other one.
func (w *partitionWorker) giveTurn() {
	if !w.turn.active || !w.turn.isHeld() {
		return
	}
	w.forgetSuspect()
	w.turn.release(w.limits.alone)
}

// forgetSuspect takes the note back that a record is handled alone: it may not be done, but it has not ended this
// process.
func (w *partitionWorker) forgetSuspect() {
	if !w.turn.noted {
		return
	}
	ctx, cancel := context.WithTimeout(w.held, delivery.WriteTimeout)
	defer cancel()
	if _, err := w.group.suspect(ctx, w.partition, w.turn.offset, true); err != nil {
		w.log.Debug("outbox: it is not noted that a record has not ended this process", "partition", w.partition.Name(), "offset", w.turn.offset, "error", err)
		return
	}
	w.turn.noted = false
}

// endSuspects notes that no record is handled alone any more.
func (w *partitionWorker) endSuspects() bool {
	return w.write(func(ctx context.Context) error {
		_, err := w.group.suspect(ctx, w.partition, starts.None, false)
		return err
	}) == nil
}

// take takes the place, unless it is taken already. It returns false if ctx ends first.
func (t *turn) take(ctx context.Context, place chan struct{}) bool {
	if t.isHeld() {
		return true
	}
	t.waits(time.Now())
	defer t.waits(time.Time{})
	select {
	case place <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.held = true
	return true
}

// release gives the place back, unless it was given back already. Any goroutine may call it.
func (t *turn) release(place chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held {
		t.held = false
		<-place
	}
}

func (t *turn) isHeld() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held
}

func (t *turn) waits(since time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.since = since
}

// waiting returns since when the worker waits for the place; zero if it does not.
func (t *turn) waiting() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.since
}
