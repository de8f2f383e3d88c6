package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
)

// OrderEvent is one of the five things that can happen to an order. Nothing outside of
// this file adds a sixth.
type OrderEvent interface {
	outbox.DomainEvent
	fact() Fact
}

// Fact is what all events of an order have.
type Fact struct {
	OrderID uuid.UUID `json:"orderId"`
	Version int       `json:"version"` // its place in the history of the order, from 1
	At      time.Time `json:"occurredAt"`
}

// OccurredAt makes every struct that embeds it an outbox.DomainEvent.
func (f Fact) OccurredAt() time.Time { return f.At }

func (f Fact) fact() Fact    { return f }
func (f Fact) order() string { return f.OrderID.String() }

// OrderCreated says that a customer placed an order.
type OrderCreated struct {
	Fact
	OrderNumber    string `json:"orderNumber"`
	UserID         int64  `json:"userId"`
	TotalAmount    int64  `json:"totalAmount"`
	DiscountAmount int64  `json:"discountAmount"`
	FinalAmount    int64  `json:"finalAmount"`
	UsedCouponID   *int64 `json:"usedCouponId,omitempty"`
	Items          []Item `json:"items"`
}

// OrderConfirmed says that an order is paid.
type OrderConfirmed struct {
	Fact
	PaymentID *int64 `json:"paymentId,omitempty"`
}

// OrderCompleted says that an order is delivered.
type OrderCompleted struct{ Fact }

// OrderCancelled says that a customer does not want the order any more.
type OrderCancelled struct {
	Fact
	Reason       string `json:"reason"`
	CancelledBy  string `json:"cancelledBy"`
	RefundAmount *int64 `json:"refundAmount,omitempty"` // if it was paid
}

// OrderFailed says that nothing comes of an order, because of its payment for example.
type OrderFailed struct {
	Fact
	Reason string `json:"reason"`
}

// The names of the events, in the event store and in Kafka.
const (
	orderCreated   = "io.hhplus.ecommerce.order.created"
	orderConfirmed = "io.hhplus.ecommerce.order.confirmed"
	orderCompleted = "io.hhplus.ecommerce.order.completed"
	orderCancelled = "io.hhplus.ecommerce.order.cancelled"
	orderFailed    = "io.hhplus.ecommerce.order.failed"

	orderTopic = "ecommerce.order"
)

// registry says how events travel: all of an order under its id, hence in their order.
func registry(source string) (*outbox.Registry, error) {
	return outbox.NewRegistry(source,
		outbox.Event(orderCreated, "Order", OrderCreated.order).Topic(orderTopic),
		outbox.Event(orderConfirmed, "Order", OrderConfirmed.order).Topic(orderTopic),
		outbox.Event(orderCompleted, "Order", OrderCompleted.order).Topic(orderTopic),
		outbox.Event(orderCancelled, "Order", OrderCancelled.order).Topic(orderTopic),
		outbox.Event(orderFailed, "Order", OrderFailed.order).Topic(orderTopic),
	)
}

// nameOf returns the name under which an event is stored.
func nameOf(e OrderEvent) (string, error) {
	switch e.(type) {
	case OrderCreated:
		return orderCreated, nil
	case OrderConfirmed:
		return orderConfirmed, nil
	case OrderCompleted:
		return orderCompleted, nil
	case OrderCancelled:
		return orderCancelled, nil
	case OrderFailed:
		return orderFailed, nil
	}
	return "", fmt.Errorf("%T has no name", e)
}

// decode reads a stored event.
func decode(name string, payload []byte) (OrderEvent, error) {
	switch name {
	case orderCreated:
		return decodeAs[OrderCreated](payload)
	case orderConfirmed:
		return decodeAs[OrderConfirmed](payload)
	case orderCompleted:
		return decodeAs[OrderCompleted](payload)
	case orderCancelled:
		return decodeAs[OrderCancelled](payload)
	case orderFailed:
		return decodeAs[OrderFailed](payload)
	}
	return nil, fmt.Errorf("%q is no event of an order", name)
}

func decodeAs[E OrderEvent](payload []byte) (OrderEvent, error) {
	var e E
	if err := json.Unmarshal(payload, &e); err != nil {
		return nil, err
	}
	return e, nil
}
