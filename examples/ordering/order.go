package main

import (
	"errors"
	"fmt"

	"github.com/google/uuid"
)

// The domain: what an order is. Nothing here knows PostgreSQL or Kafka.

// Status is the state of an order. From Created it goes to one of the others, and stays there.
type Status string

// The states of an order.
const (
	Created   Status = "CREATED"
	Completed Status = "COMPLETED"
	Cancelled Status = "CANCELLED"
)

// Item is a part of an order.
type Item struct {
	ProductID string `json:"productId"`
	Quantity  int64  `json:"quantity"`
	Price     int64  `json:"price"` // of one piece, in cents
}

// NewOrder is what a customer asks for. The id is the customer's: who does not know whether the order was heard
// asks again under the same one, and there is one order.
type NewOrder struct {
	ID         uuid.UUID
	CustomerID string
	Items      []Item
}

// The reasons why something is refused. No retry would help.
var (
	errOrder   = errors.New("this is not an order")
	errReason  = errors.New("a cancellation needs a reason")
	errUnknown = errors.New("there is no such order")
	errEnded   = errors.New("the order has ended otherwise")
)

const (
	maxQuantity = 1_000
	maxPrice    = 1_000_000_00
	maxItems    = 100
)

// check names the first thing that is wrong.
func (o NewOrder) check() error {
	switch {
	case o.ID == uuid.Nil:
		return fmt.Errorf("%w: it has no id", errOrder)
	case o.CustomerID == "":
		return fmt.Errorf("%w: it has no customer", errOrder)
	case len(o.Items) == 0 || len(o.Items) > maxItems:
		return fmt.Errorf("%w: it has %d items, and can have 1 to %d", errOrder, len(o.Items), maxItems)
	}
	seen := map[string]bool{}
	for i, item := range o.Items {
		switch {
		case item.ProductID == "" || seen[item.ProductID]:
			return fmt.Errorf("%w: item %d: product %q is missing, or there before", errOrder, i, item.ProductID)
		case item.Quantity < 1 || item.Quantity > maxQuantity:
			return fmt.Errorf("%w: item %d: quantity %d, and can be 1 to %d", errOrder, i, item.Quantity, maxQuantity)
		case item.Price < 0 || item.Price > maxPrice:
			return fmt.Errorf("%w: item %d: price %d, and can be 0 to %d", errOrder, i, item.Price, maxPrice)
		}
		seen[item.ProductID] = true
	}
	return nil
}

// total returns the price of an order in cents.
func total(items []Item) (cents int64) {
	for _, item := range items {
		cents += item.Quantity * item.Price
	}
	return cents
}

// points returns what a customer earns with an order: one for each whole euro.
func points(total int64) int64 { return total / 100 }
