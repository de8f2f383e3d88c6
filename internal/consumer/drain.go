package consumer

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
)

// An event of a blocked key is parked, and a parked event takes longer than one that is handled directly. So a key with
// many events might never have all its parked events handled: the next ones arrive sooner. Therefore the partition of
// such a key waits while its parked events are handled, and then goes on directly.

const (
	// drainAbove is how many parked events of a key have its partition wait.
	drainAbove = 1_000
	// drainCounted is up to how many of them are counted. The partition does not wait for more.
	drainCounted = 50_000
	// drainStall is how long the partition waits for the next success of the key.
	drainStall = 3 * time.Second
	// drainMost is how long the partition waits at all. It goes on if that will not do, by what was handled in
	// drainSample.
	drainMost, drainSample = 30 * time.Second, 2 * time.Second
	// drainAgain is how long the partition does not wait after that.
	drainAgain = 30 * time.Second
)

// awaitDrained waits until the parked events of the most frequent blocked key of items are handled, if they are many,
// none of them fails, and it does not take long. Then the tasks of the key are not blocked any more. The only error is
// ErrStopped.
func (w *partitionWorker) awaitDrained(items []recordItem) error {
	if w.parking == nil || time.Now().Before(w.drainAfter) {
		return nil
	}
	action, key := w.mostBlocked(items)
	if !key.Ordered || !w.breakers.IsClosed(action) {
		return nil
	}
	f, err := w.followers(key, drainAbove)
	if err != nil || f.Fails || f.Parked < drainAbove {
		return err
	}
	began := time.Now()
	defer w.drainWait.begin()()
	attrs := []any{"topic", w.partition.Topic, "partition", w.partition.Number, "action", action}
	w.log.Info("outbox: a partition waits while the parked events of a key are handled, which are many", attrs...)
	drained, err := w.drain(key)
	attrs = append(attrs, "waited", time.Since(began).Round(time.Millisecond))
	if err != nil {
		return err
	}
	if !drained {
		w.drainAfter = time.Now().Add(drainAgain)
		w.log.Info("outbox: a partition goes on, the parked events of a key take too long", attrs...)
		return nil
	}
	w.log.Info("outbox: a partition goes on, the parked events of a key are handled", attrs...)
	w.unblock(items, action, key)
	return w.findBlocked(items) // an event may have a row of its own
}

// drain waits until the parked events of a key are handled. It returns false if that fails or takes too long.
func (w *partitionWorker) drain(key delivery.Key) (drained bool, err error) {
	began := time.Now()
	first, err := w.followers(key, drainCounted)
	if err != nil || first.Parked == drainCounted {
		return false, err
	}
	progressed, last, sampled := began, first, false
	for time.Since(began) < drainMost {
		const often = 20 * time.Millisecond
		w.pause(often)
		limit, sample := 1, !sampled && time.Since(began) >= drainSample
		if sample {
			limit, sampled = drainCounted, true
		}
		f, err := w.followers(key, limit)
		switch {
		case err != nil || f.Fails:
			return false, err
		case f.Parked == 0 && f.Head == 0:
			return true, nil
		case f.Head != last.Head:
			progressed = time.Now()
		case time.Since(progressed) > drainStall:
			return false, nil
		}
		if handled := first.Parked - f.Parked; sample && (handled <= 0 || time.Since(began)*time.Duration(first.Parked)/time.Duration(handled) > drainMost) {
			return false, nil
		}
		last = f
	}
	return false, nil
}

// followers counts the parked events of a key up to a limit. The only error is ErrStopped.
func (w *partitionWorker) followers(key delivery.Key, limit int) (f delivery.Followers, err error) {
	err = w.write(func(ctx context.Context) (err error) {
		f, err = w.parking.store.Followers(ctx, key, limit)
		return err
	})
	return f, err
}

// mostBlocked returns the action and the key of most of the blocked tasks of items that are not parked and have a
// transaction.
func (w *partitionWorker) mostBlocked(items []recordItem) (action string, key delivery.Key) {
	tasks := map[delivery.Key]int{}
	for i := range items {
		for t := range items[i].toPark() {
			if t.Kind == handling.NoTx { // parked, it takes no longer
				continue
			}
			as := items[i].keyAction(t)
			k := w.parking.keyOf(as, &t.Meta)
			if tasks[k]++; k.Ordered && tasks[k] > tasks[key] {
				action, key = as, k
			}
		}
	}
	return action, key
}

// unblock undoes the marks of tasks of an action and a key that are not parked.
func (w *partitionWorker) unblock(items []recordItem, action string, key delivery.Key) {
	for i := range items {
		for t := range items[i].toPark() {
			if items[i].keyAction(t) == action && w.parking.keyOf(action, &t.Meta) == key {
				delete(items[i].blocked, t.Handler)
			}
		}
		items[i].whole = items[i].whole && (action != "" || w.parking.keyOf("", &items[i].Meta) != key)
	}
}
