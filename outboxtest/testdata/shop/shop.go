// Package shop has event types of every form, for the tests.
package shop

import (
	"maps"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtest/testdata/shop/orders"
)

// Base brings OccurredAt to those that embed it; it is no event.
type Base struct{ At time.Time }

// OccurredAt makes events of those that embed it.
func (b Base) OccurredAt() time.Time { return b.At }

// ID is an aggregate's.
func (b Base) ID() string { return "id" }

// Middle embeds and is embedded itself.
type Middle struct{ *bottom }

type bottom struct{ at time.Time }

func (b *bottom) OccurredAt() time.Time { return b.at }

// ID is an aggregate's.
func (m Middle) ID() string { return "id" }

type (
	// Paid is an event.
	Paid struct{ Base }
	// Shipped is one whose base has a base.
	Shipped struct{ Middle }
	// liked is one that is not exported.
	liked struct{ orders.Base }
	// PaidV2 embeds an event and has a time of its own: both are events.
	PaidV2 struct{ Paid }
	// Tick is one that is no struct.
	Tick int64
)

// OccurredAt is a time of its own.
func (e PaidV2) OccurredAt() time.Time { return e.At.Add(1) }

// OccurredAt is when it ticked.
func (t Tick) OccurredAt() time.Time { return time.Unix(int64(t), 0) }

// ID is an aggregate's.
func (t Tick) ID() string { return "id" }

// What follows is no event type.
type (
	// Event is an interface.
	Event interface{ OccurredAt() time.Time }
	// Of is generic.
	Of[T any] struct{ Base }
	// Alias is another name of an event elsewhere.
	Alias = orders.Paid
	// Asked asks for something.
	Asked struct{ Plain }
	// Plain has a method of the same name.
	Plain struct{}
	// Zoned has another one.
	Zoned struct{}
)

// OccurredAt is not that of an event.
func (Plain) OccurredAt(time.Location) time.Time { return time.Time{} }

// OccurredAt is not that of an event.
func (Zoned) OccurredAt() *time.Location { return nil }

// Registry has all event types of this package, except those.
func Registry(except ...string) (*outbox.Registry, error) {
	all := map[string]outbox.Definition{
		"Paid":    outbox.Event("shop.payment.paid.v1", "Payment", Paid.ID),
		"PaidV2":  outbox.Event("shop.payment.paid.v2", "Payment", PaidV2.ID),
		"Shipped": outbox.Event("shop.order.shipped.v1", "Order", Shipped.ID),
		"Tick":    outbox.Event("shop.clock.ticked.v1", "Clock", Tick.ID),
		"liked":   outbox.Event("shop.product.liked.v1", "Product", liked.ID),
	}
	for _, name := range except {
		delete(all, name)
	}
	return outbox.NewRegistry("shop", slices.Collect(maps.Values(all))...)
}
