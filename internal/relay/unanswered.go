package relay

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/trace"
)

// errUnanswered is the error of an event that was sent, while the answer of its partition is waited for elsewhere.
var errUnanswered = errors.New("sent, and not answered yet")

// Unanswered has the events that were sent and that no answer has come for in time. They have rows in outbox_failed,
// as if their partitions accepted nothing, but they are not sent again before the answer has come. If it says that
// Kafka has accepted the event, a retrier removes the row. It is safe for concurrent use.
type Unanswered struct {
	bad      *BadPartitions
	answered func() // the row of an accepted event can be removed

	busy   atomic.Bool // there are events; saves the lock where there are none
	mu     sync.Mutex
	events map[eventRef]unansweredEvent
	keys   map[string]int // parking keys of events, and how many each has
	swept  time.Time      // when events was looked through last
}

// eventRef identifies an event. After a failover, ids may be given out twice.
type eventRef struct {
	ID      int64 // outbox.id
	EventID string
}

func refOf(e *envelope.Event) eventRef { return eventRef{e.ID, string(e.EventID)} }

type unansweredEvent struct {
	key      string // parking key
	at       kafka.Partition
	accepted time.Time // zero: no answer has come
	sent     SentTo    // once it is accepted
	recorded bool      // its row was written; if there is none now, an operator has resolved it
}

// NewUnanswered returns an Unanswered without events. It calls answered when the row of an accepted event can be
// removed.
func NewUnanswered(bad *BadPartitions, answered func()) *Unanswered {
	return &Unanswered{bad: bad, answered: answered, events: map[eventRef]unansweredEvent{}, keys: map[string]int{}}
}

func (u *Unanswered) add(e *envelope.Event, at kafka.Partition) {
	u.mu.Lock()
	defer u.mu.Unlock()
	key := tables.ParkingKey(at.Topic, e.Key())
	u.events[refOf(e)] = unansweredEvent{key: key, at: at}
	u.keys[key]++
	u.busy.Store(true)
}

// holds reports whether an event of a key has no answer, or has one and still its row.
func (u *Unanswered) holds(key string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.keys[key] > 0
}

// waiting returns the keys of the events, and rows as if they were in outbox_failed, which they may be soon.
func (u *Unanswered) waiting() (keys []string, rows []cursor.FailedRow) {
	if !u.busy.Load() {
		return nil, nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, e := range u.events {
		rows = append(rows, cursor.FailedRow{Key: e.key, Place: e.at.Name()})
	}
	return slices.Collect(maps.Keys(u.keys)), rows
}

// find returns where an event was sent to, if it must not be sent again now.
func (u *Unanswered) find(e *envelope.Event) (at kafka.Partition, is bool) {
	if !u.busy.Load() {
		return at, false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	found, is := u.events[refOf(e)]
	return found.at, is
}

// accept records that Kafka has accepted an event.
func (u *Unanswered) accept(e *envelope.Event, sent SentTo) {
	u.mu.Lock()
	if found, is := u.events[refOf(e)]; is {
		found.accepted, found.sent = time.Now(), sent
		u.events[refOf(e)] = found
	}
	u.mu.Unlock()
	u.answered()
}

// Accepted returns the events that Kafka has accepted and whose rows are not removed.
func (u *Unanswered) Accepted() (refs []eventRef) {
	if !u.busy.Load() {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for ref, e := range u.events {
		if !e.accepted.IsZero() {
			refs = append(refs, ref)
		}
	}
	return refs
}

// sentTo returns where an event is that Kafka has accepted.
func (u *Unanswered) sentTo(ref eventRef) SentTo {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.events[ref].sent
}

// recorded records that the rows of n events were written. An answer that came before has found none to remove.
func (u *Unanswered) recorded(n int, event func(i int) *envelope.Event) {
	if !u.busy.Load() {
		return
	}
	u.mu.Lock()
	answered := false
	for i := range n {
		ref := refOf(event(i))
		if found, is := u.events[ref]; is {
			found.recorded = true
			u.events[ref] = found
			answered = answered || !found.accepted.IsZero()
		}
	}
	u.mu.Unlock()
	if answered {
		u.answered()
	}
}

// areRecorded returns those of some events whose rows were written.
func (u *Unanswered) areRecorded(refs []eventRef) (recorded []eventRef) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, ref := range refs {
		if u.events[ref].recorded {
			recorded = append(recorded, ref)
		}
	}
	return recorded
}

// keepAnswers is how long it is remembered that an event was accepted whose row is not found. The session writes the
// row only after the send, and need not learn that PostgreSQL has it.
const keepAnswers = 10 * time.Minute

// Remove forgets accepted events whose rows were removed, and those whose rows were not found for a long time.
func (u *Unanswered) Remove(removed []eventRef) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, ref := range removed {
		u.remove(ref)
	}
	if now := time.Now(); now.Sub(u.swept) > keepAnswers/60 { // thousands may be removed one by one
		u.swept = now
		for ref, e := range u.events {
			if !e.accepted.IsZero() && now.Sub(e.accepted) > keepAnswers {
				u.remove(ref)
			}
		}
	}
	u.busy.Store(len(u.events) > 0)
}

// remove removes an event if it is there. The caller holds mu.
func (u *Unanswered) remove(ref eventRef) {
	e, is := u.events[ref]
	if !is {
		return
	}
	delete(u.events, ref)
	if u.keys[e.key]--; u.keys[e.key] == 0 {
		delete(u.keys, e.key)
	}
}

// forget lets an event be sent again.
func (u *Unanswered) forget(e *envelope.Event) { u.Remove([]eventRef{refOf(e)}) }

// lateAnswers takes the outcomes of a detached flight.
type lateAnswers struct {
	to     *Unanswered
	flight *flight
	events map[int]*envelope.Event // by the index of the record; copies, so that they keep no other event in memory
	within time.Duration           // the answers are waited for

	mu       sync.Mutex
	accepted []sentEvent
}

// take takes the outcome of one record. The client calls it.
func (l *lateAnswers) take(i int, err error) {
	e, r := l.events[i], &l.flight.records[i]
	if trace.On {
		trace.Begin("late", "id", e.ID, "accepted", err == nil).End()
	}
	switch at := kafka.PartitionOf(r); {
	case err == nil:
		l.mu.Lock()
		l.accepted = append(l.accepted, sentEvent{e, r.Topic, sentTo(r)})
		l.mu.Unlock()
		l.to.bad.Accept(at, time.Now())
		l.to.accept(e, sentTo(r))
		return
	case l.flight.grace.Err() == nil && kafka.IsOutage(err): // otherwise the client was stopped
		err = timedOut(err, l.within)
		if silentPlace(at) != "" {
			l.to.bad.Fail(at, l.flight.began, kafka.UnavailableClass(err), err)
		}
	}
	l.to.forget(e)
}

// notify passes the accepted events to the hook.
func (l *lateAnswers) notify(onSent func(SentBatch)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if onSent != nil && len(l.accepted) > 0 {
		began := l.flight.began
		onSent(SentBatch{Events: len(l.accepted), Sent: l.accepted, Retried: true, Began: began, Took: time.Since(began)})
	}
}
