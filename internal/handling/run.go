package handling

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/pauses"
)

// RunState is the state of Run of a consumer or a worker, for Health. The zero value is ready.
type RunState struct {
	mu      sync.Mutex
	running bool
	stops   bool // Run is about to return
	began   time.Time
	err     error // of the last Run
}

// Begin notes that Run was called.
func (s *RunState) Begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.stops, s.began, s.err = true, false, time.Now(), nil
}

// Stop notes that Run is about to return.
func (s *RunState) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stops = true
}

// IsStopping reports whether Run is about to return.
func (s *RunState) IsStopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stops
}

// End notes that Run has returned err.
func (s *RunState) End(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.err = false, err
}

// Get returns whether Run is running, when it began, and the error of the last Run.
func (s *RunState) Get() (running bool, began time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, s.began, s.err
}

// CallSlots bound how many handlers run at the same time. A nil field means no bound.
type CallSlots struct {
	Calls        *Slots // for all handlers: HandlerConfig.Concurrency
	Transactions *Slots // for handlers with a transaction: connections of the pool, see [SlotsOf]
}

// Take waits until a handler may be called, with a transaction or without one. It returns false if ctx ends first.
func (s CallSlots) Take(ctx context.Context, tx bool) bool {
	if s.Calls != nil && !s.Calls.Take(ctx) {
		return false
	}
	if !tx || s.Transactions == nil || s.Transactions.Take(ctx) {
		return true
	}
	s.Release(false)
	return false
}

// Most returns how many handlers with a transaction run at the same time.
func (s CallSlots) Most() int {
	most := cap(s.Transactions.slots)
	if s.Calls != nil {
		most = min(most, cap(s.Calls.slots))
	}
	return most
}

// Release gives back the slots that Take has taken.
func (s CallSlots) Release(tx bool) {
	if tx && s.Transactions != nil {
		s.Transactions.Release()
	}
	if s.Calls != nil {
		s.Calls.Release()
	}
}

// Steps of a stop, with the time at which each ends at the latest, in percent of StopTimeout. A step may also use the
// time that the steps before it have left.
const (
	FinishBy  = 60 // running handlers have returned, or their contexts end
	AbandonBy = 75 // the other handlers have returned, or are cut off
	CommitBy  = 85 // offsets are committed
	LeftBy    = 95 // the consumer group is left
	CloseBy   = 98 // the Kafka client is closed, or goes on closing in the background
)

// StopClock bounds the steps of a stop that began at Began.
type StopClock struct {
	Began   time.Time
	Timeout time.Duration
}

// By returns a context that ends at a step.
func (s StopClock) By(percent int) (context.Context, context.CancelFunc) {
	return context.WithDeadline(context.Background(), s.Began.Add(s.Part(percent)))
}

// Part returns a part of the timeout, in percent.
func (s StopClock) Part(percent int) time.Duration { return s.Timeout / 100 * time.Duration(percent) }

// CheckTimeout bounds a check of the tables, because PostgreSQL may not answer, or the tables may be locked.
const CheckTimeout = 10 * time.Second

// OutagePostgres is the name of outages of PostgreSQL in the log.
const OutagePostgres = "PostgreSQL"

// TransactionTime is how long handlers may take in a shared transaction before it commits. It bounds the work that is
// rolled back with a handler that fails, or that does not return before a stop.
const TransactionTime = time.Second

// ErrStopped is the cause of contexts that end because the work ends.
var ErrStopped = errors.New("work is given up")

// StuckGrace is how long a handler has to return after its context has ended.
const StuckGrace = time.Second

// LimitsOf returns the limits of transactions in which a call is given up after a time. A transaction may have
// several calls.
func LimitsOf(call time.Duration) guardtx.Limits {
	const (
		calls   = 10
		longest = 1 << 36 * time.Millisecond // PostgreSQL has no longer bound, and nothing overflows
	)
	call = min(call, longest) + StuckGrace
	return guardtx.Limits{Call: call, Whole: calls * call}
}

// ReportCall calls notReady if a function of the host has not returned in time. It returns false if the process must be
// restarted.
func ReportCall(activity *Activity, cfg *Rules, notReady func(reason string, args ...any)) (live bool) {
	call, ok := activity.Current()
	if !ok {
		return true
	}
	ran := time.Since(call.Began)
	if ran > cfg.HandlerTimeout+StuckGrace {
		notReady("%s %s has not returned for %v, although it should have: event %s, %s",
			call.FunctionName(), call.Action, ran.Round(time.Second), call.ID, call.Place)
	}
	return ran <= max(2*cfg.HandlerTimeout, cfg.HandlerTimeout+StuckGrace)
}

// ReportCommit calls notReady if a COMMIT has not returned for longer than slow. Of is " of " with the name of the
// partition, or "".
func ReportCommit(activity *Activity, slow time.Duration, of string, notReady func(reason string, args ...any)) {
	if since, ok := activity.Committing(); ok && time.Since(since) > slow {
		notReady("a COMMIT%s has not returned for %v: %s", of, time.Since(since).Round(time.Second), slowCommit)
	}
}

// slowCommit says why a COMMIT may take long.
const slowCommit = "PostgreSQL may wait for a synchronous standby or run deferred triggers, or the connection may be dead"

// SlowCalls logs handlers that run for long, and transactions that do not begin or whose COMMIT does not return. It
// belongs to the goroutine that watches handlers.
type SlowCalls struct {
	began time.Time     // of the call or the wait that was checked last
	next  time.Duration // after which it is logged again
}

// Report logs a handler that has run for longer than after, or a transaction that has not begun or not committed for as
// long. It logs them again after twice the time. Where are attributes of the log line about a transaction.
func (s *SlowCalls) Report(activity *Activity, after time.Duration, log *slog.Logger, where ...any) {
	call, calls := activity.Current()
	began, awaits := activity.AwaitsTx()
	committing, commits := activity.Committing()
	switch {
	case calls:
		began = call.Began
	case commits:
		began = committing
	case !awaits:
		return
	}
	if !began.Equal(s.began) {
		*s = SlowCalls{began, after}
	}
	if time.Since(began) < s.next {
		return
	}
	s.next *= 2
	where = append(where, "waiting_for", time.Since(began).Round(time.Millisecond))
	switch {
	case calls:
		log.WarnContext(call.Context, "outbox: "+call.FunctionName()+" runs for long", call.Attrs()...)
	case commits:
		log.Warn("outbox: a COMMIT does not return: "+slowCommit, where...)
	default:
		log.Warn("outbox: a transaction does not begin: the pool has no connection left, or event_handled is locked", where...)
	}
}

// PausedTopics returns the topics that a pause names. A pause without topics is for all.
func PausedTopics(topics []string) []string {
	if len(topics) == 0 {
		return []string{pauses.All}
	}
	return topics
}

const (
	// PausesInterval is how often a process reads the pauses of operators.
	PausesInterval = 2 * time.Second
	// PausesTimeout bounds a read of them.
	PausesTimeout = time.Minute // long, because a small pool may have no connection while handlers run
	// OutagePauses names the outage in the log.
	OutagePauses = "reading what is paused"
)

// LogPauses logs the changes of the pauses of a consumer or a worker.
func LogPauses(log *slog.Logger, what string, before, now []pauses.Pause) {
	has := func(all []pauses.Pause, topic string) bool {
		return slices.ContainsFunc(all, func(p pauses.Pause) bool { return p.Topic == topic })
	}
	for _, p := range now {
		if !has(before, p.Topic) {
			log.Warn("outbox: "+what+" is paused by an operator",
				"topic", p.Topic, "operator", p.Operator, "reason", p.Reason, "since", p.At)
		}
	}
	for _, p := range before {
		if !has(now, p.Topic) {
			log.Warn("outbox: "+what+" is resumed by an operator", "topic", p.Topic)
		}
	}
}

// PauseReasons describes the pauses of a consumer or a worker, for Health.
func PauseReasons(paused *pauses.Set, what string) (reasons []string) {
	of := func(topic string) string {
		if topic == pauses.All {
			return "the " + what
		}
		return "topic " + topic
	}
	for _, p := range paused.Stored() {
		reasons = append(reasons, fmt.Sprintf("%s is paused by %s since %v: %s",
			of(p.Topic), p.Operator, p.Lasts().Round(time.Second), p.Reason))
	}
	for _, topic := range paused.Own() {
		reasons = append(reasons, of(topic)+" is paused by this process")
	}
	return reasons
}
