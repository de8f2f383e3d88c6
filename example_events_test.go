package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
)

// OrderOf returns the aggregate id, which is the record key unless Key says otherwise.
func (e OrderPaid) OrderOf() string       { return e.OrderID }
func (e StockDepleted) ProductOf() string { return e.ProductID }

var may = time.Date(2026, 5, 1, 9, 0, 0, 0, time.UTC)

// A registry says for each Go type how its events travel. The topic follows from the
// event type, unless Topic names one; the record key is the aggregate id, unless Key
// returns another.
func ExampleNewRegistry() {
	events, err := outbox.NewRegistry("shop",
		outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf).
			Key(func(e OrderPaid) string { return e.ProductID }),
		outbox.Event("acme.stock.depleted.v1", "Product", StockDepleted.ProductOf).
			Topic("stock-alerts"),
	)
	if err != nil {
		panic(err)
	}
	for _, r := range events.Registrations() {
		fmt.Println(r.EventType, "of", r.AggregateType, "goes to", r.Topic)
	}
	// Output:
	// acme.order.paid.v1 of Order goes to order-events
	// acme.stock.depleted.v1 of Product goes to stock-alerts
}

// A FieldError names the event and the field that cannot be stored, and wraps the
// reason. Nothing was written, and the transaction remains usable.
func ExampleFieldError() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	_, err = rec.KafkaRecord(context.Background(), OrderPaid{ProductID: "P-7", At: may}) // without an OrderID

	var bad *outbox.FieldError
	if errors.As(err, &bad) {
		fmt.Println(bad.Field, errors.Is(err, outbox.ErrEmpty))
	}
	// Output: aggregate_id true
}

// KafkaRecord returns the record that a relay would send: for tests of consumers that
// are not written with this library.
func ExampleRecorder_KafkaRecord() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	r, err := rec.KafkaRecord(context.Background(), OrderPaid{OrderID: "O-1", ProductID: "P-7", Quantity: 2, At: may})
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Topic, string(r.Key), string(r.Value))
	for _, h := range r.Headers {
		if h.Key == "ce_type" || h.Key == "ce_source" {
			fmt.Println(h.Key, string(h.Value))
		}
	}
	// Output:
	// order-events O-1 {"OrderID":"O-1","ProductID":"P-7","Quantity":2,"At":"2026-05-01T09:00:00Z"}
	// ce_source shop
	// ce_type acme.order.paid.v1
}

// The correlation id and the traceparent in the context travel with every event that
// is recorded under it, and are in the context of the handlers that receive it.
func ExampleWithCorrelationID() {
	ctx := outbox.WithCorrelationID(context.Background(), "req-42")
	ctx = outbox.WithTraceParent(ctx, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	fmt.Println(outbox.CorrelationID(ctx))
	fmt.Println(outbox.TraceParent(ctx))
	// Output:
	// req-42
	// 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
}

// An event has options of its own where it is to go elsewhere, under another key, or with
// attributes and headers that others of its type do not have.
func ExampleWith() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	paid := OrderPaid{OrderID: "O-1", ProductID: "P-7", Quantity: 2, At: may}
	vip := outbox.With(paid, outbox.EventOptions{
		Topic:      "vip-orders",
		Key:        "customer-3",
		Attributes: map[string]string{"market": "seoul"},
		Headers:    map[string]string{"tenant": "acme"},
	})
	for _, event := range []outbox.DomainEvent{paid, vip} { // Record takes both, too
		r, err := rec.KafkaRecord(context.Background(), event)
		if err != nil {
			panic(err)
		}
		fmt.Println(r.Topic, string(r.Key))
		for _, h := range r.Headers[8:] {
			fmt.Println(" ", h.Key, string(h.Value))
		}
	}
	// Output:
	// order-events O-1
	// vip-orders customer-3
	//   ce_market seoul
	//   tenant acme
}

// An event that is worth nothing after a time is neither sent nor handled from then on. Its record says when.
func ExampleEventOptions_expires() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	paid := OrderPaid{OrderID: "O-1", ProductID: "P-7", Quantity: 2, At: may}
	r, err := rec.KafkaRecord(context.Background(), outbox.With(paid, outbox.EventOptions{Expires: may.Add(30 * time.Second)}))
	if err != nil {
		panic(err)
	}
	m, err := outbox.DecodeCloudEvent(r)
	if err != nil {
		panic(err)
	}
	fmt.Println(m.Time.Format(time.RFC3339), "until", m.Extensions["expirytime"])
	// Output: 2026-05-01T09:00:00Z until 2026-05-01T09:00:30Z
}

// A tombstone has a compacted topic forget the earlier events of its key.
func ExampleEventOptions_tombstone() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	paid := OrderPaid{OrderID: "O-1", At: may}
	event := outbox.With(paid, outbox.EventOptions{Tombstone: true})
	r, err := rec.KafkaRecord(context.Background(), event) // Record takes it, too
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Topic, string(r.Key), r.Value == nil)
	// Output: order-events O-1 true
}

// A gateway records events whose types are not Go types, such as those of a webhook.
func ExampleAllowRaw() {
	events, err := outbox.NewRegistry("gateway", outbox.AllowRaw())
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	hook := outbox.RawEvent{
		EventType: "stripe.invoice.paid.v1", AggregateType: "Invoice", AggregateID: "in_1",
		Payload: []byte(`{"amount": 450}`), ContentType: "application/json", Time: may,
	}
	r, err := rec.KafkaRecord(context.Background(), hook) // Record takes it, too
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Topic, string(r.Key), string(r.Value))

	hook.Payload = []byte(`{"amount": `)
	_, err = rec.KafkaRecord(context.Background(), hook)
	fmt.Println(err)
	// Output:
	// invoice-events in_1 {"amount": 450}
	// outbox: stripe.invoice.paid.v1: payload is JSON that PostgreSQL refuses: not JSON at all
}

// A codec encodes the payloads of an event type. A content type other than
// application/json is stored and sent byte for byte.
func ExampleEventType_Codec() {
	lines := outbox.Codec{
		ContentType: "text/plain",
		Encode: func(_ context.Context, event any) ([]byte, error) {
			e := event.(StockDepleted) //nolint:forcetypeassert // of the registered type, always
			return []byte(e.ProductID + " " + e.At.Format(time.RFC3339)), nil
		},
		Decode: func(_ context.Context, data []byte, event any) error {
			e := event.(*StockDepleted) //nolint:forcetypeassert // a pointer to it
			product, at, ok := strings.Cut(string(data), " ")
			if !ok {
				return errors.New("want a product and a time")
			}
			e.ProductID = product
			return e.At.UnmarshalText([]byte(at))
		},
	}
	events, err := outbox.NewRegistry("shop",
		outbox.Event("acme.stock.depleted.v1", "Product", StockDepleted.ProductOf).Codec(lines))
	if err != nil {
		panic(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		panic(err)
	}
	r, err := rec.KafkaRecord(context.Background(), StockDepleted{"P-7", may})
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n", r.Value)
	// Output: P-7 2026-05-01T09:00:00Z
}

// DeadLetterTopic is the default of ConsumerConfig.DeadLetterTopic.
func ExampleDeadLetterTopic() {
	fmt.Println(outbox.DeadLetterTopic("order-events"))
	// Output: order-events.dlq
}

// Alerts read as sentences, and marshal as what they are about.
func ExampleAlert() {
	a := outbox.Alert{
		Kind: outbox.AlertStale, Relay: "default", At: may,
		Counts: []outbox.EventCount{{Relay: "default", Status: "pending", Type: "shop.order.placed.v1", Events: 1200, Oldest: may.Add(-7 * time.Minute)}},
	}
	kind, err := json.Marshal(a.Kind)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(kind))
	fmt.Println(a)
	// Output:
	// "stale_events"
	// relay default: 1200 events are not published, the oldest for 7m0s: 1200 pending shop.order.placed.v1
}
