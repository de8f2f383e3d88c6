package main

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
)

var noon = happened{time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)}

var anOrder = Order{ID: 7, UserID: 1, Items: []Item{{ProductID: 3, Quantity: 2, Price: 1000}, {ProductID: 5, Quantity: 1, Price: 250}}}

// The domain needs neither a database nor Kafka nor an encoding.
var orderTests = []struct {
	name      string
	got, want []outbox.DomainEvent
}{
	{"placed", anOrder.Place(noon), []outbox.DomainEvent{
		OrderCreatedEventV1{OrderID: 7, UserID: 1, TotalAmount: 2250, happened: noon},
		PaymentCreatedEventV1{PaymentID: 7, OrderID: 7, Amount: 2250, happened: noon},
	}},
	{"paid", anOrder.Pay(noon), []outbox.DomainEvent{
		PaymentPaidEventV1{PaymentID: 7, OrderID: 7, Amount: 2250, happened: noon},
		OrderPaidEventV1{OrderID: 7, Items: anOrder.Items, happened: noon},
	}},
	{"declined", anOrder.Decline(noon), []outbox.DomainEvent{
		PaymentFailedEventV1{PaymentID: 7, OrderID: 7, happened: noon},
		OrderCanceledEventV1{OrderID: 7, happened: noon},
	}},
	{"one is left", Item{ProductID: 3, Quantity: 2}.Taken(1, noon), nil},
	{"the last one is sold", Item{ProductID: 3, Quantity: 2}.Taken(0, noon), []outbox.DomainEvent{StockDepletedEventV1{ProductID: 3, happened: noon}}},
	{"more than there were are sold", Item{ProductID: 3, Quantity: 2}.Taken(-1, noon), []outbox.DomainEvent{StockDepletedEventV1{ProductID: 3, happened: noon}}},
	{"there were none before", Item{ProductID: 3, Quantity: 2}.Taken(-2, noon), nil},
}

func TestOrder(t *testing.T) {
	t.Parallel()
	for _, tt := range orderTests {
		t.Run(tt.name, func(t *testing.T) { require.Equal(t, tt.want, tt.got) })
	}
	require.Equal(t, noon.At, anOrder.Pay(noon)[0].OccurredAt())
}
