// Package protobuf shows events that are Protobuf messages: [OrderCreated] is all that a service has to write.
//
// The payload is stored and sent byte for byte, with the content type application/protobuf. Fields may be added to the
// message as Protobuf allows. Any other change is a new event type, loopers.order.created.v2. docs/formats.md shows the
// same with a schema registry.
package protobuf

// To generate shoppb again:
//
//	pip install grpcio-tools
//	go install google.golang.org/protobuf/cmd/protoc-gen-go@latest
//	go generate ./...
//
//go:generate python3 -m grpc_tools.protoc -I . --go_out=. --go_opt=paths=source_relative shoppb/shop.proto

import (
	"strconv"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/protobuf/shoppb"
	"github.com/outboxgo/outbox/outboxschema"
)

// OrderCreated says that a customer placed an order. It is the generated message, with the methods of an event.
type OrderCreated struct{ *shoppb.OrderCreated }

// OccurredAt implements outbox.DomainEvent.
func (e OrderCreated) OccurredAt() time.Time { return e.GetCreatedAt().AsTime() }

// AggregateID is the order.
func (e OrderCreated) AggregateID() string { return strconv.FormatInt(e.GetOrderId(), 10) }

// Orders defines how OrderCreated travels: to order-events by order, as the convention has it, and as Protobuf.
func Orders() *outbox.EventType[OrderCreated] {
	return outbox.Event("loopers.order.created.v1", "Order", OrderCreated.AggregateID).Codec(outboxschema.Protobuf[OrderCreated]().Codec())
}
