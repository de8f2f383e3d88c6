package delivery

import (
	"context"
	"errors"
	"log/slog"
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

// Dispatcher claims deliveries and deals them to the lanes of this process: due rows of event_delivery, and
// rows that TakeNew inserts. It claims no more than the lanes can handle soon, so that other processes of
// the group get the rest.
type Dispatcher struct {
	cfg      *Rules
	store    *Store
	Pauses   *pauses.Set
	Breakers *handling.ActionBreakers
	outages  *outage.Logs
	log      *slog.Logger
	Claimed  *claimedSet
	wake     <-chan struct{} // this process has recorded events
	heard    <-chan struct{} // other processes have
	cut      context.Context // ends when attempts must end
	Kinds    []*LaneKind
	members  *members

	// TakeNew inserts deliveries for new events if lanes have room, and deals those that are claimed with
	// that. It reports whether there are more events, and whether PostgreSQL has answered. Nil if other
	// code inserts them.
	TakeNew func(context.Context) (more, answered bool, err error)

	answered     bool                // PostgreSQL has answered in this poll; only run
	inserted     bool                // and TakeNew has succeeded, or had nothing to do; only run
	PollSchedule wakeup.PollSchedule // of polls for new events; only run
	Full         bool                // no lane had room at the last call of TakeNew; only run
	Listens      atomic.Bool         // this process hears notifications for the group, and polls often after one

	mu           sync.Mutex
	due          bool          // rows may be due
	nextDue      time.Time     // when a row will be due; zero if none is known
	suspects     bool          // rows may have been taken over, and are claimed alone
	checkUnknown bool          // rows may be claimed by this process without its knowledge
	unknownAt    time.Time     // when these are looked for, because of a lock
	lastFull     time.Time     // the last poll that looked for everything
	changed      chan struct{} // signalled when await has to return
}

// Names of outages in the log, in addition to handling.OutagePostgres.
const (
	outagePromoting  = "promoting deliveries"
	outageRenewing   = "renewing deliveries"
	outageTakingOver = "taking over deliveries"
	outageLocks      = "getting a lock that another session holds"
	outageHolders    = "looking for sessions that hold locks"
)

// OutageMember is the name of an outage that a process meets without any deliveries.
const OutageMember = "renewing the row of this process"

// run claims and deals until stopping ends.
func (d *Dispatcher) run(stopping context.Context) error {
	for stopping.Err() == nil {
		began := time.Now()
		more, err := d.poll(stopping)
		switch {
		case pg.IsUndefined(err):
			return pg.NotMigrated(d.cfg.Schema, err)
		case errors.Is(err, cursor.ErrSequenceBehind):
			return err
		case err != nil:
			d.signalUnknown()
			if pg.IsTransient(err) { // a deadlock is no outage
				wait.Sleep(stopping, LockPause)
				d.SignalDue()
				continue
			}
			if stopping.Err() == nil {
				what := handling.OutagePostgres
				if pg.IsWaitInVain(err) {
					what = outageLocks
				}
				d.outages.Report(what, began, err)
				d.cfg.awaitRetry(stopping, d.outages, what)
				d.SignalDue()
			}
			continue
		}
		if d.answered && d.outages.Failing() {
			d.outages.Report(handling.OutagePostgres, began, nil)
			if d.inserted || d.TakeNew == nil {
				d.outages.Report(outageLocks, began, nil)
			}
		}
		if !more {
			d.await(stopping)
		}
	}
	return nil
}

// await waits for a free lane, a wake-up, a row that becomes due, or the time of the next poll.
func (d *Dispatcher) await(stopping context.Context) {
	d.mu.Lock()
	until := d.lastFull.Add(d.cfg.PollInterval)
	if !d.nextDue.IsZero() && d.nextDue.Before(until) {
		until = d.nextDue
	}
	d.mu.Unlock()
	if d.TakeNew != nil && d.Listens.Load() && !d.Full {
		if next := time.Now().Add(d.PollSchedule.Wait(time.Now())); next.Before(until) {
			until = next
		}
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-d.wake:
		d.PollSchedule.Woken()
	case <-d.heard:
		d.PollSchedule.Notified(time.Now())
	case <-d.changed:
	case <-timer.C:
	case <-stopping.Done():
	}
}

// DispatchTimeout bounds a statement that claims or inserts deliveries. A connection can go dead silently,
// and TCP needs a quarter of an hour to detect that.
const DispatchTimeout = 30 * time.Second

// release releases deliveries that lanes will not begin, so that other processes can claim them.
func (d *Dispatcher) release(ctx context.Context, rows []Delivery) {
	if len(rows) == 0 {
		return
	}
	if err := d.store.Release(ctx, rows); err != nil {
		d.signalUnknown()
		if !errors.Is(ctx.Err(), context.Canceled) {
			d.log.Warn(notReleased, "deliveries", len(rows), "error", err)
		}
	}
	for _, r := range rows {
		d.Claimed.remove(r.Ref)
	}
	d.SignalHeads()
}

// noteBegun has the attempts on the deliveries of an abandoned call count. Its handler may never return.
func (d *Dispatcher) noteBegun(ctx context.Context, call handling.Call) {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	for _, rows := range d.Claimed.begunBy(call) {
		if err := d.store.Begin(ctx, rows); err != nil && !errors.Is(err, ErrLost) {
			d.log.Warn("outbox: the attempt on a delivery whose handler does not return cannot be counted",
				append(call.Attrs(), "deliveries", len(rows), "error", err)...)
		}
	}
}

const notReleased = "outbox: deliveries could not be released, other processes get them when their leases expire"

// releaseUnknown releases rows that this process has claimed without knowing it. Either the answer to a
// claim was lost, or a crash of PostgreSQL has forgotten that the rows were released or finished. Otherwise
// the rows would wait until their leases expire, and each expiry would count as an attempt. It returns the number of
// released rows. The error is errStillLocked, or a [*pg.LockError], if another session has locked some of them.
func (d *Dispatcher) releaseUnknown(ctx context.Context) (released int, err error) {
	ctx, cancel := context.WithTimeout(ctx, DispatchTimeout)
	defer cancel()
	own, err := d.store.Own(ctx)
	if err != nil {
		return 0, err
	}
	unknownClaims := d.Claimed.missing(own)
	if len(unknownClaims) == 0 {
		return 0, nil
	}
	if released, err = d.store.releaseFree(ctx, unknownClaims); released > 0 {
		d.SignalHeads()
	}
	if err == nil && released < len(unknownClaims) { // or other processes have them meanwhile
		err = errStillLocked
	}
	return released, err
}

var errStillLocked = errors.New("another session has locked deliveries that this process has claimed")

// isLocked reports whether releaseUnknown has failed for a lock of another session. That is no reason not to claim
// other rows, so it tries again in a later poll.
func (d *Dispatcher) isLocked(err error) bool {
	if !errors.Is(err, errStillLocked) && !pg.IsWaitInVain(err) {
		return false
	}
	d.log.Debug("outbox: deliveries that this process has claimed without knowing it cannot be released yet", "error", err)
	at := time.Now().Add(d.cfg.Lease / retryShare)
	d.mu.Lock()
	d.checkUnknown, d.unknownAt = true, at
	d.mu.Unlock()
	d.RetryAt(at)
	return true
}

// releaseLast is releaseUnknown at the end of a stop. PostgreSQL may still commit a claim whose answer was lost, so
// after an error it tries again for StopGrace, until it finds such a claim.
func (d *Dispatcher) releaseLast(ctx context.Context) {
	d.mu.Lock()
	doubtful := d.checkUnknown
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 2*d.cfg.StopGrace())
	defer cancel()
	const pause = 50 * time.Millisecond
	began := time.Now()
	for {
		released, err := d.releaseUnknown(ctx)
		if err == nil && (released > 0 || !doubtful) || time.Since(began) > d.cfg.StopGrace() || ctx.Err() != nil {
			if err != nil {
				d.log.Warn("outbox: it is not known whether deliveries are still claimed by this process; "+
					"other processes get them when their leases expire", "error", err)
			}
			return
		}
		wait.Sleep(ctx, pause)
	}
}

// pollTasks are the tasks of a poll.
type pollTasks struct{ due, suspects, unknown bool }

// nextTasks returns the tasks of the next poll, and clears their signals. Once in PollInterval it returns
// all tasks, because other processes send no signals about their changes.
func (d *Dispatcher) nextTasks() pollTasks {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	tasks := pollTasks{d.due, d.suspects, d.checkUnknown && !now.Before(d.unknownAt)}
	if now.Sub(d.lastFull) >= d.cfg.PollInterval {
		tasks.due, tasks.suspects, d.lastFull = true, true, now
	}
	if !d.nextDue.IsZero() && !now.Before(d.nextDue) {
		tasks.due, d.nextDue = true, time.Time{}
	}
	d.due, d.suspects, d.checkUnknown = false, false, d.checkUnknown && !tasks.unknown
	return tasks
}

// poll claims deliveries for lanes that have room. It reports whether there may be more at once.
func (d *Dispatcher) poll(ctx context.Context) (more bool, err error) {
	tasks := d.nextTasks()
	d.answered, d.inserted = false, false
	if tasks.unknown {
		_, err := d.releaseUnknown(ctx)
		if d.answered = err == nil; err != nil && !d.isLocked(err) {
			return false, err
		}
	}
	dueLater, suspectsLater := false, false
	for _, k := range d.Kinds {
		if k.Room() == 0 {
			dueLater, suspectsLater = dueLater || tasks.due, suspectsLater || tasks.suspects
			continue
		}
		if tasks.due || k.hasShareAgain() {
			if err := d.claimTrials(ctx, k); err != nil {
				return false, err
			}
			got, later, err := d.claimDue(ctx, k)
			if err != nil {
				return false, err
			}
			more, dueLater = more || got, dueLater || later
		}
		if tasks.suspects {
			got, err := d.claimSuspect(ctx, k)
			if err != nil {
				return false, err
			}
			suspectsLater = suspectsLater || got
		}
	}
	d.mu.Lock()
	d.due = d.due || dueLater || more
	d.suspects = d.suspects || suspectsLater // the next one is claimed after this one is handled
	d.mu.Unlock()
	if d.TakeNew == nil {
		return more, nil
	}
	got, answered, err := d.TakeNew(ctx)
	d.answered, d.inserted = d.answered || answered, answered || err == nil && !d.Full
	return more || got, err
}

// claimRequest describes the rows to claim.
type claimRequest struct {
	pairs    []Claimable
	limit    int         // rows
	follow   int         // parked rows behind each of them, at most
	suspects suspectRoom // which suspects, if no other rows
	budget   int64
	trial    *handling.Trial // in which the row is tried, or nil
}

// claim claims rows for a kind of lanes, and deals them. A stop does not cut it off for StopGrace.
func (d *Dispatcher) claim(ctx context.Context, k *LaneKind, c claimRequest) (rows int, err error) {
	if len(c.pairs) == 0 || ctx.Err() != nil {
		return 0, ctx.Err()
	}
	ctx, end := wait.Grace(ctx, d.cfg.StopGrace())
	defer end()
	ctx, cancel := context.WithTimeout(ctx, DispatchTimeout)
	defer cancel()
	began := time.Now()
	got, err := d.store.claim(ctx, c.pairs, c.limit, c.follow, c.suspects, c.budget)
	if d.store.claimedUnseen.Swap(false) {
		d.signalUnknown()
	}
	if err != nil {
		return 0, err
	}
	d.answered = true
	d.deal(k, got, began, c.trial)
	return len(got), nil
}

// claimTrials claims rows of actions whose breakers are not closed, as many as they permit trials.
func (d *Dispatcher) claimTrials(ctx context.Context, k *LaneKind) error {
	for _, p := range k.claimable {
		if d.Breakers.IsClosed(p.Action) || d.Pauses.IsPaused(p.Stream) {
			continue
		}
		if wait := d.Breakers.Wait(p.Action); wait > 0 {
			d.RetryAt(time.Now().Add(wait))
			continue
		}
		for claimed := true; claimed && k.Room() > 0; {
			var err error
			if claimed, err = d.claimTrial(ctx, k, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// claimTrial claims one row for a trial of its action, if its breaker permits one. The trial belongs to the claim of
// the row, and ends with it.
func (d *Dispatcher) claimTrial(ctx context.Context, k *LaneKind, p Claimable) (claimed bool, err error) {
	trial, _ := d.Breakers.TryParked(p.Action)
	if trial == nil { // none is permitted, or none is needed any more
		return false, nil
	}
	rows := 0
	defer func() {
		if rows == 0 {
			trial.Release()
		}
	}()
	rows, err = d.claim(ctx, k, claimRequest{pairs: []Claimable{p}, limit: 1, budget: d.Claimed.Budget(), trial: trial})
	if room := d.Claimed.roomForSuspects(); err == nil && rows == 0 && room != noSuspects {
		rows, err = d.claim(ctx, k, claimRequest{pairs: []Claimable{p}, limit: 1, suspects: room, trial: trial})
	}
	return rows > 0, err
}

// claimablePairs returns the pairs of a kind of lanes whose streams are not paused and whose breakers are
// closed. It begins with another pair and with other types each time, so that each one gets its turn.
func (d *Dispatcher) claimablePairs(k *LaneKind) (pairs []Claimable) {
	k.claimable = append(k.claimable[1:], k.claimable[0])
	for i := range k.claimable {
		p := k.claimable[i]
		if len(p.Types) > 1 {
			p.Types = append(p.Types[1:], p.Types[0])
			k.claimable[i] = p
		}
		if !d.Pauses.IsPaused(p.Stream) && d.Breakers.IsClosed(p.Action) {
			pairs = append(pairs, p)
		}
	}
	return pairs
}

// Deal deals rows to lanes, in the order of their positions and all rows of a key to the same lane.
func (d *Dispatcher) Deal(k *LaneKind, rows []Delivery, claimedAt time.Time) {
	d.deal(k, rows, claimedAt, nil)
}

// deal is Deal of rows that are tried in a trial, if it is not nil. It releases the trial when the claim ends: the row
// has ended or was released, its call was given up, or the process stops. Then due rows are claimed, so that the next
// one has its trial.
func (d *Dispatcher) deal(k *LaneKind, rows []Delivery, claimedAt time.Time, trial *handling.Trial) {
	if len(rows) == 0 {
		return
	}
	size := k.batchSize(len(rows))
	var batches [][]Delivery
	batchOf := map[Key]int{}
	for i := range rows {
		r := &rows[i]
		n, known := batchOf[r.Key]
		if !known || !r.Key.Ordered {
			n = len(batches) - 1
			if n < 0 || len(batches[n]) >= size {
				batches, n = append(batches, make([]Delivery, 0, min(size, len(rows)))), n+1
			}
			batchOf[r.Key] = n
		}
		batches[n] = append(batches[n], *r)
	}
	for _, batch := range batches {
		ctx := d.Claimed.add(d.cut, batch, claimedAt, trial)
		if trial != nil {
			context.AfterFunc(ctx, func() {
				trial.Release()
				d.SignalDue()
			})
		}
	}
	for _, batch := range batches {
		k.enqueue(batch)
	}
}

// SignalDue has the next poll claim due rows.
func (d *Dispatcher) SignalDue() {
	d.mu.Lock()
	d.due = true
	d.mu.Unlock()
	wait.Signal(d.changed)
}

// SignalHeads is SignalDue when rows were made due that this process may have no handler for. It notifies the processes
// that have one.
func (d *Dispatcher) SignalHeads() {
	d.SignalDue()
	d.members.notify()
}

// RetryAt has due rows claimed at a time.
func (d *Dispatcher) RetryAt(at time.Time) {
	d.pollBy(at)
	wait.Signal(d.changed)
}

// pollBy is RetryAt within a poll.
func (d *Dispatcher) pollBy(at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.nextDue.IsZero() || at.Before(d.nextDue) {
		d.nextDue = at
	}
}

// signalUnknown has the next poll call releaseUnknown.
func (d *Dispatcher) signalUnknown() {
	d.mu.Lock()
	d.checkUnknown = true
	d.mu.Unlock()
	wait.Signal(d.changed)
}

// signalSuspects makes the next poll claim rows that were taken over.
func (d *Dispatcher) signalSuspects() {
	d.mu.Lock()
	d.suspects, d.due = true, true
	d.mu.Unlock()
	wait.Signal(d.changed)
}
