package main

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// EventBus is all that the domain knows of how events travel. Today that is
// [outbox.Recorder] with workers behind it, and with Kafka it is the same recorder with a
// relay behind it.
type EventBus interface {
	// Record makes events part of a transaction: they happen if it commits.
	Record(ctx context.Context, tx pgx.Tx, events ...outbox.DomainEvent) error
	// Cancel takes back a delayed event, and reports whether it was in time.
	Cancel(ctx context.Context, tx pgx.Tx, eventID uuid.UUID) (bool, error)
}

var _ EventBus = (*outbox.Recorder)(nil)

// Scope says whose business something is.
type Scope struct {
	OwnerID     string `json:"ownerId"`
	StrategyKey string `json:"strategyKey"`
	Market      string `json:"market"`
}

// Signal is what a strategy has decided.
type Signal struct {
	ID int64
	Scope
	Side     string // BUY or SELL
	Quantity int64
}

// OrderIntent is an order that shall exist at the exchange once, or not at all.
type OrderIntent struct {
	ID       uuid.UUID `json:"orderIntentId"`
	SignalID int64     `json:"signalId"`
	Scope
	Side     string    `json:"side"`
	Quantity int64     `json:"quantity"`
	Deadline time.Time `json:"deadline"` // from then on its signal is worth nothing, and no attempt is sent; zero in older commands
}

// ValidUntil returns until when the exchange may take an order that is sent at a time, and whether it is sent at all.
func (i OrderIntent) ValidUntil(at time.Time) (until time.Time, ok bool) {
	until = at.Add(orderValid)
	if !i.Deadline.IsZero() && i.Deadline.Before(until) {
		until = i.Deadline
	}
	return until, at.Before(until)
}

// State is that of an [Attempt].
type State string

// An attempt goes from PREPARED over SENT to one of the others, or at once to EXPIRED. UNKNOWN means that
// the exchange may have the order: it is asked until that is known. All others are final.
const (
	Prepared  State = "PREPARED"
	Sent      State = "SENT"
	Acked     State = "ACKED"      // the exchange has the order
	Rejected  State = "REJECTED"   // it said that it does not want it
	Throttled State = "THROTTLED"  // it said that it has no time: another attempt may follow
	Unknown   State = "UNKNOWN"    // it said nothing, or that something went wrong
	NotPlaced State = "NOT_PLACED" // it does not have the order, and will not take it any more
	Expired   State = "EXPIRED"    // it was not asked for the order before the deadline of the intent
)

// before says from which states an attempt may come into a state. What is known is never
// replaced, and what has been sent is never sent again.
var before = map[State][]State{
	Sent:      {Prepared},
	Acked:     {Sent, Unknown},
	Rejected:  {Sent, Unknown},
	Throttled: {Sent, Unknown},
	Unknown:   {Sent, Unknown},
	NotPlaced: {Sent, Unknown},
	Expired:   {Prepared},
}

// Attempt is one order to the exchange. Number and identifier are unique, so a command that
// comes twice does not make two of them.
type Attempt struct {
	No         int    // from 1, for an intent
	Identifier string // by which the exchange knows it
	State      State
	ValidUntil time.Time // the exchange takes it before that or never; no matter until it is sent
	Reason     string    // why it is not ACKED
}

// overdueID is the id of the event OrderOverdue of an attempt.
func (a Attempt) overdueID() uuid.UUID {
	return uuid.NewSHA1(uuid.NameSpaceURL, []byte("overdue/"+a.Identifier))
}

// Next returns the attempt that is to be made for an intent after its last one, which is zero
// if there is none. There is no next one while the exchange has the order or may have it, nor
// after it has turned the order down: then it returns the last one, and false.
func (i OrderIntent) Next(last Attempt) (next Attempt, ok bool) {
	if last.No > 0 && last.State != Throttled {
		return last, false
	}
	no := last.No + 1
	return Attempt{No: no, Identifier: fmt.Sprintf("%s-%d", i.ID, no), State: Prepared}, true
}

// Answer is what is known of an attempt after the exchange was asked.
type Answer struct {
	State   State
	OrderID string        // of ACKED
	Wait    time.Duration // of THROTTLED
	Reason  string        // of the others
}

// Trust returns an answer of the exchange, as far as it can be trusted: that the exchange does not have an
// order may change until the order is no longer valid. An order that it has rejected later than that came too
// late, so nothing is wrong with it.
func (a Attempt) Trust(got Answer, now time.Time) Answer {
	if got.State == Rejected && !now.Before(a.ValidUntil) {
		return Answer{State: NotPlaced, Reason: got.Reason}
	}
	if got.State == NotPlaced && now.Before(a.ValidUntil.Add(clockSkew)) {
		return Answer{State: Unknown, Reason: "the exchange does not have it yet"}
	}
	return got
}

// clockSkew is how far the clock of the exchange may be behind.
const clockSkew = 500 * time.Millisecond
