package main

import (
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
)

// The events of an order, in the order in which they may happen. What they are about is always the order, whichever
// topic they go to: so its history is found by one type and id, and in each topic its events are in order.

// OrderCreated says that a customer wants something.
type OrderCreated struct {
	about
	CustomerID string `json:"customerId"`
	Items      []Item `json:"items"`
	Total      int64  `json:"total"` // cents
}

// OrderCompleted says that a customer gets it.
type OrderCompleted struct {
	about
	CustomerID string `json:"customerId"`
	Total      int64  `json:"total"`
}

// OrderCancelled says that a customer does not get it, and why.
type OrderCancelled struct {
	about
	CustomerID string `json:"customerId"`
	Reason     string `json:"reason"`
}

// ReservationRequested asks the inventory for the items of an order.
type ReservationRequested struct {
	about
	Items []Item `json:"items"`
}

// ReleaseRequested compensates ReservationRequested.
type ReleaseRequested struct{ about }

// StockReserved is the inventory's answer: the items are put aside.
type StockReserved struct{ about }

// StockShort is its other answer: nothing is put aside.
type StockShort struct {
	about
	ProductID string `json:"productId"`
	Available int64  `json:"available"`
	Wanted    int64  `json:"wanted"`
}

// PointsEarned adds to the points of a customer.
type PointsEarned struct {
	about
	CustomerID string `json:"customerId"`
	Points     int64  `json:"points"`
}

// PointsRevoked compensates PointsEarned.
type PointsRevoked struct {
	about
	CustomerID string `json:"customerId"`
	Points     int64  `json:"points"`
}

// NotificationRequired asks for a message to a customer, one for each state that an order comes into.
type NotificationRequired struct {
	about
	CustomerID string `json:"customerId"`
	State      Status `json:"state"`
	Text       string `json:"text"`
}

// about is what all events have.
type about struct {
	OrderID uuid.UUID `json:"orderId"`
	At      time.Time `json:"occurredAt"`
}

// OccurredAt makes every struct that embeds it an outbox.DomainEvent.
func (a about) OccurredAt() time.Time { return a.At }

func (a about) order() string { return a.OrderID.String() }

func now(order uuid.UUID) about { return about{order, time.Now()} }

const (
	orderCreated         = "shop.order.created.v1"
	orderCompleted       = "shop.order.completed.v1"
	orderCancelled       = "shop.order.cancelled.v1"
	reservationRequested = "shop.inventory.reservation-requested.v1"
	releaseRequested     = "shop.inventory.release-requested.v1"
	stockReserved        = "shop.inventory.reserved.v1"
	stockShort           = "shop.inventory.short.v1"
	pointsEarned         = "shop.reward.earned.v1"
	pointsRevoked        = "shop.reward.revoked.v1"
	notificationRequired = "shop.notification.required.v1"

	aggregate = "Order"
)

// registry says how events travel. The second segment of a type names the topic: order-events,
// inventory-events, reward-events, notification-events. The key is the order.
//
// A request and its compensation go to the same topic under the same key, so that consumers get
// them in this order.
func registry(source string) (*outbox.Registry, error) {
	return outbox.NewRegistry(source,
		outbox.Event(orderCreated, aggregate, OrderCreated.order),
		outbox.Event(orderCompleted, aggregate, OrderCompleted.order),
		outbox.Event(orderCancelled, aggregate, OrderCancelled.order),
		outbox.Event(reservationRequested, aggregate, ReservationRequested.order),
		outbox.Event(releaseRequested, aggregate, ReleaseRequested.order),
		outbox.Event(stockReserved, aggregate, StockReserved.order),
		outbox.Event(stockShort, aggregate, StockShort.order),
		outbox.Event(pointsEarned, aggregate, PointsEarned.order),
		outbox.Event(pointsRevoked, aggregate, PointsRevoked.order),
		outbox.Event(notificationRequired, aggregate, NotificationRequired.order),
	)
}

// unhandled are the types without a handler here. Others may read them, today or later.
var unhandled = []string{orderCreated, orderCancelled}
