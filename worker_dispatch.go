package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/deliveries"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// dispatcher gives work to the lanes of a worker: rows of event_delivery that are due, and new
// events, of which it makes such rows. It takes no more than the lanes can handle soon, so that
// other processes of the group get the rest.
type dispatcher struct {
	cfg       *WorkerConfig
	store     *deliveries.Store
	fanOut    *fanOut
	processor *processor // for its log
	routes    routes
	pauses    *pauses.Set
	outages   *outage.Logs
	log       *slog.Logger
	hands     *hands
	lease     *groupLease
	hooks     *contain.Callback // calls the hooks of what no lane has
	wake      <-chan struct{}
	cut       context.Context
	kinds     []*laneKind

	backlog   atomic.Bool // there were more events than could be taken
	round     fanOutRound // only run
	answered  bool        // PostgreSQL has answered in this look; only run
	lookAgain time.Time   // only run: whether the group still gets its events from Kafka
	starting  bool        // only run: the group may have no position yet

	mu      sync.Mutex
	due     bool      // rows may be claimed
	next    time.Time // when a row will be due, zero for none that is known
	expired bool      // rows were taken from workers that are gone
	unsure  bool      // rows may be with this worker that it does not know of
	moved   bool      // the group gets no new events
	freeNow chan struct{}
	poll    time.Time // of the last look at everything
}

// hasBacklog reports whether there were more events than could be taken when it looked last.
func (d *dispatcher) hasBacklog() bool { return d.backlog.Load() }

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
	got, err := d.takeNew(ctx)
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

// fanOutRound is what has been planned in the round of fan-out under way.
type fanOutRound struct {
	left    map[*laneKind]int // deliveries that its lanes can take
	status  map[deliveries.Key]deliveries.Status
	unknown []eventHead // no handler takes their types
}

// takeNew makes deliveries of new events, if lanes can take some. It reports whether there are more.
func (d *dispatcher) takeNew(ctx context.Context) (more bool, err error) {
	if d.isMoved() && time.Now().Before(d.lookAgain) {
		return false, nil
	}
	d.round = fanOutRound{left: map[*laneKind]int{}, status: map[deliveries.Key]deliveries.Status{}}
	limit := 0
	for _, k := range d.kinds {
		d.round.left[k] = k.room() * k.batch()
		limit = max(limit, d.round.left[k])
	}
	if limit == 0 {
		return false, nil
	}
	if d.starting || d.isMoved() {
		if err := d.begin(ctx); err != nil {
			return false, d.ifNotMoved(err)
		}
	}
	began := time.Now()
	_, more, err = d.fanOut.round(ctx, limit, d.hands.budget(), func(rows []deliveries.Delivery) error {
		for _, k := range d.kinds {
			var own []deliveries.Delivery
			for _, r := range rows {
				if slices.Contains(k.pairs, deliveries.Pair{Action: r.Action, Stream: r.Stream}) {
					own = append(own, r)
				}
			}
			d.deal(k, own, began)
		}
		return nil
	})
	d.answered = d.answered || err == nil
	if err == nil && len(d.round.unknown) > 0 {
		d.reportUnknown(ctx, d.round.unknown)
	}
	d.backlog.Store(more)
	if errors.Is(err, pgx.ErrNoRows) || errors.Is(err, errOtherCluster) { // its position was deleted, or is another server's
		d.starting = true
		return true, nil
	}
	return more, d.ifNotMoved(err)
}

// begin makes sure that the group has a position here.
func (d *dispatcher) begin(ctx context.Context) error {
	if err := d.fanOut.cursors.checkSequence(ctx); err != nil {
		return err
	}
	if err := d.fanOut.begin(ctx, d.cfg.FromStart); err != nil {
		return err
	}
	err := d.fanOut.load(ctx, d.fanOut.db)
	if errors.Is(err, errOtherCluster) {
		if err = d.rebase(ctx); err == nil {
			err = d.fanOut.load(ctx, d.fanOut.db)
		}
	}
	if err != nil {
		return err
	}
	d.starting = false
	d.setMoved(false)
	return nil
}

// rebase moves all positions here from the cluster that the database came from. One process of
// the group does that; for the others the lease is held meanwhile.
func (d *dispatcher) rebase(ctx context.Context) error {
	began := time.Now()
	l, err := d.lease.acquire(ctx)
	if err != nil {
		return fmt.Errorf("rebase cursor: %w", err)
	}
	defer func() {
		if err := d.lease.giveUp(l, d.cfg.StopTimeout); err != nil {
			d.log.Warn("outbox: the lease for a rebase is not released, it expires", "error", err)
		}
	}()
	if err := d.fanOut.load(ctx, d.fanOut.db); !errors.Is(err, errOtherCluster) { // another process was faster
		return err
	}
	unsent, err := d.fanOut.cursors.rebase(ctx, l)
	if err == nil {
		d.log.Warn("outbox: database was restored from another cluster, the cursor is moved to this one",
			"unsent", unsent, "took", time.Since(began).Round(time.Millisecond))
	}
	return err
}

// ifNotMoved returns an error, unless it says that the group gets its events from Kafka. This is looked at
// again after PollInterval.
func (d *dispatcher) ifNotMoved(err error) error {
	if !errors.Is(err, errMoved) {
		return err
	}
	d.lookAgain = time.Now().Add(d.cfg.PollInterval)
	d.setMoved(true)
	return nil
}

// hookShare is which part of a lease a hook may take that is called where it holds up all else.
const hookShare = 10

// reportUnknown logs events of types without a handler, and calls hooks for them.
func (d *dispatcher) reportUnknown(ctx context.Context, events []eventHead) {
	all := make([]Metadata, len(events))
	for i, e := range events {
		stream, _ := e.destination() // plan has had it
		all[i] = Metadata{Type: e.eventType, Subject: e.aggregate, origin: &origin{key: []byte(e.recordKey()), delivery: deliveryOrigin{stream: stream}}}
		if d.cfg.Unknown == DeadLetterUnknown {
			d.log.Error("outbox: delivery is dead, the group has no handler for its type", "stream", stream, "type", e.eventType, "outbox_id", e.id)
		} else {
			d.processor.logSkipped(all[i])
		}
	}
	h := d.cfg.Hooks
	if h.Unknown == nil && h.DeadLettered == nil {
		return
	}
	d.hooks.Notify(ctx, func() {
		for _, m := range all {
			if h.Unknown != nil {
				h.Unknown(m)
			}
			if d.cfg.Unknown == DeadLetterUnknown && h.DeadLettered != nil {
				h.DeadLettered(m, "", "", unknownType(m.Type))
			}
		}
	})
}

// isMoved reports whether the group gets its events from Kafka now.
func (d *dispatcher) isMoved() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.moved
}

func (d *dispatcher) setMoved(moved bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.moved = moved
}

// plan says what is owed for an event: a delivery for each of its handlers.
func (d *dispatcher) plan(e eventHead) (owed []deliveries.New) {
	stream, err := e.destination()
	if err != nil || !d.fanOut.routes.streams[stream] {
		return nil
	}
	most := attempts(d.cfg.of(stream).MaxRetries)
	pairs := d.fanOut.routes.byType[e.eventType]
	for _, p := range pairs {
		if p.Stream == stream {
			key := d.keyOf(e, p.Action, stream)
			owed = append(owed, deliveries.New{OutboxID: e.id, Action: p.Action, Stream: stream, Key: key, MaxAttempts: most, Status: d.statusOf(key, p)})
		}
	}
	if len(owed) > 0 {
		return owed
	}
	d.round.unknown = append(d.round.unknown, e)
	if d.cfg.Unknown == DeadLetterUnknown {
		owed = append(owed, deliveries.New{OutboxID: e.id, Stream: stream, Key: d.keyOf(e, "", stream), Status: deliveries.Dead, MaxAttempts: most})
	}
	return owed
}

// statusOf returns what a new delivery becomes if its key is free: it is for this worker as long as its
// lanes can take more. What follows in the same key is with it.
func (d *dispatcher) statusOf(key deliveries.Key, pair deliveries.Pair) deliveries.Status {
	if s, ok := d.round.status[key]; ok && key.Ordered {
		return s
	}
	status, rest := deliveries.Pending, deliveries.Parked
	for k, left := range d.round.left {
		if left > 0 && slices.Contains(k.pairs, pair) && !d.pauses.IsPaused(pair.Stream) {
			d.round.left[k]--
			status, rest = deliveries.Processing, deliveries.Processing
		}
	}
	d.round.status[key] = rest
	if status == deliveries.Pending {
		d.signalDue()
	}
	return status
}

func (d *dispatcher) keyOf(e eventHead, action, stream string) deliveries.Key {
	if d.cfg.Unordered {
		return deliveries.Key{}
	}
	return deliveries.KeyOf(d.cfg.Group, action, stream, e.recordKey())
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
