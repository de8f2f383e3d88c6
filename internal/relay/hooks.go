package relay

import (
	"strconv"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/tables"
)

// Hooks are called while a relay works. Each may be nil.
type Hooks struct {
	Leading        func(leading bool)
	Sent           func(SentBatch)
	Breaker        func(from, to breaker.State, failureRate float64) // 0 unless a closed breaker opens
	Rejected, Dead func(tables.Event)
	RowsRemoved    func(retention.Result)
}

// failedEvent returns an event that failed as [Hooks] get it. retries is how many retries Kafka rejected.
func failedEvent(e *envelope.Event, class string, err error, retries int) tables.Event {
	topic, _ := e.Destination() // "" if none follows from its type
	return tables.Event{
		OutboxID: e.ID, EventID: string(e.EventID), Type: string(e.EventType),
		AggregateType: string(e.AggregateType), AggregateID: string(e.AggregateID),
		Topic: topic, Key: string(e.Key()), Retries: retries, Class: class, Err: err,
	}
}

// SentBatch has the outcomes of events that were sent together.
type SentBatch struct {
	Events, Failed, Waiting int // accepted by Kafka; not accepted; not sent because an earlier event of the key waits
	Expired                 int // not sent because it had expired
	Retried                 bool
	Began                   time.Time
	Took                    time.Duration

	Sent     []sentEvent
	NotTaken []notTaken
}

// sentEvent is an event with its topic, and where it is if Kafka has accepted it.
type sentEvent struct {
	*envelope.Event
	Topic string
	Sent  SentTo
}

// notTaken is an event that Kafka has not accepted, with the class of its error.
type notTaken struct {
	sentEvent
	Class string
}

// guarded returns the hooks as the relay calls them. Each is called through the function that guard returns for its
// name. The relay does not wait for that of the breaker.
func (h Hooks) guarded(guard func(name string) func(call func())) Hooks {
	h.Leading = guarded(h.Leading, "Leading", guard)
	h.Sent = guarded(h.Sent, "Sent", guard)
	h.Rejected = guarded(h.Rejected, "Rejected", guard)
	h.Dead = guarded(h.Dead, "Dead", guard)
	h.RowsRemoved = guarded(h.RowsRemoved, "RowsRemoved", guard)
	if hook := h.Breaker; hook != nil {
		notify, queue := guard("Breaker"), &hookQueue{}
		h.Breaker = func(from, to breaker.State, failureRate float64) {
			queue.add(func() { notify(func() { hook(from, to, failureRate) }) })
		}
	}
	return h
}

// hookQueue makes calls one after another, in a goroutine of its own while there are any. The breaker may change in the
// goroutine that renews the lease, and in that of the Kafka client which reports outcomes: neither may wait for a hook.
type hookQueue struct {
	mu    sync.Mutex
	calls []func()
	busy  bool // the goroutine runs
}

// maxQueued bounds the calls that wait. It is reached only by a breaker that changes several times a second beside a
// hook that takes seconds; then the oldest calls are left out.
const maxQueued = 100

func (q *hookQueue) add(call func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.calls) == maxQueued {
		q.calls = q.calls[1:]
	}
	q.calls = append(q.calls, call)
	if !q.busy {
		q.busy = true
		go q.run()
	}
}

func (q *hookQueue) run() {
	for {
		q.mu.Lock()
		if len(q.calls) == 0 {
			q.busy = false
			q.mu.Unlock()
			return
		}
		call := q.calls[0]
		q.calls = q.calls[1:]
		q.mu.Unlock()
		call()
	}
}

func guarded[T any](hook func(T), name string, guard func(name string) func(call func())) func(T) {
	if hook == nil {
		return nil
	}
	notify := guard(name)
	return func(arg T) { notify(func() { hook(arg) }) }
}

// percent prints a share as "62.5%".
func percent(share float64) string {
	return strconv.FormatFloat(100*share, 'f', -1, 32) + "%"
}
