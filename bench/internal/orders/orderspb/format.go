// Package orderspb is the order of the benchmarks as a message of protobuf, and how events carry it.
package orderspb

import (
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/outboxschema"
)

// Format returns the format of events as Protobuf messages.
func Format() outboxschema.Format { return outboxschema.ProtobufOf(message, event) }

func message(e orders.Placed) *Placed {
	return &Placed{N: int64(e.N), Order: e.Order, Customer: e.Customer, Total: int64(e.Total), Note: e.Note}
}

func event(m *Placed) (orders.Placed, error) {
	return orders.Placed{N: int(m.GetN()), Order: m.GetOrder(), Customer: m.GetCustomer(), Total: int(m.GetTotal()), Note: m.GetNote()}, nil
}
