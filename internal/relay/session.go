package relay

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// cursorStore reads and moves the cursor of a relay. [cursor.Store] does so in PostgreSQL.
type cursorStore interface {
	Load(ctx context.Context, l *lease.Lease) (cursor.Position, error)
	Rebase(ctx context.Context, l *lease.Lease) (unsent int64, err error)
	Open(ctx context.Context, l *lease.Lease, p cursor.Position, limit int) (next cursor.Position, events []envelope.Event, large bool, err error)
	Probe(ctx context.Context) (changed bool, err error)
	windowStore
	Move(ctx context.Context, l *lease.Lease, p cursor.Position, failures []cursor.Failure) (id int64, err error)
	Count(ctx context.Context, ids []int64, created []time.Time) (there int, err error)
}

// SessionParts is what a session is made from.
type SessionParts struct {
	lease.Leadership
	Rules   Rules
	Hooks   Hooks
	Cursors cursorStore
	Leases  interface {
		Renew(ctx context.Context, l *lease.Lease) error
	}
	Failed interface {
		Keys(statement lease.StatementContext, wrong *[]string) func(after string) ([]cursor.KeyRows, error)
		Freed(statement lease.StatementContext, since time.Duration) func() ([]cursor.KeyRows, error)
		BadPartitions(ctx context.Context) ([]cursor.BadPartition, error)
	}
	Deliverer interface {
		Deliver(stop, held context.Context, batch []envelope.Event, parked *Parking) ([]Outcome, error)
		Topic(e *envelope.Event) (string, error)
	}
	Ticks      *wakeup.Ticks
	Parked     *Parking       // shared with the retrier
	Bad        *BadPartitions // shared with the retriers
	Unanswered *Unanswered    // shared with the retriers
	Health     relayHealth
	Log        *slog.Logger
	Outage     *outage.Log     // PostgreSQL
	Wake       <-chan struct{} // wake requests of this process
	Heard      <-chan struct{} // notifications of other processes

	EventDied func() // called after an event has become dead
	Waits     func() // called after a row was written that waits for a topic or partition

	Exactly *Exactly // nil unless each event is to be sent exactly once
}

// Session relays events under one lease: it opens a window, sends its events in batches, and moves the cursor. It
// belongs to the goroutine of Run.
type Session struct {
	SessionParts

	schedule wakeup.PollSchedule
	pos      cursor.Position
	recorded bool // pos is in outbox_cursor
	Opened   bool // a window, or found nothing to open
	Window   windowReader
	recent   recentEvents
	group    *contain.Group // what runs alongside: a prefetch, and other parts of the relay
	stale    int            // how often in a row the cursor was stale, without a window that opened or a move

	Backlog atomic.Bool // more than a batch is left to send; read by the cleaner
}

// NewSession returns a session that has not loaded its position yet.
func NewSession(p SessionParts) *Session {
	return &Session{
		SessionParts: p, Window: NewWindowReader(p.Cursors, p.Rules.BatchSize), group: p.NewGroup(), schedule: wakeup.PollSchedule{Idle: p.Rules.PollInterval, Ticks: p.Ticks},
	}
}

// Run relays until ctx is cancelled; then it returns nil. Once the position is loaded, it runs the other parts of
// the relay in goroutines of their own, and returns after them.
func (s *Session) Run(ctx context.Context, others ...func(context.Context)) error {
	defer s.Window.forget()
	load := s.Load
	if s.Exactly != nil { // the position is in Kafka, and the other parts do not wait for that
		load = s.hasPosition
	}
	if err := load(); err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	for _, other := range others {
		s.group.Go(func() { other(running) })
	}
	panics := true // unless stayUpToDate returns
	defer s.group.Wait()
	defer func() {
		stop()
		if s.Exactly != nil {
			s.Exactly.End()
		}
		if panics {
			s.Lose(lease.ErrLeaseLost) // so that the others end at once
		}
	}()
	err := s.stayUpToDate(ctx)
	panics = false
	return err
}

// stayUpToDate relays. When the cursor is not the one that the session knows, it forgets what it has read and loads
// the cursor again.
func (s *Session) stayUpToDate(ctx context.Context) (err error) {
	for err == nil {
		if err = s.startExactly(ctx); err == nil {
			err = s.follow(ctx)
		}
		known := s.pos.CursorID
		if !errors.Is(err, cursor.ErrStale) {
			return err
		}
		s.Window.forget()
		if !errors.Is(err, errTransaction) {
			s.awaitFresh(ctx)
		}
		// Loading proves nothing, and another process may have moved the cursor: on a
		// machine that was suspended, the clock has not seen the lease expire.
		err = s.try(func(ctx context.Context) error { return s.Leases.Renew(ctx, s.Lease) })
		if err != nil || s.Exactly != nil {
			continue
		}
		if err = s.Load(); err == nil {
			err = s.reportJump(known)
		}
	}
	return err
}

// Load reads the newest position, the parked keys and the bad partitions. It rebases a position of another cluster
// first.
func (s *Session) Load() (err error) {
	if trace.On {
		step := trace.Begin("load", "epoch", s.Lease.Epoch)
		defer func() { step.End("ok", err == nil, "at", s.pos.Highest, "by", s.pos.Epoch) }()
	}
	load := func(ctx context.Context) (err error) {
		s.pos, err = s.Cursors.Load(ctx, s.Lease)
		return err
	}
	err = s.try(load)
	if errors.Is(err, cursor.ErrOtherCluster) {
		if err = s.rebase(); err == nil {
			err = s.try(load)
		}
	}
	s.recorded = true
	if err == nil && s.pos.Window != "" {
		err = s.Window.Begin(s.pos)
	}
	if err != nil {
		return err
	}
	err = s.try(func(context.Context) error {
		s.Parked.reset()
		if s.Exactly != nil {
			s.Exactly.keepLocked(s.Parked)
		}
		return s.Parked.Recount(s.parkedKeys())
	})
	if err != nil {
		return err
	}
	return s.try(func(ctx context.Context) error { // with a time of its own: to read very many keys may take longer
		bad, err := s.Failed.BadPartitions(ctx)
		if err == nil {
			s.Bad.Load(bad)
		}
		return err
	})
}

// statement is WithStatementTimeout for one of several statements. That the one before has ended is progress.
func (s *Session) statement() (context.Context, context.CancelFunc) {
	s.Health.Progressed()
	return s.WithStatementTimeout()
}

// parkedKeys returns a function that returns pages of the keys that have to wait. While the lease
// is not exclusive, these include keys that an operator has freed: the process that led before may
// still be sending the resolved events.
func (s *Session) parkedKeys() func(after string) ([]cursor.KeyRows, error) {
	page := s.Failed.Keys(s.statement, nil)
	if s.Lease.Exclusive() {
		return page
	}
	const longest = time.Hour // that another process can have had an event in flight, whatever its lease was
	freed := s.Failed.Freed(s.statement, max(longest, 2*s.Rules.Lease))
	return func(after string) ([]cursor.KeyRows, error) {
		keys, err := page(after)
		if err == nil && len(keys) == 0 {
			keys, err = freed()
		}
		return keys, err
	}
}

// rebase moves the cursors here from the cluster that the database came from. It has no time limit.
func (s *Session) rebase() error {
	start := time.Now()
	var unsent int64
	s.Health.BeginLongTask("the cursor is moved here from another cluster")
	defer s.Health.EndLongTask()
	err := s.try(func(context.Context) (err error) {
		unsent, err = s.Cursors.Rebase(s.Held, s.Lease)
		return err
	})
	if err == nil {
		s.Log.Warn("outbox: database was restored from another cluster, the cursor is moved to this one",
			"unsent", unsent, "took", time.Since(start).Round(time.Millisecond))
	}
	return err
}

// follow relays from the loaded position on.
func (s *Session) follow(ctx context.Context) error {
	for ctx.Err() == nil {
		batch, err := s.Next(ctx)
		if err != nil {
			return err
		}
		s.Backlog.Store(!s.Window.drained())
		if len(batch) == 0 {
			if err := s.awaitConfirmed(); err != nil {
				return err
			}
			s.Health.CursorMoved()
			s.await(ctx)
			continue
		}
		if err := s.send(ctx, batch); err != nil {
			return err
		}
		if s.Window.drained() {
			s.await(ctx)
		}
	}
	if err := s.awaitConfirmed(); err != nil {
		return err
	}
	return s.record(nil)
}

// await waits until the next poll is due.
func (s *Session) await(ctx context.Context) {
	for {
		pause := s.schedule.Wait(time.Now())
		if pause == 0 || !s.sleep(ctx, pause) || !s.schedule.Probing(time.Now()) {
			return
		}
		if s.probe() {
			return
		}
	}
}

// probeTimeout is short because a probe may run on the connection of another relay, which may be dead.
const probeTimeout = time.Second

// probe asks cheaply whether a poll may find something. An error counts as yes: the poll then reports it.
func (s *Session) probe() bool {
	s.Health.Progressed()
	ctx, cancel := context.WithTimeout(s.Held, probeTimeout)
	defer cancel()
	changed, err := s.Cursors.Probe(ctx)
	return changed || err != nil
}

// sleep reports whether the whole pause has passed.
func (s *Session) sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.Wake:
		s.schedule.Woken()
	case <-s.Heard:
		s.schedule.Notified(time.Now())
	case <-ctx.Done():
	case <-s.Held.Done():
	}
	return false
}

// Next returns the events to send next: the rest of the open window, or a new window. It returns none when there is
// nothing to send, or when ctx is cancelled.
func (s *Session) Next(ctx context.Context) (batch []envelope.Event, err error) {
	for ctx.Err() == nil && err == nil && len(batch) == 0 {
		switch {
		case s.Window.drained():
			var large bool
			if batch, large, err = s.Open(); !large {
				return batch, err
			}
		case !s.Window.Paged():
			err = s.try(func(ctx context.Context) error { return s.Window.Page(ctx, s.pos) })
			if s.Exactly == nil || !s.Exactly.readsAgain() {
				s.Health.CursorMoved()
			}
		default:
			batch, err = s.take()
		}
	}
	return batch, err
}

// Open opens the next window and returns its events. A large window it only announces; the window is then read in
// parts.
//
// While the statement reads, no other statement can renew the lease. So it gets less time than the lease lasts. It
// reads nothing if it took too long before, or if it is the first of the session: reading may be why the last
// session lost its lease.
func (s *Session) Open() (batch []envelope.Event, large bool, err error) {
	began, limit := time.Now(), s.Window.Limits.Events.Most
	if !s.Opened {
		limit = 0
	}
	err = s.try(func(ctx context.Context) (err error) {
		batch, large, err = s.openUpTo(ctx, limit)
		if pg.IsCancelled(err) && limit > 1 {
			s.Window.Limits.Events.keepBelow(limit)
		}
		if limit > 0 && (tookTooLong(err) || pg.IsUnreadable(err)) {
			limit = 0
			batch, large, err = s.openUpTo(ctx, limit)
		}
		return err
	})
	if err == nil {
		s.isFresh()
	}
	switch {
	case err == nil && large:
		s.schedule.Polled(began, s.Rules.BatchSize) // at least about as many
		err = s.Window.Begin(s.pos)
	case err == nil:
		s.schedule.Polled(began, len(batch))
		s.Window.Limits.Events.grow(len(batch))
	}
	s.Opened, s.recorded = s.Opened || err == nil, s.recorded || err == nil
	return batch, large, err
}

func (s *Session) openUpTo(ctx context.Context, limit int) (batch []envelope.Event, large bool, err error) {
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.StatementTimeout/4)
		defer cancel()
	}
	known := s.pos
	var step trace.Step
	if trace.On {
		step = trace.Begin("open", "epoch", s.Lease.Epoch, "at", known.Highest)
	}
	s.pos, batch, large, err = s.Cursors.Open(ctx, s.Lease, s.pos, limit)
	if trace.On {
		step.End("ok", err == nil, "no", errors.Is(err, cursor.ErrStale) || errors.Is(err, lease.ErrLeaseLost), "wrote", s.pos.CursorID != known.CursorID)
	}
	return batch, large, err
}

// take returns the events that were prefetched, or fetches them now.
func (s *Session) take() (batch []envelope.Event, err error) {
	if batch = s.Window.prefetched(); len(batch) > 0 || s.Window.drained() {
		return batch, nil
	}
	err = s.try(func(context.Context) (err error) {
		batch, err = s.Window.Take(s.pos, s.statement)
		return err
	})
	return batch, err
}

// try repeats f until PostgreSQL answers. It stops when the lease is lost or the time to stop is
// over. It returns the errors that repeating cannot correct.
func (s *Session) try(f func(context.Context) error) error {
	for locked := false; ; {
		s.Health.Progressed()
		ctx, cancel := s.WithStatementTimeout()
		err := f(ctx)
		cancel()
		switch {
		case s.Held.Err() != nil && err != nil:
			return context.Cause(s.Held)
		case pg.IsUndefined(err):
			return pg.NotMigrated(s.Rules.Schema, err)
		case errors.Is(err, errTransaction): // PostgreSQL may not have been asked
			return err
		case err == nil, errors.Is(err, cursor.ErrStale), errors.Is(err, lease.ErrLeaseLost), errors.Is(err, cursor.ErrMode),
			errors.Is(err, cursor.ErrDisagree), errors.Is(err, cursor.ErrOtherCluster), errors.Is(err, cursor.ErrSequenceBehind):
			if s.stale <= maxStale {
				s.Outage.Report(nil)
			}
			return err
		case pg.IsWaitInVain(err): // PostgreSQL has answered
			s.Outage.Report(nil)
			if !locked {
				s.Log.Warn("outbox: another transaction has locked rows that have to be changed first; nothing is sent until it ends", "error", err)
			}
			locked = true
			wait.Sleep(s.Held, lockedInterval)
			continue
		}
		s.Outage.Report(err)
		wait.Sleep(s.Held, s.Outage.Backoff())
	}
}
