// Package protobuf shows how events travel as Protobuf messages instead of JSON.
//
// The domain event, [OrderCreated], is a plain struct that knows nothing of
// Protobuf. [Codec] makes a codec from two functions, one for each direction
// between the struct and a generated message. [Orders] puts both together for a
// registry; that is all a service has to write.
//
// The payload is stored and sent byte for byte, with the content type
// application/protobuf. Fields may be added to the message as Protobuf allows.
// Any other change is a new event type, loopers.order.created.v2.
package protobuf

// To generate shoppb again:
//
//	pip install grpcio-tools
//	go install google.golang.org/protobuf/cmd/protoc-gen-go@latest
//	go generate ./...
//
//go:generate python3 -m grpc_tools.protoc -I . --go_out=. --go_opt=paths=source_relative shoppb/shop.proto

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/protobuf/shoppb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// ContentType is what the payloads are.
const ContentType = "application/protobuf"

// Codec returns the codec for events of the Go type E that travel as messages of
// the type M, a pointer to a generated struct. Both types follow from the
// functions, which return copies: neither may keep what it was given.
//
// The registered event cannot be the generated message itself: outbox takes
// events as values, and messages must not be copied.
func Codec[E any, M proto.Message](toMessage func(E) M, fromMessage func(M) (E, error)) outbox.Codec {
	return outbox.Codec{
		ContentType: ContentType,
		Encode: func(_ context.Context, event any) ([]byte, error) {
			e, ok := event.(E)
			if !ok {
				return nil, fmt.Errorf("event is %T, the codec is for %T", event, e)
			}
			// Deterministic: the same event has the same bytes, which makes
			// payloads comparable as long as the library stays the same.
			return proto.MarshalOptions{Deterministic: true}.Marshal(toMessage(e))
		},
		Decode: func(_ context.Context, data []byte, event any) error {
			e, ok := event.(*E)
			if !ok {
				return fmt.Errorf("event is %T, the codec is for %T", event, e)
			}
			var none M // a nil message, which still knows its type
			m := none.ProtoReflect().New().Interface().(M)
			if err := proto.Unmarshal(data, m); err != nil {
				return err
			}
			decoded, err := fromMessage(m)
			if err == nil {
				*e = decoded
			}
			return err
		},
	}
}

// OrderCreated says that a customer placed an order.
type OrderCreated struct {
	OrderID   int64
	UserID    int64
	Items     []Item
	CreatedAt time.Time
}

// Item is a line of an order.
type Item struct {
	ProductID int64
	Quantity  int32
	Price     int64 // of one, in cents
}

// OccurredAt implements outbox.DomainEvent.
func (e OrderCreated) OccurredAt() time.Time { return e.CreatedAt }

// AggregateID is the order.
func (e OrderCreated) AggregateID() string { return strconv.FormatInt(e.OrderID, 10) }

// TotalAmount is the sum of the items, in cents.
func (e OrderCreated) TotalAmount() (total int64) {
	for _, item := range e.Items {
		total += int64(item.Quantity) * item.Price
	}
	return total
}

// Orders defines how OrderCreated travels: to order-events by order, as the
// convention has it, and as a shoppb.OrderCreated.
func Orders() *outbox.EventType[OrderCreated] {
	return outbox.Event("loopers.order.created.v1", "Order", OrderCreated.AggregateID).Codec(OrderCodec())
}

// OrderCodec encodes OrderCreated as a shoppb.OrderCreated.
func OrderCodec() outbox.Codec { return Codec(orderToMessage, orderFromMessage) }

func orderToMessage(e OrderCreated) *shoppb.OrderCreated {
	m := &shoppb.OrderCreated{
		OrderId:     e.OrderID,
		UserId:      e.UserID,
		TotalAmount: e.TotalAmount(),
		CreatedAt:   timestamppb.New(e.CreatedAt),
	}
	for _, item := range e.Items {
		m.Items = append(m.Items, &shoppb.Item{ProductId: item.ProductID, Quantity: item.Quantity, Price: item.Price})
	}
	return m
}

// orderFromMessage refuses a message without a time, which Protobuf allows and
// the domain does not.
func orderFromMessage(m *shoppb.OrderCreated) (OrderCreated, error) {
	if err := m.GetCreatedAt().CheckValid(); err != nil {
		return OrderCreated{}, fmt.Errorf("created_at: %w", err)
	}
	e := OrderCreated{OrderID: m.GetOrderId(), UserID: m.GetUserId(), CreatedAt: m.GetCreatedAt().AsTime()}
	for _, item := range m.GetItems() {
		e.Items = append(e.Items, Item{ProductID: item.GetProductId(), Quantity: item.GetQuantity(), Price: item.GetPrice()})
	}
	return e, nil
}
