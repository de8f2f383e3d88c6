package outbox

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// session is the work under one lease. It belongs to the goroutine of Run; a
// prefetch reads the cursor beside it, and touches nothing of the session.
type session struct {
	*Relay
	lease    *lease
	held     context.Context // ends when the lease is lost or time is up
	producer *producer
	parked   parking
	failed   *failedStore

	woken    bool // the last look was asked for by Wake
	pos      position
	recorded bool    // pos stands in outbox_cursor
	left     []int64 // ids of the open window that nobody has fetched
	more     bool    // the window may have events behind left
	size     int     // how many events to fetch at once
	fetching chan fetched

	behind atomic.Bool // more than a batch is left to send; read by the cleaner
}

// fetched is what a prefetch brings: events, and what is left behind them.
type fetched struct {
	events []envelope
	left   []int64
	more   bool
	size   int
	err    error
}

func newSession(r *Relay, l *lease, held context.Context) *session {
	s := &session{
		Relay: r, lease: l, held: held,
		producer: newProducer(r, l, r.kafkaOutage),
		failed:   r.failed,
		size:     r.cfg.BatchSize,
	}
	s.producer.turn = func() { r.vitals.note(nil) }
	return s
}

func (s *session) close() {
	s.forget()
	s.producer.close()
}

// run relays until ctx is cancelled; then it returns nil. Whenever the cursor
// turns out to be another than the one it knows, it forgets all and reads it.
func (s *session) run(ctx context.Context) error {
	err := s.load()
	if err != nil {
		return err
	}
	var beside sync.WaitGroup
	running, stop := context.WithCancel(ctx)
	beside.Go(func() { newRetrier(s).run(running) })
	beside.Go(func() { newCleaner(s).run(running) })
	beside.Go(func() { s.keepWatch(running) })
	defer beside.Wait()
	defer stop()
	return s.stayUpToDate(ctx)
}

func (s *session) stayUpToDate(ctx context.Context) (err error) {
	for err == nil {
		err = s.follow(ctx)
		left := s.pos.cursorID
		if !errors.Is(err, errStale) {
			return err
		}
		s.forget()
		// Loading proves nothing, and somebody else may have moved the cursor: the
		// clock of a machine that was suspended has not seen the lease expire.
		err = s.try(func(ctx context.Context) error { return s.leases.renew(ctx, s.lease) })
		if err == nil {
			err = s.load()
		}
		if err == nil {
			s.reportJump(left)
		}
	}
	return err
}

// reportJump says that the cursor was not where it was left.
func (s *session) reportJump(left int64) {
	if s.pos.cursorID == left { // another server, or the same one restarted
		return
	}
	what := "outbox: cursor is not where it was left; some events may be sent twice"
	if s.pos.cursorID < left {
		what = "outbox: PostgreSQL has lost the newest rows of the cursor, in a crash or a failover to a server that lagged; " +
			"events since then are sent again, and some that were sent may have lost their transactions"
	}
	s.log.Warn(what, "left", left, "found", s.pos.cursorID)
}

// load reads the newest position. One that was written in another cluster is
// rebased first.
func (s *session) load() error {
	load := func(ctx context.Context) (err error) {
		s.pos, err = s.cursors.load(ctx, s.lease)
		return err
	}
	err := s.try(load)
	if errors.Is(err, errForeign) {
		if err = s.rebase(); err == nil {
			err = s.try(load)
		}
	}
	s.recorded, s.more = true, s.pos.window != ""
	if err == nil {
		err = s.try(func(ctx context.Context) error {
			keys, _, err := s.failed.keys(ctx)
			if err == nil {
				s.parked.reset(keys)
			}
			return err
		})
	}
	return err
}

// rebase moves the cursors here from the cluster that the database came from.
func (s *session) rebase() error {
	start := time.Now()
	var unsent int64
	s.vitals.takesLong("the cursor is moved here from another cluster")
	defer s.vitals.takesLong("")
	err := s.try(func(context.Context) (err error) { // takes as long as it takes
		unsent, err = s.cursors.rebase(s.held, s.lease)
		return err
	})
	if err == nil {
		s.log.Warn("outbox: database was restored from another cluster, the cursor is moved to this one",
			"unsent", unsent, "took", time.Since(start).Round(time.Millisecond))
	}
	return err
}

// follow relays from the loaded position on.
func (s *session) follow(ctx context.Context) error {
	for ctx.Err() == nil {
		batch, err := s.next()
		if err != nil {
			return err
		}
		s.behind.Store(!s.drained())
		if len(batch) == 0 {
			s.vitals.note(hasAdvanced)
			s.woken = wait.Await(ctx, s.held, s.wake, s.cfg.PollInterval)
			continue
		}
		if err := s.attempt(ctx, batch); err != nil {
			return err
		}
		if s.woken && s.drained() {
			s.woken = wait.Await(ctx, s.held, s.wake, wakeGrace)
		}
	}
	return s.record(nil)
}

// forget drops what was fetched for a position that no longer rules.
func (s *session) forget() {
	if s.fetching != nil {
		<-s.fetching
		s.fetching = nil
	}
	s.left = nil
}

// wakeGrace is how long a relay that is woken waits for the next Wake before it
// looks unasked. Looking at once would find nothing, most times, and keep an
// event waiting that is committed meanwhile.
const wakeGrace = 2 * time.Millisecond

// drained reports whether all of the open window has been taken.
func (s *session) drained() bool { return s.fetching == nil && len(s.left) == 0 && !s.more }

// next returns the events to send next: further ones of the open window, else
// those of a new one. It returns none when there is nothing to send.
func (s *session) next() (batch []envelope, err error) {
	for {
		for s.fetching != nil || len(s.left) > 0 || s.more {
			got := s.take()
			s.left, s.more, s.size = got.left, got.more, got.size
			if len(got.events) > 0 || got.err != nil {
				return got.events, got.err
			}
		}
		err = s.try(func(ctx context.Context) (err error) {
			s.pos, batch, s.more, err = s.cursors.open(ctx, s.lease, s.pos, s.cfg.BatchSize)
			return err
		})
		if err != nil {
			return nil, err
		}
		s.recorded = true
		if !s.more {
			return batch, nil
		}
	}
}

// take returns the events that were fetched ahead, or fetches them now.
func (s *session) take() (got fetched) {
	if s.fetching != nil {
		got = <-s.fetching
		s.fetching = nil
		if got.err == nil {
			return got
		}
	}
	err := s.try(func(ctx context.Context) error {
		got = s.fetch(ctx, s.pos, s.left, s.more, s.size)
		return got.err
	})
	got.err = err
	return got
}

// prefetch fetches what follows the event with id last while that one is in
// flight. The window was announced before, so its rest cannot change.
func (s *session) prefetch(last int64) {
	if len(s.left) == 0 && !s.more {
		return
	}
	pos, left, more, size := s.pos, s.left, s.more, s.size
	pos.last = last
	result := make(chan fetched, 1)
	s.fetching = result
	go func() {
		ctx, cancel := s.soon(s.held)
		defer cancel()
		result <- s.fetch(ctx, pos, left, more, size)
	}()
}

// fetch reads the next events of the open window: size of them, fewer where they
// are large. On an error it returns what it was given, so that it can be asked
// again.
func (s *session) fetch(ctx context.Context, pos position, left []int64, more bool, size int) fetched {
	got := fetched{left: left, more: more, size: size}
	if len(left) == 0 {
		got.left, got.err = s.cursors.rest(ctx, pos, maxWindowIDs)
		if got.err != nil {
			return got
		}
		got.more = len(got.left) == maxWindowIDs
	}
	n := min(len(got.left), size)
	if n == 0 {
		return got
	}
	got.events, got.err = s.cursors.fetch(ctx, pos, got.left[:n])
	got.size = min(2*size, s.cfg.BatchSize)
	for errors.Is(got.err, errBatchTooLarge) {
		n /= 2 // not below 1: a single event is never too large
		got.events, got.err = s.cursors.fetch(ctx, pos, got.left[:n])
		got.size = n
	}
	if got.err == nil {
		got.left = got.left[n:]
	}
	return got
}

// attempt sends a batch, and moves the cursor behind what was decided of it. The
// move behind the last batch of a window is left to the statement that opens the
// next one. Stopping early, for ctx or the lease, is not an error of its own:
// the next holder sends the rest.
func (s *session) attempt(ctx context.Context, batch []envelope) error {
	s.prefetch(batch[len(batch)-1].id)
	start := time.Now()
	outcomes, err := s.producer.deliver(ctx, s.held, batch, &s.parked)
	s.producer.tellSent(batch, outcomes, start, false)
	decided, failures := s.failures(batch, outcomes)
	if decided > 0 {
		s.vitals.note(hasAdvanced)
		s.pos.last = batch[decided-1].id
		s.pos.highest = max(s.pos.highest, s.pos.last)
		s.recorded = false
	}
	s.log.Debug("outbox: batch sent", "events", decided, "of", len(batch), "failed", len(failures), "last", s.pos.last,
		"took", time.Since(start))
	if errors.Is(err, errLeaseLost) {
		return err
	}
	if decided < len(batch) || len(failures) > 0 || !s.drained() {
		if merr := s.record(failures); merr != nil {
			return merr
		}
		s.tell(failures)
	}
	return err
}

// failures returns how many events from the start of the batch were decided, and
// those of them that did not get through.
func (s *session) failures(batch []envelope, outcomes []outcome) (decided int, failures []failure) {
	for i, f := range outcomes {
		e := &batch[i]
		status := StatusParked
		switch f.kind {
		case outcomePending:
			return i, failures
		case outcomeSent:
			continue
		case outcomeRejected:
			status = StatusFailed
		case outcomeUnavailable:
			status = StatusWaiting
		case outcomeBlocked, outcomeParked:
		}
		topic, _ := s.producer.topic(e)
		failures = append(failures, failure{
			event: e, key: parkingKey(topic, e.key()), status: status, class: f.class, err: f.err,
			refused: f.kind == outcomeRejected, pending: f.kind == outcomeParked,
		})
	}
	return len(batch), failures
}

// tell says which events were refused, once that is written down.
func (s *session) tell(failures []failure) {
	for _, f := range failures {
		if !f.refused {
			continue
		}
		e := f.event
		s.log.WarnContext(e.context(s.held), "outbox: event refused", "id", e.id, "event_id", string(e.eventID), "type", string(e.eventType),
			"key", string(e.key()), "class", f.class, "error", f.err)
		if s.cfg.Hooks.Rejected != nil {
			s.cfg.Hooks.Rejected(failedEventOf(e, f.class, f.err, 0))
		}
	}
}

// record writes the position down if it is not yet, with what failed on the way
// to it.
func (s *session) record(failures []failure) error {
	if s.recorded {
		return nil
	}
	if len(failures) > 0 {
		s.parked.mu.Lock()
		defer s.parked.mu.Unlock()
		s.parked.assign(failures)
	}
	return s.try(func(ctx context.Context) error {
		id, err := s.cursors.move(ctx, s.lease, s.pos, failures)
		if err == nil {
			s.pos.cursorID, s.recorded = id, true
			s.parked.wrote(failures)
		}
		return err
	})
}

// try repeats f until PostgreSQL answers. It gives up when the lease is lost, or
// the time to stop is over, and returns what no repetition mends.
func (s *session) try(f func(context.Context) error) error {
	for {
		s.vitals.note(nil)
		ctx, cancel := s.soon(s.held)
		err := f(ctx)
		cancel()
		switch {
		case s.held.Err() != nil && err != nil:
			return context.Cause(s.held)
		case pg.IsUndefined(err):
			return s.notMigrated(err)
		case err == nil, errors.Is(err, errStale), errors.Is(err, errLeaseLost),
			errors.Is(err, errForeign), errors.Is(err, ErrSequenceBehind):
			s.postgresOutage.Report(nil)
			return err
		}
		s.postgresOutage.Report(err)
		wait.Sleep(s.held, s.postgresOutage.Backoff())
	}
}
