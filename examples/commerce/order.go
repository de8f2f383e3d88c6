package main

import "github.com/outboxgo/outbox"

// Order is what a customer wants. It knows the rules of the shop, and neither the
// database nor Kafka: what happens to it is a list of plain events.
type Order struct {
	ID     int64 // 0 until it is placed
	UserID int64
	Items  []Item // sorted by product
}

// Item is a line of an order.
type Item struct {
	ProductID int64 `json:"productId"`
	Quantity  int64 `json:"quantity"`
	Price     int64 `json:"price"` // of one, in cents
}

// Total is the sum of the items, in cents.
func (o Order) Total() (cents int64) {
	for _, item := range o.Items {
		cents += item.Quantity * item.Price
	}
	return cents
}

// Place asks for the money. An order has one payment, so they share their number.
func (o Order) Place(at happened) []outbox.DomainEvent {
	return []outbox.DomainEvent{
		OrderCreatedEventV1{OrderID: o.ID, UserID: o.UserID, TotalAmount: o.Total(), happened: at},
		PaymentCreatedEventV1{PaymentID: o.ID, OrderID: o.ID, Amount: o.Total(), happened: at},
	}
}

// Pay is what happens when the money comes in.
func (o Order) Pay(at happened) []outbox.DomainEvent {
	return []outbox.DomainEvent{
		PaymentPaidEventV1{PaymentID: o.ID, OrderID: o.ID, Amount: o.Total(), happened: at},
		OrderPaidEventV1{OrderID: o.ID, Items: o.Items, happened: at},
	}
}

// Decline is what happens when it does not.
func (o Order) Decline(at happened) []outbox.DomainEvent {
	return []outbox.DomainEvent{
		PaymentFailedEventV1{PaymentID: o.ID, OrderID: o.ID, happened: at},
		OrderCanceledEventV1{OrderID: o.ID, happened: at},
	}
}

// Taken is what happens when an item was taken from the stock and so many are left.
// There may be fewer than none: the shop sells what it will have again.
func (i Item) Taken(left int64, at happened) []outbox.DomainEvent {
	if left > 0 || left+i.Quantity <= 0 { // there are more, or there were none
		return nil
	}
	return []outbox.DomainEvent{StockDepletedEventV1{ProductID: i.ProductID, happened: at}}
}
