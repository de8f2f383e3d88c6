package outbox

import (
	"fmt"
	breakers "github.com/outboxgo/outbox/internal/breaker"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
)

// RelayHealth reports the state of a relay in this process.
type RelayHealth struct {
	// Relay is its name.
	Relay string
	// Live is false if only a restart of the process can help: Run has returned an
	// error, or hangs.
	Live bool
	// Ready is false if this process does not do its part: see Reasons.
	Ready bool
	// Leading is set while this process holds the lease.
	Leading bool
	// Breaker is the state of the circuit breaker.
	Breaker BreakerState
	// Reasons say why the relay is not live or not ready.
	Reasons []string
}

// healthState is what the goroutine of Run records for [Relay.Health].
type healthState struct {
	cfg     RelayConfig
	breaker *breakers.Breaker
	outages []*outage.Log

	mu        sync.Mutex
	running   bool
	err       error // with which the last Run has returned
	leading   bool
	progress  time.Time           // a loop of Run began its next round
	leaseSeen time.Time           // our own lease, or that of another process
	moved     time.Time           // the cursor moved, or there was nothing to send
	longTask  string              // a task that may take as long as it takes; "" for none
	leaseGone bool                // the lease was given up, because nothing has progressed
	stale     []tables.EventCount // what waits for too long, by the last check of alerts
}

func newHealthState(cfg RelayConfig, b *breakers.Breaker, outages ...*outage.Log) *healthState {
	return &healthState{cfg: cfg, breaker: b, outages: outages}
}

// update changes the state. Every change is progress, too.
func (s *healthState) update(change func(now time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress, s.leaseGone = time.Now(), false
	change(s.progress)
}

// hangs reports whether the goroutine of Run has not gone on for longer than it may take.
func (s *healthState) hangs() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.longTask == "" && time.Since(s.progress) > s.hangsAfter()
}

// gaveUp notes that the lease was given up because the goroutine of Run hangs. It is no
// progress.
func (s *healthState) gaveUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leading, s.leaseGone = false, true
}

func (s *healthState) runBegan() {
	s.update(func(now time.Time) { s.running, s.err, s.leaseSeen = true, nil, now })
}

func (s *healthState) runEnded(err error) {
	s.update(func(time.Time) { s.running, s.err, s.leading = false, err, false })
}

func (s *healthState) setLeading(leading bool) {
	s.update(func(now time.Time) { s.leading, s.leaseSeen, s.moved, s.stale = leading, now, now, nil })
}

// setStale notes what waits for too long. It is no progress of Run.
func (s *healthState) setStale(counts []tables.EventCount) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leading {
		s.stale = counts
	}
}

func (s *healthState) Progressed()  { s.update(func(time.Time) {}) }
func (s *healthState) sawLease()    { s.update(func(now time.Time) { s.leaseSeen = now }) }
func (s *healthState) CursorMoved() { s.update(func(now time.Time) { s.moved = now }) }
func (s *healthState) EndLongTask() { s.BeginLongTask("") }
func (s *healthState) BeginLongTask(what string) {
	s.update(func(time.Time) { s.longTask = what })
}

func (s *healthState) report() RelayHealth {
	breaker := s.breaker.State() // not under mu: it may call Hooks.Breaker, which may ask for the health
	s.mu.Lock()
	defer s.mu.Unlock()
	h := RelayHealth{Relay: s.cfg.Name, Live: true, Ready: true, Leading: s.leading, Breaker: BreakerState(breaker)}
	notReady := func(reason string, args ...any) {
		h.Ready, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	switch {
	case s.err != nil:
		h.Live = false
		notReady("Run has ended: %v", s.err)
		return h
	case !s.running:
		notReady("it does not run")
		return h
	case s.longTask != "":
		notReady("%s, since %v", s.longTask, since(s.progress))
		return h
	case time.Since(s.progress) > s.hangsAfter():
		h.Live = false
		notReady("Run has not gone on for %v", since(s.progress))
	}
	if s.leaseGone {
		notReady("the lease was given up")
		return h
	}
	if !s.leading && time.Since(s.leaseSeen) > s.staleAfter() {
		notReady("no relay is seen to hold the lease, for %v", since(s.leaseSeen))
	}
	if s.leading && time.Since(s.moved) > s.staleAfter() {
		notReady("nothing has moved for %v, although there are events to send", since(s.moved))
	}
	if h.Breaker == BreakerOpen {
		notReady("the circuit breaker is open")
	}
	if len(s.stale) > 0 {
		n, oldest := sum(countsOf(s.stale))
		notReady("%s events are not published, the oldest for %v", n, since(oldest))
	}
	for _, log := range s.outages {
		if o := log.Current(); o != nil && !h.Ready {
			h.Reasons = append(h.Reasons, fmt.Sprintf("%s fails since %v: %v", log.What(), since(o.Since), o.Err))
		}
	}
	return h
}

func since(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }

// hangsAfter is how long a round of a loop of Run may take: a send, a statement, and a
// wait.
func (s *healthState) hangsAfter() time.Duration {
	return s.cfg.SendTimeout + 2*s.cfg.Lease + s.cfg.PollInterval + s.cfg.Breaker.OpenFor
}

// staleAfter is how long a relay that does its part may see no lease, and a leader with
// events to send may not move its cursor.
func (s *healthState) staleAfter() time.Duration { return s.cfg.Lease + s.cfg.PollInterval }
