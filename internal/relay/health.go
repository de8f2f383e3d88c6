package relay

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/watch"
)

// Health is the state of a relay in this process.
type Health struct {
	Live     bool // false if only a restart of the process can help
	Ready    bool
	Works    bool // it does its part
	Answered bool // PostgreSQL and Kafka have answered since Run began
	Leading  bool
	Breaker  breaker.State
	Outages  []outage.Outage
	Reasons  []string // why the relay is not live, not ready or does not work
}

// Health reports the state of the relay without any I/O.
func (r *Relay) Health() Health { return r.health.report() }

// healthState is the state that the goroutines of a relay record for [Relay.Health].
type healthState struct {
	rules   Rules
	breaker *breaker.Breaker
	outages []*outage.Log
	moves   *outage.Log    // of delayed events, which the leader moves; nil for none
	contact *kafka.Contact // nil in tests: Kafka has answered

	mu         sync.Mutex
	running    bool
	err        error // with which the last Run has returned
	leading    bool
	bad        *BadPartitions      // since this process leads; nil for none
	changed    time.Time           // when leading did
	progress   time.Time           // a loop of Run began its next round
	answered   bool                // PostgreSQL has answered since Run began
	elsewhere  time.Time           // Kafka has answered another process, as PostgreSQL says
	leaseSeen  time.Time           // the lease of this process, or of another one, or Run began
	leaseUntil time.Time           // when that lease expires at the latest
	ended      string              // why nothing of this relay is sent; "" if it may be
	waiting    bool                // no process leads, and events wait
	opened     time.Time           // when the breaker ceased to be closed
	moved      time.Time           // the cursor moved, or there was nothing to send
	longTask   string              // a task without a time limit; "" for none
	leaseGone  bool                // the lease was released, because nothing has progressed
	stale      []tables.EventCount // events that have waited too long, by the last check of alerts
	clock      pg.Clock            // of the database, by the same check
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
	s.update(func(now time.Time) {
		s.running, s.err, s.leaseSeen, s.leaseUntil, s.answered, s.elsewhere = true, nil, now, now, false, time.Time{}
	})
}

func (s *healthState) runEnded(err error) {
	s.update(func(time.Time) { s.running, s.err, s.leading = false, err, false })
}

func (s *healthState) setLeading(leading bool) {
	s.update(func(now time.Time) {
		s.leading, s.changed, s.leaseSeen, s.leaseUntil, s.moved, s.stale, s.answered = leading, now, now, now, now, nil, true
		s.ended, s.waiting = "", false
	})
}

// setBad records the registry of the partitions and topics that are bad while this process leads.
func (s *healthState) setBad(bad *BadPartitions) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bad = bad
}

// setStale records the events that have waited too long. It does not count as progress of Run.
func (s *healthState) setStale(counts []tables.EventCount, clock pg.Clock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leading {
		s.stale, s.clock = counts, clock
	}
}

func (s *healthState) Progressed()  { s.update(func(time.Time) {}) }
func (s *healthState) CursorMoved() { s.update(func(now time.Time) { s.moved = now }) }
func (s *healthState) EndLongTask() { s.BeginLongTask("") }
func (s *healthState) BeginLongTask(what string) {
	s.update(func(time.Time) { s.longTask = what })
}

func (s *healthState) report() Health {
	state := s.breaker.State() // not under mu: State may change the breaker, which records that here
	s.mu.Lock()
	defer s.mu.Unlock()
	h := Health{Live: true, Leading: s.leading, Breaker: state}
	reason := func(text string, args ...any) { h.Reasons = append(h.Reasons, fmt.Sprintf(text, args...)) }
	switch {
	case s.err != nil:
		h.Live = false
		reason("Run has ended: %v", s.err)
		return h
	case !s.running:
		reason("it does not run")
		return h
	}
	if !s.leading { // it is that of sends
		h.Breaker = breaker.Closed
	}
	h.Ready, h.Answered = true, s.answered && (s.contact == nil || s.contact.Answered())
	s.reportReady(&h, func(text string, args ...any) { h.Ready = false; reason(text, args...) })
	s.reportWork(&h, reason)
	s.reportOutages(&h)
	h.Works = len(h.Reasons) == 0
	return h
}

// reportReady passes the reasons why this process is not ready to notReady.
func (s *healthState) reportReady(h *Health, notReady func(text string, args ...any)) {
	if s.longTask == "" && time.Since(s.progress) > s.hangsAfter() {
		h.Live = false
		notReady("Run has not gone on for %v", since(s.progress))
	}
	if !s.answered {
		notReady("PostgreSQL has not answered yet")
	}
	if s.contact == nil {
		return
	}
	outOfReach := s.kafka()
	switch rejected := s.contact.Rejected(); {
	case rejected != nil:
		notReady("Kafka does not serve this process: %v", rejected)
	case outOfReach != nil && kafka.IsRefused(outOfReach.Err):
		notReady("Kafka does not serve this process: %v", outOfReach.Err)
	case outOfReach != nil && s.elsewhere.After(outOfReach.Since) && s.elsewhere.Before(outOfReach.Last) && time.Since(s.elsewhere) < kafka.ElsewhereFor:
		notReady("Kafka does not answer this process, and has answered another one %v ago", since(s.elsewhere))
	case outOfReach == nil && !s.contact.Answered():
		h.Reasons = append(h.Reasons, "Kafka has not answered yet")
	case outOfReach == nil && s.leading && s.contact.LastAnswer().Before(s.changed): // what a standby heard may be old
		h.Reasons = append(h.Reasons, "Kafka has not answered since this process leads")
	}
}

// kafka returns the outage of Kafka, or nil.
func (s *healthState) kafka() *outage.Failure {
	for _, log := range s.outages {
		if log.What() == whatKafka {
			return log.Current()
		}
	}
	return nil
}

// reportWork passes the reasons why this process does not do its part to reason.
func (s *healthState) reportWork(h *Health, reason func(text string, args ...any)) {
	switch {
	case s.longTask != "":
		reason("%s, since %v", s.longTask, since(s.progress))
		return
	case s.leaseGone:
		reason("the lease was given up")
		return
	case !s.leading && s.ended != "":
		reason("%s", s.ended)
	case !s.leading && s.answered && time.Now().After(s.leaseUntil.Add(2*s.rules.PollInterval)):
		waits := ""
		if s.waiting {
			waits = ", and events wait"
		}
		reason("no relay is seen to hold the lease, for %v%s", since(s.leaseSeen), waits)
	case s.leading && time.Since(s.moved) > s.staleAfter():
		reason("nothing has moved for %v, although there are events to send", since(s.moved))
	}
	if h.Breaker == breaker.Open {
		reason("the circuit breaker is open")
	}
	if len(s.stale) > 0 {
		n, oldest := watch.Sum(s.stale)
		reason("%s events are not published, the oldest for %v", n, s.clock.Since(oldest).Round(time.Second))
	}
}

// reportOutages adds the outages. Those of topics are none of this process.
func (s *healthState) reportOutages(h *Health) {
	logs := s.outages
	if s.leading && s.moves != nil {
		logs = append(slices.Clip(logs), s.moves)
	}
	for _, log := range logs {
		if o := log.Current(); o != nil {
			named := outage.Named{Name: log.What(), Failure: *o}
			h.Outages = append(h.Outages, named.Outage(classOf(named)))
			h.Reasons = append(h.Reasons, fmt.Sprintf("%s has been failing for %v: %v", log.What(), since(o.Since), o.Err))
		}
	}
	if s.leading && s.bad != nil {
		h.Outages = append(h.Outages, outage.OutagesOf(s.bad.Outages(), func(o outage.Named) string { return kafka.ClassOf(o.Err) })...)
	}
}

// classOf returns the class of the error of an outage.
func classOf(o outage.Named) string {
	if o.Name == whatKafka {
		return kafka.ClassOf(o.Err)
	}
	return pg.ClassOf(o.Err)
}

func since(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }

// sawLease records that another process holds the lease, for a time at most. Ended says why nothing is sent, if so.
func (s *healthState) sawLease(lasts time.Duration, ended string) {
	s.update(func(now time.Time) {
		s.answered, s.leaseSeen, s.leaseUntil, s.ended, s.waiting = true, now, now.Add(lasts), ended, false
	})
}

// sawNoLease records that PostgreSQL has answered, and whether events wait while no process leads.
func (s *healthState) sawNoLease(waiting bool) {
	s.update(func(time.Time) { s.answered, s.ended, s.waiting = true, "", waiting })
}

// heardElsewhere records that Kafka has answered another process, at a time.
func (s *healthState) heardElsewhere(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.elsewhere = at
}

// breakerChanged records when the breaker ceases to be closed.
func (s *healthState) breakerChanged(from, to breaker.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from == breaker.Closed && to != breaker.Closed {
		s.opened = time.Now()
	}
}

func (s *healthState) openedAt() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opened
}

// hangsAfter returns how long a round of a loop of Run may take: a send, a statement, and a wait. With the mode exactly
// once, a start and the wait after it may take longer than a send.
func (s *healthState) hangsAfter() time.Duration {
	send := s.rules.SendTimeout
	if s.rules.ExactlyOnce != "" {
		send = s.rules.startTimeout() + max(maxStartWait, wait.MaxBackoff)
	}
	return send + 2*s.rules.Lease + s.rules.PollInterval + s.rules.Breaker.OpenFor
}

// staleAfter returns for how long a healthy leader with events to send may not move its cursor.
func (s *healthState) staleAfter() time.Duration { return s.rules.Lease + s.rules.PollInterval }
