package delivery

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Dispatcher gives work to the lanes of a process: rows of event_delivery that are due, and those that
// takeNew makes. It takes no more than the lanes can handle soon, so that other processes of the group
// get the rest.
type Dispatcher struct {
	cfg      *Rules
	store    *Store
	Pauses   *pauses.Set
	Breakers *handling.ActionBreakers
	outages  *outage.Logs
	log      *slog.Logger
	Claimed  *hands
	wake     <-chan struct{} // this process has recorded events
	heard    <-chan struct{} // others have
	cut      context.Context
	Kinds    []*LaneKind

	// TakeNew makes deliveries of what has come, if lanes can take some, and deals those that are with this process. It
	// reports whether there are more, and whether PostgreSQL has answered. Nil if others make them.
	TakeNew func(context.Context) (more, answered bool, err error)

	answered bool          // PostgreSQL has answered in this look; only run
	Rhythm   wakeup.Rhythm // of looks for new events; only run
	Full     bool          // the last of these found that no lane takes any; only run
	Listens  atomic.Bool   // this process is the one of the group that looks often

	mu      sync.Mutex
	due     bool      // rows may be claimed
	next    time.Time // when a row will be due, zero for none that is known
	expired bool      // rows were taken from workers that are gone
	unsure  bool      // rows may be with this worker that it does not know of
	freeNow chan struct{}
	poll    time.Time // of the last look at everything
}

// What outages of a worker are named in its log beside OutagePostgres.
const (
	outagePromoting  = "promoting deliveries"
	outageRenewing   = "renewing deliveries"
	outageTakingOver = "taking over deliveries"
)

// run gives work to lanes until stopping ends.
func (d *Dispatcher) run(stopping context.Context) error {
	for stopping.Err() == nil {
		began := time.Now()
		more, err := d.look(stopping)
		switch {
		case pg.IsUndefined(err):
			return pg.NotMigrated(d.cfg.Schema, err)
		case errors.Is(err, cursor.ErrSequenceBehind):
			return err
		case err != nil:
			d.signalStrays()
			if stopping.Err() == nil {
				d.outages.Report(handling.OutagePostgres, began, err)
				d.cfg.awaitAgain(stopping, d.outages)
				d.SignalDue()
			}
			continue
		}
		if d.answered && d.outages.Failing() {
			d.outages.Report(handling.OutagePostgres, began, nil)
		}
		if !more {
			d.await(stopping)
		}
	}
	return nil
}

// await waits for a lane, a wake request, a row that is due, or the next poll.
func (d *Dispatcher) await(stopping context.Context) {
	d.mu.Lock()
	until := d.poll.Add(d.cfg.PollInterval)
	if !d.next.IsZero() && d.next.Before(until) {
		until = d.next
	}
	d.mu.Unlock()
	if d.TakeNew != nil && d.Listens.Load() && !d.Full {
		if next := time.Now().Add(d.Rhythm.Wait(time.Now())); next.Before(until) {
			until = next
		}
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-d.wake:
		d.Rhythm.Woken()
	case <-d.heard:
		d.Rhythm.Notified(time.Now())
	case <-d.freeNow:
	case <-timer.C:
	case <-stopping.Done():
	}
}

// DispatchTimeout bounds a statement with which a dispatcher gets work. A connection can go dead without
// a word, and TCP needs a quarter of an hour to find out.
const DispatchTimeout = 30 * time.Second

// giveBack gives back what lanes do not get to.
func (d *Dispatcher) giveBack(ctx context.Context, rows []Delivery) {
	if len(rows) == 0 {
		return
	}
	if err := d.store.Return(ctx, rows); err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		d.log.Warn("outbox: deliveries are not given back, others wait until their lease expires", "deliveries", len(rows), "error", err)
	}
	for _, r := range rows {
		d.Claimed.drop(r.Ref)
	}
	d.SignalDue()
}

// giveStraysBack gives back what this worker does not know that it has, because the answer to a claim was lost, or a
// crash of PostgreSQL has forgotten that it was given back or ended: nobody else takes it until its lease expires, and
// then it would count as an attempt.
func (d *Dispatcher) giveStraysBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, DispatchTimeout)
	defer cancel()
	mine, err := d.store.Mine(ctx)
	if err != nil {
		return err
	}
	if strays := d.Claimed.strays(mine); len(strays) > 0 {
		if err := d.store.Return(ctx, strays); err != nil {
			return err
		}
		d.SignalDue()
	}
	return nil
}

// look gives work to lanes that are idle. It reports whether there may be more at once.
func (d *Dispatcher) look(ctx context.Context) (more bool, err error) {
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
	for _, k := range d.Kinds {
		room := k.Room()
		if room == 0 {
			full, suspects = full || due, suspects || expired
			continue
		}
		if due {
			if err := d.claimTrials(ctx, k); err != nil {
				return false, err
			}
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
	if d.TakeNew == nil {
		return more, nil
	}
	got, answered, err := d.TakeNew(ctx)
	d.answered = d.answered || answered
	return more || got, err
}

// claimed says which rows are claimed.
type claimed struct {
	pairs    []Pair
	limit    int  // rows
	follow   int  // more of each key, at most
	suspects bool // may have ended the process which had them
	budget   int64
}

// take claims rows for a kind of lanes, and deals them. It outlives a stop by a tenth of its time: what a claim has taken whose
// answer is lost stays with this worker until its lease expires.
func (d *Dispatcher) take(ctx context.Context, k *LaneKind, c claimed) (rows int, err error) {
	if len(c.pairs) == 0 {
		return 0, nil
	}
	const share = 10
	ctx, end := wait.Grace(ctx, d.cfg.StopTimeout/share)
	defer end()
	ctx, cancel := context.WithTimeout(ctx, DispatchTimeout)
	defer cancel()
	began := time.Now()
	got, err := d.store.Claim(ctx, c.pairs, c.limit, c.follow, c.suspects, c.budget)
	if err != nil {
		return 0, err
	}
	d.answered = true
	d.Deal(k, got, began)
	return len(got), nil
}

// claim claims rows that are due for a kind of lanes. It reports whether there may be more.
func (d *Dispatcher) claim(ctx context.Context, k *LaneKind, room int) (more bool, err error) {
	limit := room * k.Batch()
	rows, err := d.take(ctx, k, claimed{pairs: d.unpaused(k), limit: limit, follow: k.Batch(), budget: d.Claimed.Budget()})
	return err == nil && rows > 0 && rows >= limit && k.Room() > 0, err
}

// claimSuspect claims a single row that may have ended the process which had it, unless one is
// here already. It reports whether there may be more, for when it is handled.
func (d *Dispatcher) claimSuspect(ctx context.Context, k *LaneKind) (more bool, err error) {
	if d.Claimed.hasSuspect() {
		return true, nil
	}
	rows, err := d.take(ctx, k, claimed{pairs: d.unpaused(k), limit: 1, suspects: true})
	return rows > 0, err
}

// claimTrials claims a row of each action whose breaker permits to try one.
func (d *Dispatcher) claimTrials(ctx context.Context, k *LaneKind) error {
	for _, p := range k.Pairs {
		if d.Breakers.IsClosed(p.Action) || d.Pauses.IsPaused(p.Stream) {
			continue
		}
		if wait := d.Breakers.Wait(p.Action); wait > 0 {
			d.RetryAt(time.Now().Add(wait))
			continue
		}
		if !d.Breakers.TryOne(p.Action) {
			continue
		}
		rows, err := d.take(ctx, k, claimed{pairs: []Pair{p}, limit: 1, budget: d.Claimed.Budget()})
		if rows == 0 {
			d.Breakers.Forget(p.Action)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unpaused returns what is claimed for a kind of lanes, beginning with another pair each time. What most events fail of
// is not among it.
func (d *Dispatcher) unpaused(k *LaneKind) (pairs []Pair) {
	k.Pairs = append(k.Pairs[1:], k.Pairs[0])
	for _, p := range k.Pairs {
		if !d.Pauses.IsPaused(p.Stream) && d.Breakers.IsClosed(p.Action) {
			pairs = append(pairs, p)
		}
	}
	return pairs
}

// Deal deals rows, in the order of their positions, to lanes: all rows of a key to the same one.
func (d *Dispatcher) Deal(k *LaneKind, rows []Delivery, claimed time.Time) {
	if len(rows) == 0 {
		return
	}
	size := k.size(len(rows))
	var batches [][]Delivery
	of := map[Key]int{}
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
		d.Claimed.add(d.cut, batch, claimed)
	}
	for _, batch := range batches {
		k.give(batch)
	}
}

// SignalDue has rows claimed.
func (d *Dispatcher) SignalDue() {
	d.mu.Lock()
	d.due = true
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// RetryAt has rows claimed at a time.
func (d *Dispatcher) RetryAt(at time.Time) {
	d.mu.Lock()
	if d.next.IsZero() || at.Before(d.next) {
		d.next = at
	}
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// signalStrays has this worker look for rows that it does not know of.
func (d *Dispatcher) signalStrays() {
	d.mu.Lock()
	d.unsure = true
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// signalExpired has suspects claimed.
func (d *Dispatcher) signalExpired() {
	d.mu.Lock()
	d.expired, d.due = true, true
	d.mu.Unlock()
	wait.Signal(d.freeNow)
}

// LaneKind is the lanes for handlers with a transaction, or for those without.
type LaneKind struct {
	lanes []*lane
	Pairs []Pair
	most  int // deliveries in a batch: fewer where handlers are slow

	mu   sync.Mutex
	load map[*lane]int  // batches that it has
	slow map[*lane]bool // those that are at a single call for long
	each time.Duration  // that a delivery has taken lately
}

// queue returns how many batches a lane shall have, the one under way included.
func (k *LaneKind) queue() int {
	if k.most > 1 {
		return 2
	}
	return 1
}

// Room returns how many batches the lanes can take: none as long as all are at work and most have the
// next batch, because a few large batches cost less than many small ones.
func (k *LaneKind) Room() (room int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	idle, quick := false, 0 // lanes
	for _, l := range k.lanes {
		if k.slow[l] {
			continue
		}
		quick++
		room += max(0, k.queue()-k.load[l])
		idle = idle || k.load[l] == 0
	}
	if !idle && 2*room < quick*k.queue() {
		return 0
	}
	return room
}

// A batch should take no longer than slowBatch, so that other processes do not wait for what this
// one has; and one that takes less than fastBatch may be larger.
const (
	fastBatch = 500 * time.Millisecond
	slowBatch = 2 * time.Second
)

// undividedBatch is how long the deliveries of a batch shall take at least before they are divided among
// lanes: a transaction of their own costs about as much.
const undividedBatch = 20 * time.Millisecond

// size returns how many of n deliveries make a batch.
func (k *LaneKind) size(n int) int {
	room := max(k.Room(), 1)
	k.mu.Lock()
	defer k.mu.Unlock()
	size := (n + room - 1) / room
	if k.each > 0 {
		size = max(size, int(undividedBatch/k.each))
	}
	return min(size, k.most)
}

// freed notes that a lane has handled a batch.
func (k *LaneKind) freed(l *lane, n int, took time.Duration, most int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.load[l]--
	delete(k.slow, l)
	const weight = 8 // of what was before
	k.each += (took/time.Duration(max(n, 1)) - k.each) / weight
	switch {
	case took > slowBatch && n > 1:
		k.most = max(1, min(k.most, n)/2)
	case took > slowBatch:
		k.most = 1
	case took < fastBatch && n >= k.most:
		k.most = min(2*k.most, most)
	}
}

// give gives a batch to the lane that has the fewest.
func (k *LaneKind) give(batch []Delivery) {
	k.mu.Lock()
	l := slices.MinFunc(k.lanes, func(a, b *lane) int {
		if k.slow[a] != k.slow[b] {
			if k.slow[a] {
				return 1
			}
			return -1
		}
		return cmp.Compare(k.load[a], k.load[b])
	})
	k.load[l]++
	l.in.add(batch)
	k.mu.Unlock()
}

// takeFromSlow takes what waits for lanes that are at a single call for longer than slowBatch, so that
// others handle it. These get nothing until the call has returned.
func (k *LaneKind) takeFromSlow() (waiting []Delivery) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lanes {
		call, ok := l.activity.Current()
		if !ok || time.Since(call.Began) < slowBatch {
			continue
		}
		k.slow[l] = true
		for _, batch := range l.in.takeAll() {
			k.load[l]--
			waiting = append(waiting, batch...)
		}
	}
	return waiting
}

// slowLanes returns those that are at a single call for longer than slowBatch.
func (k *LaneKind) slowLanes() []*lane {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.slow))
}

// Batch returns how many deliveries a batch has at most.
func (k *LaneKind) Batch() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.most
}
