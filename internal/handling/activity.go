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

// Activity is what one goroutine of a consumer or a worker is doing: which handler it has called, and on which
// connection its transaction is. That goroutine writes it. Any goroutine may read it, and cut off the transaction.
// The zero value is ready.
type Activity struct {
	// Ended gets each call that has returned, and its duration. It may be nil. It is set before the first call.
	Ended func(c Call, took time.Duration)

	mu   sync.Mutex
	call Call
	busy bool         // call is under way
	conn *pg.Borrowed // connection of the transaction under way, or nil
	shut bool         // CutOff was called: no transaction may begin

	awaited    time.Time // since when a transaction is to begin that has not begun, or zero
	committing time.Time // since when the COMMIT of the transaction under way runs, or zero
}

// Call is a call of a handler, or of another function of the host.
type Call struct {
	// Context is the context of the call, for log lines.
	Context context.Context
	// Function names a function that is no handler, for example "hook Failed". It is empty for a handler.
	Function string
	Action   string // "" if the function is called for an event and not for an action
	// Type, ID, Place and the aggregate are those of the first event.
	Type, ID                   string
	AggregateType, AggregateID string
	Place                      Place
	Events                     int // 1, or more for a handler of batches
	Began                      time.Time
}

// Place is where an event came from: a Kafka record if Topic is set, otherwise a delivery.
type Place struct {
	Topic     string
	Partition int32
	Offset    int64

	Stream     string
	DeliveryID int64
}

// String returns the place for use within a sentence.
func (p Place) String() string {
	if p.Topic == "" {
		return fmt.Sprintf("delivery %d of %s", p.DeliveryID, p.Stream)
	}
	return fmt.Sprintf("%s/%d at offset %d", p.Topic, p.Partition, p.Offset)
}

// Attrs returns the attributes of the place for a log line.
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

// attrsAt returns the attributes of an event for a log line.
func attrsAt(place Place, eventType, id, aggregateType, aggregateID string) []any {
	return append(place.Attrs(), "type", eventType, "event_id", id,
		"aggregate_type", aggregateType, "aggregate_id", aggregateID)
}

// FunctionName returns Function, or "handler".
func (c Call) FunctionName() string { return cmp.Or(c.Function, "handler") }

// Attrs returns the attributes of the call for a log line.
func (c Call) Attrs() []any {
	attrs := append(attrsAt(c.Place, c.Type, c.ID, c.AggregateType, c.AggregateID), "action", c.Action)
	attrs = append(attrs, "running_for", time.Since(c.Began).Round(time.Millisecond))
	if c.Events > 1 {
		attrs = append(attrs, "events", c.Events)
	}
	return attrs
}

// Begin notes that a handler or another function of the host is called now. No other call may be under way.
func (a *Activity) Begin(c Call) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.call, a.busy = c, true
	a.call.Began = time.Now()
}

// Next notes that the call under way goes on with another event.
func (a *Activity) Next(place Place) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.call.Place, a.call.Began = place, time.Now()
}

// End notes that the call has returned, and returns its duration.
func (a *Activity) End() (took time.Duration) {
	a.mu.Lock()
	call := a.call
	took = time.Since(call.Began)
	a.call, a.busy = Call{}, false
	a.mu.Unlock()
	if a.Ended != nil {
		a.Ended(call, took)
	}
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

// TxBegun notes that the transaction has begun.
func (a *Activity) TxBegun() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.awaited = time.Time{}
}

// AwaitsTx returns since when a transaction is to begin. It returns false if none is awaited.
func (a *Activity) AwaitsTx() (since time.Time, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.awaited, !a.awaited.IsZero()
}

var errCutOff = errors.New("the worker was cut off")

// Use notes the connection of a transaction that is to begin. After CutOff it returns an error.
func (a *Activity) Use(conn *pg.Borrowed) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.shut {
		return errCutOff
	}
	a.conn = conn
	return nil
}

// Release notes that the transaction has ended, or has not begun.
func (a *Activity) Release() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.conn, a.awaited, a.committing = nil, time.Time{}, time.Time{}
}

// Commits notes that the COMMIT of the transaction under way begins.
func (a *Activity) Commits() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.committing = time.Now()
}

// Committing returns since when the COMMIT of the transaction under way runs. It returns false if none runs.
func (a *Activity) Committing() (since time.Time, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.committing, !a.committing.IsZero()
}

// Sever closes the connection of the transaction under way, if there is one. PostgreSQL rolls the transaction back and
// frees its locks. Later transactions may begin. A COMMIT that has begun goes on.
func (a *Activity) Sever() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conn != nil && a.committing.IsZero() {
		a.conn.Cut()
	}
}

// CutOff closes the connection of the transaction under way, if there is one, and lets no transaction begin any more.
// A goroutine cannot be ended from outside, so a handler that ignores its context goes on. CutOff makes sure that its
// transaction has no effect. A COMMIT that has begun goes on, outside the pool: pgx would cancel it, and PostgreSQL
// would then commit without its synchronous standby.
func (a *Activity) CutOff() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.shut = true
	switch {
	case a.conn == nil:
	case !a.committing.IsZero():
		a.conn.Detach()
	default:
		a.conn.Cut()
	}
}
