package main

import (
	"time"

	"github.com/outboxgo/outbox"
)

// OrderPlaced says that a customer has placed an order.
type OrderPlaced struct {
	OrderID string    `json:"orderId"`
	Product string    `json:"product"`
	Cents   int64     `json:"cents"`
	At      time.Time `json:"at"`
}

// OccurredAt is all that an event must have.
func (e OrderPlaced) OccurredAt() time.Time { return e.At }

func (e OrderPlaced) order() string { return e.OrderID }

// registry lists the events of the service. The second segment of a type names the
// topic, here order-events; the order's id is the record key.
func registry() (*outbox.Registry, error) {
	return outbox.NewRegistry("shop",
		outbox.Event("acme.order.placed.v1", "Order", OrderPlaced.order),
	)
}
