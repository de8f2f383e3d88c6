package relay

import (
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
)

// Health is the state of a relay in this process.
type Health struct {
	Live    bool // false if only a restart of the process can help
	Ready   bool
	Leading bool
	Breaker breaker.State
	Reasons []string // why the relay is not live or not ready
}

// Health reports the state of the relay without any I/O.
func (r *Relay) Health() Health { return r.health.report() }

// healthState is the state that the goroutines of a relay record for [Relay.Health].
type healthState struct {
	rules   Rules
	breaker *breaker.Breaker
	outages []*outage.Log

	mu        sync.Mutex
	running   bool
	err       error // with which the last Run has returned
	leading   bool
	progress  time.Time           // a loop of Run began its next round
	leaseSeen time.Time           // the lease of this process, or of another one
	moved     time.Time           // the cursor moved, or there was nothing to send
	longTask  string              // a task without a time limit; "" for none
	leaseGone bool                // the lease was released, because nothing has progressed
	stale     []tables.EventCount // events that have waited too long, by the last check of alerts
}

func newHealthState(rules Rules, b *breaker.Breaker, outages ...*outage.Log) *healthState {
	return &healthState{rules: rules, breaker: b, outages: outages}
}

// update changes the state. Every change counts as progress.
func (s *healthState) update(change func(now time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress, s.leaseGone = time.Now(), false
	change(s.progress)
}

// hangs reports whether the goroutine of Run has made no progress for longer than a round may take.
func (s *healthState) hangs() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.longTask == "" && time.Since(s.progress) > s.hangsAfter()
}

// gaveUp records that the lease was released because the goroutine of Run hangs. It does not count
// as progress.
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

// setStale records the events that have waited too long. It does not count as progress of Run.
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

func (s *healthState) report() Health {
	state := s.breaker.State() // not under mu: State may call Hooks.Breaker, which may ask for the health
	s.mu.Lock()
	defer s.mu.Unlock()
	h := Health{Live: true, Ready: true, Leading: s.leading, Breaker: state}
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
	if h.Breaker == breaker.Open {
		notReady("the circuit breaker is open")
	}
	if len(s.stale) > 0 {
		n, oldest := watch.Sum(s.stale)
		notReady("%s events are not published, the oldest for %v", n, since(oldest))
	}
	for _, log := range s.outages {
		if o := log.Current(); o != nil && !h.Ready {
			h.Reasons = append(h.Reasons, fmt.Sprintf("%s has been failing for %v: %v", log.What(), since(o.Since), o.Err))
		}
	}
	return h
}

func since(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }

// hangsAfter returns how long a round of a loop of Run may take: a send, a statement, and a wait.
func (s *healthState) hangsAfter() time.Duration {
	return s.rules.SendTimeout + 2*s.rules.Lease + s.rules.PollInterval + s.rules.Breaker.OpenFor
}

// staleAfter returns for how long a healthy standby may see no lease, and a healthy leader with events to send may
// not move its cursor.
func (s *healthState) staleAfter() time.Duration { return s.rules.Lease + s.rules.PollInterval }
