package handling

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/pauses"
)

// What a Consumer and a Worker have in common while they run: the state of Run, how a stop is
// divided, handlers that take long, and pauses.
// RunState is what Run records for Health.
type RunState struct {
	mu      sync.Mutex
	running bool
	stops   bool // Run is to return
	began   time.Time
	err     error // with which the last Run has returned
}

func (s *RunState) Begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.stops, s.began, s.err = true, false, time.Now(), nil
}

func (s *RunState) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stops = true
}

func (s *RunState) IsStopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stops
}

func (s *RunState) End(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.err = false, err
}

func (s *RunState) Get() (running bool, began time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, s.began, s.err
}

// CallSlots bound how many handlers run at the same time. Nil means without a bound.
type CallSlots struct {
	Calls        *Slots // of all handlers: ConsumerConfig.Concurrency
	Transactions *Slots // of those with a transaction: what the pool has for them
}

// Take waits until a handler may be called, with a transaction or without one, and reports whether that was
// before ctx ended.
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

// Release gives back what take has taken.
func (s CallSlots) Release(tx bool) {
	if tx && s.Transactions != nil {
		s.Transactions.Release()
	}
	if s.Calls != nil {
		s.Calls.Release()
	}
}

// The steps of a stop, and when each is over at the latest, in percent of StopTimeout. A
// step has also the time that those before it have not needed.
const (
	FinishBy  = 60 // handlers have finished what they are at, or their contexts end
	AbandonBy = 75 // these have returned, or are cut off
	CommitBy  = 85 // what is done is committed
	LeftBy    = 95 // the group is left
	CloseBy   = 98 // the client is closed, or goes on to close in the background
)

// StopClock says how long the steps of a stop may take.
type StopClock struct {
	Began   time.Time
	Timeout time.Duration
}

func (s StopClock) By(percent int) (context.Context, context.CancelFunc) {
	return context.WithDeadline(context.Background(), s.Began.Add(s.Part(percent)))
}

func (s StopClock) Part(percent int) time.Duration { return s.Timeout / 100 * time.Duration(percent) }

// CheckTimeout bounds a look at the tables: PostgreSQL, or what has locked them, may not
// answer without a word.
const CheckTimeout = 10 * time.Second

// OutagePostgres is what outages of PostgreSQL are named in the log.
const OutagePostgres = "PostgreSQL"

// TransactionTime is how long handlers may take in a transaction before it commits what is
// done. So much is rolled back at most with a handler that fails, or does not end before a stop.
const TransactionTime = time.Second

// ErrStopped says that the work is to end.
var ErrStopped = errors.New("work is given up")

// StuckGrace is how long a handler has to return after its context has ended.
const StuckGrace = time.Second

// ReportCall says if a handler, or another function of the host, has not returned in time. It
// returns false if only a restart helps.
func ReportCall(activity *Activity, cfg *Rules, notReady func(reason string, args ...any)) (live bool) {
	call, ok := activity.Current()
	if !ok {
		return true
	}
	ran := time.Since(call.Began)
	if ran > cfg.HandlerTimeout+StuckGrace {
		notReady("%s %s has not returned for %v, although it should have: event %s, %s", call.What(), call.Action, ran.Round(time.Second), call.ID, call.Place)
	}
	return ran <= max(2*cfg.HandlerTimeout, cfg.HandlerTimeout+StuckGrace)
}

// SlowCalls reports handlers that run for long, and transactions that do not begin. It belongs to the
// goroutine that watches handlers.
type SlowCalls struct {
	began time.Time     // of what was looked at last
	next  time.Duration // after which time it is reported next
}

// Report logs a handler that has run for some time, or whose transaction has not begun by then,
// and again after twice the time. Where says where the transaction is awaited.
func (s *SlowCalls) Report(activity *Activity, after time.Duration, log *slog.Logger, where ...any) {
	call, calls := activity.Current()
	began, awaits := activity.AwaitsTx()
	switch {
	case calls:
		began = call.Began
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
	if calls {
		log.WarnContext(call.Context, "outbox: "+call.What()+" runs for long", call.Attrs()...)
	} else {
		log.Warn("outbox: a transaction does not begin: the pool has no connection left, or event_handled is locked",
			append(where, "waiting_for", time.Since(began).Round(time.Millisecond))...)
	}
}

func PausedTopics(topics []string) []string {
	if len(topics) == 0 {
		return []string{pauses.All}
	}
	return topics
}

const (
	// PausesInterval is how long it may take until a member knows what operators have
	// paused or resumed.
	PausesInterval = 2 * time.Second
	PausesTimeout  = time.Minute // a pool may be small, and handlers take long
	OutagePauses   = "reading what is paused"
)

// LogPauses logs what has changed in the pauses of a consumer or a worker.
func LogPauses(log *slog.Logger, what string, before, now []pauses.Pause) {
	has := func(all []pauses.Pause, topic string) bool {
		return slices.ContainsFunc(all, func(p pauses.Pause) bool { return p.Topic == topic })
	}
	for _, p := range now {
		if !has(before, p.Topic) {
			log.Warn("outbox: "+what+" is paused by an operator", "topic", p.Topic, "operator", p.Operator, "reason", p.Reason, "since", p.At)
		}
	}
	for _, p := range before {
		if !has(now, p.Topic) {
			log.Warn("outbox: "+what+" is resumed by an operator", "topic", p.Topic)
		}
	}
}

// PauseReasons says what of a consumer or a worker is paused, for Health.
func PauseReasons(paused *pauses.Set, what string) (reasons []string) {
	of := func(topic string) string {
		if topic == pauses.All {
			return "the " + what
		}
		return "topic " + topic
	}
	for _, p := range paused.Stored() {
		reasons = append(reasons, fmt.Sprintf("%s is paused by %s since %v: %s", of(p.Topic), p.Operator, time.Since(p.At).Round(time.Second), p.Reason))
	}
	for _, topic := range paused.Own() {
		reasons = append(reasons, of(topic)+" is paused by this process")
	}
	return reasons
}
