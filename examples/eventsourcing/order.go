package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Status is where an order stands.
type Status string

// An order is PENDING until it is paid. CANCELLED, FAILED and COMPLETED are final.
const (
	Pending   Status = "PENDING"
	Confirmed Status = "CONFIRMED" // paid
	Completed Status = "COMPLETED" // delivered
	Cancelled Status = "CANCELLED"
	Failed    Status = "FAILED"
)

// before says from which states an order may come into a state.
var before = map[Status][]Status{
	Confirmed: {Pending},
	Completed: {Confirmed},
	Cancelled: {Pending, Confirmed},
	Failed:    {Pending},
}

// Item is a line of an order.
type Item struct {
	ProductID int64 `json:"productId"`
	Quantity  int64 `json:"quantity"`
	Price     int64 `json:"price"` // of one
}

// State is all that the events of an order say. A snapshot is one, and so is an order in the
// read model.
type State struct {
	ID             uuid.UUID `json:"id"`
	OrderNumber    string    `json:"orderNumber"`
	UserID         int64     `json:"userId"`
	TotalAmount    int64     `json:"totalAmount"`
	DiscountAmount int64     `json:"discountAmount"`
	FinalAmount    int64     `json:"finalAmount"`
	UsedCouponID   *int64    `json:"usedCouponId"`
	Items          []Item    `json:"items"`
	Status         Status    `json:"status"`
	PaymentID      *int64    `json:"paymentId"`
	Reason         string    `json:"reason"` // why it was cancelled, or failed
	CancelledBy    string    `json:"cancelledBy"`
	RefundAmount   *int64    `json:"refundAmount"`
	Version        int       `json:"version"` // of its last event
	CreatedAt      time.Time `json:"createdAt"`
	UpdatedAt      time.Time `json:"updatedAt"`
}

// Order is the aggregate: it decides what may happen, and changes by its events alone. It
// knows neither the database nor Kafka.
type Order struct {
	State
	uncommitted []OrderEvent // decided, and not in the event store yet
}

var (
	// ErrTransition is returned where an order cannot go from its state to another.
	ErrTransition = errors.New("not possible in this state")
	// ErrInvalid is returned for an order that cannot be placed.
	ErrInvalid = errors.New("not an order")
	// ErrHistory is returned for events that are not the history of an order from its first
	// version on.
	ErrHistory = errors.New("events are missing")
)

// NewOrder is what a customer asks for.
type NewOrder struct {
	UserID         int64
	DiscountAmount int64
	UsedCouponID   *int64
	Items          []Item
}

// Create places an order. Each product is in one of its items.
func Create(id uuid.UUID, n NewOrder, at time.Time) (*Order, error) {
	var total int64
	seen := map[int64]bool{}
	for _, item := range n.Items {
		if item.Quantity < 1 || item.Price < 0 || seen[item.ProductID] {
			return nil, fmt.Errorf("%w: %d pieces of product %d for %d", ErrInvalid, item.Quantity, item.ProductID, item.Price)
		}
		seen[item.ProductID] = true
		total += item.Quantity * item.Price
	}
	if len(n.Items) == 0 || n.DiscountAmount < 0 || n.DiscountAmount > total {
		return nil, fmt.Errorf("%w: %d items for %d with a discount of %d", ErrInvalid, len(n.Items), total, n.DiscountAmount)
	}
	o := &Order{State: State{ID: id, Status: Pending}}
	o.raise(OrderCreated{
		Fact: o.next(at), OrderNumber: numberOf(id), UserID: n.UserID, TotalAmount: total, DiscountAmount: n.DiscountAmount,
		FinalAmount: total - n.DiscountAmount, UsedCouponID: n.UsedCouponID, Items: n.Items,
	})
	return o, nil
}

// Rebuild returns the order with this history, which begins at version 1.
func Rebuild(history []OrderEvent) (*Order, error) {
	return FromSnapshot(State{Status: Pending}, history)
}

// FromSnapshot returns the order that a snapshot and all events after it make.
func FromSnapshot(snapshot State, later []OrderEvent) (*Order, error) {
	o := &Order{State: snapshot}
	for _, e := range later {
		if f := e.fact(); f.Version != o.Version+1 {
			return nil, fmt.Errorf("%w: version %d of order %s comes after version %d", ErrHistory, f.Version, f.OrderID, o.Version)
		}
		o.apply(e)
	}
	return o, nil
}

// Confirm says that the order is paid. There is no payment for what costs nothing.
func (o *Order) Confirm(paymentID *int64, at time.Time) error {
	if err := o.check(Confirmed); err != nil {
		return err
	}
	o.raise(OrderConfirmed{Fact: o.next(at), PaymentID: paymentID})
	return nil
}

// Complete says that the order is delivered.
func (o *Order) Complete(at time.Time) error {
	if err := o.check(Completed); err != nil {
		return err
	}
	o.raise(OrderCompleted{o.next(at)})
	return nil
}

// Cancel cancels the order. What was paid is paid back.
func (o *Order) Cancel(reason, by string, at time.Time) error {
	if err := o.check(Cancelled); err != nil {
		return err
	}
	e := OrderCancelled{Fact: o.next(at), Reason: reason, CancelledBy: by}
	if o.Status == Confirmed {
		e.RefundAmount = new(o.FinalAmount)
	}
	o.raise(e)
	return nil
}

// Fail says that nothing comes of the order.
func (o *Order) Fail(reason string, at time.Time) error {
	if err := o.check(Failed); err != nil {
		return err
	}
	o.raise(OrderFailed{Fact: o.next(at), Reason: reason})
	return nil
}

func (o *Order) check(to Status) error {
	if !slices.Contains(before[to], o.Status) {
		return fmt.Errorf("%w: order %s is %s and cannot become %s", ErrTransition, o.ID, o.Status, to)
	}
	return nil
}

// next is the fact of the next event. It is after the last one, also where the clock of this
// machine is behind that of another: so a point in time cuts a history in two.
func (o *Order) next(at time.Time) Fact {
	at = at.UTC().Truncate(time.Microsecond) // PostgreSQL keeps no more
	if earliest := o.UpdatedAt.Add(time.Microsecond); at.Before(earliest) {
		at = earliest
	}
	return Fact{OrderID: o.ID, Version: o.Version + 1, At: at}
}

// raise makes an event part of the order.
func (o *Order) raise(e OrderEvent) {
	o.apply(e)
	o.uncommitted = append(o.uncommitted, e)
}

// apply is what an event does. It decides nothing: what has happened has happened.
func (o *Order) apply(e OrderEvent) {
	switch e := e.(type) {
	case OrderCreated:
		o.Status, o.CreatedAt = Pending, e.At
		o.OrderNumber, o.UserID, o.Items = e.OrderNumber, e.UserID, e.Items
		o.TotalAmount, o.DiscountAmount, o.FinalAmount, o.UsedCouponID = e.TotalAmount, e.DiscountAmount, e.FinalAmount, e.UsedCouponID
	case OrderConfirmed:
		o.Status, o.PaymentID = Confirmed, e.PaymentID
	case OrderCompleted:
		o.Status = Completed
	case OrderCancelled:
		o.Status, o.Reason, o.CancelledBy, o.RefundAmount = Cancelled, e.Reason, e.CancelledBy, e.RefundAmount
	case OrderFailed:
		o.Status, o.Reason = Failed, e.Reason
	}
	f := e.fact()
	o.ID, o.Version, o.UpdatedAt = f.OrderID, f.Version, f.At
}
