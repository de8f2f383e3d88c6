// Package handling knows what a worker of a consumer does at the moment: which handler it
// has called, and on which connection its transaction is. With this, handlers that run for
// long are reported, and those that ignore the end of their context are cut off.
package handling

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/pg"
)

// Activity is what one worker does. The worker's goroutine changes it, and any other may
// read it and cut it off. The zero value is ready.
type Activity struct {
	mu   sync.Mutex
	call Call
	busy bool         // call is under way
	conn *pg.Borrowed // of the transaction under way; nil for none
	cut  bool         // there will be no other transaction
	// since when a transaction is awaited that has not begun; zero for none
	awaited time.Time
}

// Call is a handler at work, or another function of the host.
type Call struct {
	// Context is the handler's, for log lines about it.
	Context context.Context
	// Function is what is called if it is no handler: "hook Failed".
	Function string
	Action   string // "" for what is called for an event and not for an action
	// Type, ID, Place and the aggregate are those of its first event.
	Type, ID                   string
	AggregateType, AggregateID string
	Place                      Place
	Events                     int // more than one for a handler of a batch
	Began                      time.Time
}

// Place says where an event came from: from Kafka if it has a topic, otherwise from a delivery.
type Place struct {
	Topic     string
	Partition int32
	Offset    int64

	Stream     string
	DeliveryID int64
}

// String names the place within a sentence.
func (p Place) String() string {
	if p.Topic == "" {
		return fmt.Sprintf("delivery %d of %s", p.DeliveryID, p.Stream)
	}
	return fmt.Sprintf("%s/%d at offset %d", p.Topic, p.Partition, p.Offset)
}

// Attrs returns what a log line says about the place.
func (p Place) Attrs() []any {
	attrs := []any{"stream", p.Stream}
	if p.Topic != "" {
		attrs = []any{"topic", p.Topic, "partition", p.Partition, "offset", p.Offset}
	}
	if p.DeliveryID != 0 {
		attrs = append(attrs, "delivery_id", p.DeliveryID)
	}
	return attrs
}

// attrsAt returns what a log line says of an event.
func attrsAt(place Place, eventType, id, aggregateType, aggregateID string) []any {
	return append(place.Attrs(), "type", eventType, "event_id", id, "aggregate_type", aggregateType, "aggregate_id", aggregateID)
}

// What names what is called, for the beginning of a sentence.
func (c Call) What() string { return cmp.Or(c.Function, "handler") }

// Attrs returns what a log line says of the call.
func (c Call) Attrs() []any {
	attrs := append(attrsAt(c.Place, c.Type, c.ID, c.AggregateType, c.AggregateID), "action", c.Action)
	attrs = append(attrs, "running_for", time.Since(c.Began).Round(time.Millisecond))
	if c.Events > 1 {
		attrs = append(attrs, "events", c.Events)
	}
	return attrs
}

// Begin notes that a handler is called now, or another function of the host. No other call
// is under way then.
func (a *Activity) Begin(c Call) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.call, a.busy = c, true
	a.call.Began = time.Now()
}

// Next notes that the function under way goes on with another event.
func (a *Activity) Next(place Place) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.call.Place, a.call.Began = place, time.Now()
}

// End notes that the call has returned, and says how long it took.
func (a *Activity) End() (took time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	took = time.Since(a.call.Began)
	a.call, a.busy = Call{}, false
	return took
}

// Current returns the call under way, if there is one.
func (a *Activity) Current() (c Call, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.call, a.busy
}

// AwaitTx notes that a transaction is to begin.
func (a *Activity) AwaitTx() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.awaited = time.Now()
}

// TxBegun notes that it has begun.
func (a *Activity) TxBegun() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.awaited = time.Time{}
}

// AwaitsTx returns since when a transaction is to begin, if there is one that has not begun.
func (a *Activity) AwaitsTx() (since time.Time, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.awaited, !a.awaited.IsZero()
}

var errCutOff = errors.New("the worker was cut off")

// Use notes the connection of a transaction that begins. After CutOff it returns an error.
func (a *Activity) Use(conn *pg.Borrowed) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cut {
		return errCutOff
	}
	a.conn = conn
	return nil
}

// Release notes that the transaction has ended, or does not begin.
func (a *Activity) Release() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.conn, a.awaited = nil, time.Time{}
}

// Sever closes the connection of the transaction under way, if there is one, so that PostgreSQL
// rolls it back, and what it has locked is free. Others may begin once it has returned.
func (a *Activity) Sever() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conn != nil {
		a.conn.Cut()
	}
}

// CutOff closes the connection of the transaction under way, if there is one, so that
// PostgreSQL rolls it back, and lets no other begin. A handler that ignores its context
// cannot be ended; this way what it does later in its transaction has no effect.
func (a *Activity) CutOff() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cut = true
	if a.conn != nil {
		a.conn.Cut()
	}
}
