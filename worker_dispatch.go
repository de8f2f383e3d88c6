package outbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/deliveries"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// dispatcher gives work to the lanes of a process: rows of event_delivery that are due, and those that
// takeNew makes. It takes no more than the lanes can handle soon, so that other processes of the group
// get the rest.
type dispatcher struct {
	cfg     *WorkerConfig
	store   *deliveries.Store
	pauses  *pauses.Set
	outages *outage.Logs
	log     *slog.Logger
	hands   *hands
	wake    <-chan struct{}
	cut     context.Context
	kinds   []*laneKind

	// takeNew makes deliveries of what has come, if lanes can take some, and deals those that are with this process. It
	// reports whether there are more, and whether PostgreSQL has answered. Nil if others make them.
	takeNew func(context.Context) (more, answered bool, err error)

	answered bool // PostgreSQL has answered in this look; only run

	mu      sync.Mutex
	due     bool      // rows may be claimed
	next    time.Time // when a row will be due, zero for none that is known
	expired bool      // rows were taken from workers that are gone
	unsure  bool      // rows may be with this worker that it does not know of
	freeNow chan struct{}
	poll    time.Time // of the last look at everything
}

// What outages of a worker are named in its log beside outagePostgres.
const (
	outagePromoting  = "promoting deliveries"
	outageRenewing   = "renewing deliveries"
	outageTakingOver = "taking over deliveries"
)

// run gives work to lanes until stopping ends.
func (d *dispatcher) run(stopping context.Context) error {
	for stopping.Err() == nil {
		began := time.Now()
		more, err := d.look(stopping)
		switch {
		case pg.IsUndefined(err):
			return notMigrated(d.cfg.Schema, err)
		case errors.Is(err, ErrSequenceBehind):
			return err
		case err != nil:
			d.signalStrays()
			if stopping.Err() == nil {
				d.outages.Report(outagePostgres, began, err)
				d.cfg.awaitAgain(stopping, d.outages)
				d.signalDue()
			}
			continue
		}
		if d.answered && d.outages.Failing() {
			d.outages.Report(outagePostgres, began, nil)
		}
		if !more {
			d.await(stopping)
		}
	}
	return nil
}

// await waits for a lane, a wake request, a row that is due, or the next poll.
func (d *dispatcher) await(stopping context.Context) {
	d.mu.Lock()
	until := d.poll.Add(d.cfg.PollInterval)
	if !d.next.IsZero() && d.next.Before(until) {
		until = d.next
	}
	d.mu.Unlock()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-d.wake:
	case <-d.freeNow:
	case <-timer.C:
	case <-stopping.Done():
	}
}

// dispatchTimeout bounds a statement with which a dispatcher gets work. A connection can go dead without
// a word, and TCP needs a quarter of an hour to find out.
const dispatchTimeout = 30 * time.Second

// giveBack gives back what lanes do not get to.
func (d *dispatcher) giveBack(ctx context.Context, rows []deliveries.Delivery) {
	if len(rows) == 0 {
		return
	}
	if err := d.store.Return(ctx, rows); err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		d.log.Warn("outbox: deliveries are not given back, others wait until their lease expires", "deliveries", len(rows), "error", err)
	}
	for _, r := range rows {
		d.hands.drop(r.Ref)
	}
	d.signalDue()
}

// giveStraysBack gives back what this worker does not know that it has, because the answer to a claim was lost, or a
// crash of PostgreSQL has forgotten that it was given back or ended: nobody else takes it until its lease expires, and
// then it would count as an attempt.
func (d *dispatcher) giveStraysBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dispatchTimeout)
	defer cancel()
	mine, err := d.store.Mine(ctx)
	if err != nil {
		return err
	}
	if strays := d.hands.strays(mine); len(strays) > 0 {
		if err := d.store.Return(ctx, strays); err != nil {
			return err
		}
		d.signalDue()
	}
	return nil
}

// look gives work to lanes that are idle. It reports whether there may be more at once.
func (d *dispatcher) look(ctx context.Context) (more bool, err error) {
	d.mu.Lock()
	now := time.Now()
	due, expired, unsure := d.due, d.expired, d.unsure
	if now.Sub(d.poll) >= d.cfg.PollInterval {
		due, expired, d.poll = true, true, now
	}
	if !d.next.IsZero() && !now.Before(d.next) {
		due, d.next = true, time.Time{}
	}
	d.due, d.expired, d.unsure = false, false, false
	d.mu.Unlock()
	d.answered = false
	if unsure {
		if err := d.giveStraysBack(ctx); err != nil {
			return false, err
		}
	}
	full, suspects := false, false
	for _, k := range d.kinds {
		room := k.room()
		if room == 0 {
			full, suspects = full || due, suspects || expired
			continue
		}
		if due {
			got, err := d.claim(ctx, k, room)
			if err != nil {
				return false, err
			}
			more = more || got
		}
		if expired {
			got, err := d.claimSuspect(ctx, k)
			if err != nil {
				return false, err
			}
			suspects = suspects || got
		}
	}
	d.mu.Lock()
	d.due = d.due || full || more
	d.expired = d.expired || suspects // there may be more, once this one is handled
	d.mu.Unlock()
	if d.takeNew == nil {
		return more, nil
	}
	got, answered, err := d.takeNew(ctx)
	d.answered = d.answered || answered
	return more || got, err
}

// claim claims rows that are due for a kind of lanes. It reports whether there may be more.
func (d *dispatcher) claim(ctx context.Context, k *laneKind, room int) (more bool, err error) {
	pairs := d.unpaused(k)
	if len(pairs) == 0 {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dispatchTimeout)
	defer cancel()
	began, limit := time.Now(), room*k.batch()
	rows, err := d.store.Claim(ctx, pairs, limit, k.batch(), false, d.hands.budget())
	if err != nil {
		return false, err
	}
	d.answered = true
	d.deal(k, rows, began)
	return len(rows) >= limit && k.room() > 0, nil
}

// claimSuspect claims a single row that may have ended the process which had it, unless one is
// here already. It reports whether there may be more, for when it is handled.
func (d *dispatcher) claimSuspect(ctx context.Context, k *laneKind) (more bool, err error) {
	if d.hands.hasSuspect() {
		return true, nil
	}
	pairs := d.unpaused(k)
	if len(pairs) == 0 {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dispatchTimeout)
	defer cancel()
	began := time.Now()
	rows, err := d.store.Claim(ctx, pairs, 1, 0, true, 0)
	if err != nil {
		return false, err
	}
	d.answered = true
	d.deal(k, rows, began)
	return len(rows) > 0, nil
}

// unpaused returns what is claimed for a kind of lanes, beginning with another pair each time.
func (d *dispatcher) unpaused(k *laneKind) (pairs []deliveries.Pair) {
	k.pairs = append(k.pairs[1:], k.pairs[0])
	for _, p := range k.pairs {
		if !d.pauses.IsPaused(p.Stream) {
			pairs = append(pairs, p)
		}
	}
	return pairs
}

// deal deals rows, in the order of their positions, to lanes: all rows of a key to the same one.
func (d *dispatcher) deal(k *laneKind, rows []deliveries.Delivery, claimed time.Time) {
	if len(rows) == 0 {
		return
	}
	size := k.size(len(rows))
	var batches [][]deliveries.Delivery
	of := map[deliveries.Key]int{}
	for _, r := range rows {
		n, known := of[r.Key]
		if !known || !r.Key.Ordered {
			n = len(batches) - 1
			if n < 0 || len(batches[n]) >= size {
				batches, n = append(batches, nil), n+1
			}
			of[r.Key] = n
		}
		batches[n] = append(batches[n], r)
	}
	for _, batch := range batches {
		d.hands.add(d.cut, batch, claimed)
	}
	for _, batch := range batches {
		k.give(batch)
	}
}

// signalDue has rows claimed.
func (d *dispatcher) signalDue() {
	d.mu.Lock()
	d.due = true
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// retryAt has rows claimed at a time.
func (d *dispatcher) retryAt(at time.Time) {
	d.mu.Lock()
	if d.next.IsZero() || at.Before(d.next) {
		d.next = at
	}
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// signalStrays has this worker look for rows that it does not know of.
func (d *dispatcher) signalStrays() {
	d.mu.Lock()
	d.unsure = true
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// signalExpired has suspects claimed.
func (d *dispatcher) signalExpired() {
	d.mu.Lock()
	d.expired, d.due = true, true
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}
