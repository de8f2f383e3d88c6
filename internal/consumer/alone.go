package consumer

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// alonePlace is what a worker needs while it handles a suspect: the place in limits.alone, and the note in PostgreSQL
// that the record is handled alone. The worker takes both before it decodes the record and before each call of a
// handler. While it waits for anything else it gives them back: the record has not ended the process so far, and
// another partition may take the place. So no wait of a partition, as for the end of an outage or of a pause, keeps the
// others waiting.
//
// The place is taken before the slots of a call. Who has slots never waits for the place.
type alonePlace struct {
	// Only run uses these.
	active bool  // a suspect is being handled
	offset int64 // of it
	ends   int   // how often processes have ended at it, when it was noted first here

	noted atomic.Pointer[int64] // the offset that is noted in PostgreSQL; nil for none

	mu   sync.Mutex
	held bool
	wait waitingSince // for the place
}

// beginAlone begins to handle a record alone. It returns false if the worker is stopped.
func (w *partitionWorker) beginAlone(offset int64) bool {
	w.place.noted.Store(nil)
	w.place.active, w.place.offset = true, offset
	return w.awaitResume() && w.takePlace()
}

// endAlone gives the place back when a record is handled. Its note goes with that of the next one.
func (w *partitionWorker) endAlone() {
	w.place.active = false
	w.place.release(w.limits.alone)
}

// takePlace waits until the worker may decode a record or call a handler: at once, unless the record is a suspect. It
// returns false if the worker is stopped.
func (w *partitionWorker) takePlace() bool {
	for failed := false; w.place.active && w.stopping.Err() == nil; failed = true {
		if !w.place.take(w.stopping, w.limits.alone) {
			return false
		}
		if w.place.noted.Load() != nil {
			break
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, delivery.WriteTimeout)
		ends, err := w.group.suspect(ctx, w.partition, w.place.offset, false)
		cancel()
		if err == nil {
			offset := w.place.offset
			w.place.ends = ends
			w.place.noted.Store(&offset)
			if failed {
				w.reportPostgresWorks(began)
			}
			break
		}
		w.place.release(w.limits.alone)
		if w.held.Err() == nil {
			w.awaitPostgres(began, err)
		}
	}
	return w.stopping.Err() == nil
}

// hasPlace reports whether the worker still has what takePlace has taken: a wait may have given it back since.
func (w *partitionWorker) hasPlace() bool { return !w.place.active || w.place.isHeld() }

// givePlace takes the note back that a record is handled alone, and gives the place to another worker. If PostgreSQL
// does not answer, the note stays, and takePlace makes no other one.
func (w *partitionWorker) givePlace() {
	if !w.place.active || !w.place.isHeld() {
		return
	}
	w.forgetSuspect()
	w.place.release(w.limits.alone)
}

// forgetSuspect takes the note back that a record is handled alone: it may not be done, but it has not ended this
// process. The note stays if the partition is lost, which counts as an unclean end. A stop and a rebalance wait for a
// worker no longer than abandonGrace, so the worker waits for PostgreSQL for half of it then.
func (w *partitionWorker) forgetSuspect() {
	if w.isLost() {
		return
	}
	offset := w.place.noted.Swap(nil)
	if offset == nil {
		return
	}
	ctx, endGrace := wait.Grace(w.held, abandonGrace/2) // the wait for this worker has begun before
	defer endGrace()
	ctx, cancel := context.WithTimeout(ctx, delivery.WriteTimeout)
	defer cancel()
	if _, err := w.group.suspect(ctx, w.partition, *offset, true); err != nil {
		w.log.Debug("outbox: it is not noted that a record has not ended this process", "partition", w.partition.Name(), "offset", *offset, "error", err)
		w.place.noted.CompareAndSwap(nil, offset)
	}
}

// isLost reports whether abandon has ended the worker, and not finish before it.
func (w *partitionWorker) isLost() bool {
	return w.held.Err() != nil && !errors.Is(context.Cause(w.stopping), handling.ErrStopped)
}

// endSuspects notes that no record is handled alone any more.
func (w *partitionWorker) endSuspects() bool {
	return w.write(func(ctx context.Context) error {
		_, err := w.group.suspect(ctx, w.partition, starts.None, false)
		return err
	}) == nil
}

// take takes the place, unless it is taken already. It returns false if ctx ends first.
func (p *alonePlace) take(ctx context.Context, alone chan struct{}) bool {
	if p.isHeld() {
		return true
	}
	defer p.wait.begin()()
	select {
	case alone <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = true
	return true
}

// release gives the place back, unless it was given back already. Any goroutine may call it.
func (p *alonePlace) release(alone chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held {
		p.held = false
		<-alone
	}
}

func (p *alonePlace) isHeld() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}

// waitingSince says since when a worker waits for something. The zero value is ready, and safe for concurrent use.
type waitingSince struct{ since atomic.Pointer[time.Time] }

// begin begins a wait, and returns what ends it.
func (w *waitingSince) begin() (end func()) {
	now := time.Now()
	w.since.Store(&now)
	return func() { w.since.Store(nil) }
}

// lasts returns how long the worker has been waiting; 0 if it does not wait.
func (w *waitingSince) lasts() time.Duration {
	if since := w.since.Load(); since != nil {
		return time.Since(*since)
	}
	return 0
}
