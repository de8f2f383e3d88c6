package itest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

// shopEvent is what the events of the users' shop have in common.
type shopEvent struct {
	ID string    `json:"id"`
	At time.Time `json:"at"`
}

func (e shopEvent) OccurredAt() time.Time { return e.At }
func (e shopEvent) AggregateID() string   { return e.ID }

type (
	orderCreated   struct{ shopEvent }
	orderCanceled  struct{ shopEvent }
	paymentCreated struct{ shopEvent }
	paymentPaid    struct{ shopEvent }
	paymentFailed  struct{ shopEvent }
	likeCreated    struct{ shopEvent }
	likeCanceled   struct{ shopEvent }
	productViewed  struct{ shopEvent }
)

// The eight types of the users' document, and where they go (T2).
var shopTypes = []struct {
	eventType, topic string
	definition       outbox.Definition
}{
	{"loopers.order.created.v1", "order-events", outbox.Event("loopers.order.created.v1", "Order", orderCreated.AggregateID)},
	{"loopers.order.canceled.v1", "order-events", outbox.Event("loopers.order.canceled.v1", "Order", orderCanceled.AggregateID)},
	{"loopers.payment.created.v1", "payment-events", outbox.Event("loopers.payment.created.v1", "Payment", paymentCreated.AggregateID)},
	{"loopers.payment.paid.v1", "payment-events", outbox.Event("loopers.payment.paid.v1", "Payment", paymentPaid.AggregateID)},
	{"loopers.payment.failed.v1", "payment-events", outbox.Event("loopers.payment.failed.v1", "Payment", paymentFailed.AggregateID)},
	{"loopers.like.created.v1", "like-events", outbox.Event("loopers.like.created.v1", "Like", likeCreated.AggregateID)},
	{"loopers.like.canceled.v1", "like-events", outbox.Event("loopers.like.canceled.v1", "Like", likeCanceled.AggregateID)},
	{"loopers.product.viewed.v1", "product-events", outbox.Event("loopers.product.viewed.v1", "Product", productViewed.AggregateID)},
}

// shop returns the registry of the users' shop.
func shop(t testing.TB) *outbox.Registry {
	t.Helper()
	var definitions []outbox.Definition
	for _, tt := range shopTypes {
		definitions = append(definitions, tt.definition)
	}
	events, err := outbox.NewRegistry("commerce-api", definitions...)
	require.NoError(t, err)
	return events
}

func TestTopicByConvention(t *testing.T) {
	t.Parallel()
	events := shop(t)
	for _, tt := range shopTypes {
		topic, err := events.Topic(tt.eventType)
		require.NoError(t, err)
		require.Equal(t, tt.topic, topic, tt.eventType)
	}
	require.Equal(t, []string{
		"loopers.like.canceled.v1", "loopers.like.created.v1", "loopers.order.canceled.v1", "loopers.order.created.v1",
		"loopers.payment.created.v1", "loopers.payment.failed.v1", "loopers.payment.paid.v1", "loopers.product.viewed.v1",
	}, events.Types(), "sorted")
}

func TestTopicOfUnknownType(t *testing.T) {
	t.Parallel()
	for _, eventType := range []string{"loopers.order.shipped.v1", "loopers.order.created.v2", "order.created", ""} {
		topic, err := shop(t).Topic(eventType)
		requireRefused(t, err, outbox.ErrUnregistered, refusal{eventType, -1, "event_type"})
		require.Empty(t, topic)
	}
}

// A topic of its own frees an event type from the convention, and a changed
// definition leaves the one that it was made from as it was.
func TestTopicOverride(t *testing.T) {
	t.Parallel()
	viewed := outbox.Event("loopers.product.viewed.v1", "Product", productViewed.AggregateID)
	elsewhere := viewed.Topic("product-view-events")
	for definition, want := range map[*outbox.EventType[productViewed]]string{
		viewed: "product-events", elsewhere: "product-view-events", elsewhere.Topic(""): "product-events",
	} {
		events, err := outbox.NewRegistry("commerce-api", definition)
		require.NoError(t, err)
		topic, err := events.Topic("loopers.product.viewed.v1")
		require.NoError(t, err)
		require.Equal(t, want, topic)
	}
}

func TestRegistrations(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("commerce-api",
		outbox.Event("loopers.product.viewed.v1", "Product", productViewed.AggregateID).Topic("product-view-events").
			Key(productViewed.AggregateID).Attribute("market", productViewed.AggregateID),
		outbox.Event("loopers.order.created.v1", "Order", orderCreated.AggregateID).Codec(outbox.Codec{
			ContentType: "application/x-order",
			Encode:      func(context.Context, any) ([]byte, error) { return []byte("order"), nil },
			Decode:      func(context.Context, []byte, any) error { return errors.ErrUnsupported },
		}),
	)
	require.NoError(t, err)
	all := events.Registrations()
	payload, err := all[0].Codec.Encode(background, orderCreated{})
	require.NoError(t, err)
	require.Equal(t, "order", string(payload))
	require.Equal(t, "application/x-order", all[0].Codec.ContentType)
	require.ErrorIs(t, all[0].Codec.Decode(background, nil, nil), errors.ErrUnsupported)
	require.Equal(t, "application/json", all[1].Codec.ContentType)
	for i := range all {
		all[i].Codec = outbox.Codec{} // functions are never equal
	}
	require.Equal(t, []outbox.Registration{
		{EventType: "loopers.order.created.v1", GoType: reflect.TypeFor[orderCreated](), AggregateType: "Order", Topic: "order-events"},
		{EventType: "loopers.product.viewed.v1", GoType: reflect.TypeFor[productViewed](), AggregateType: "Product", Topic: "product-view-events", OwnKey: true, Attributes: []string{"market"}},
	}, all)
	require.Equal(t, "commerce-api", events.Source())
}

var goodDefinitions = []struct {
	name  string
	event outbox.Definition
	topic string
}{
	{"an action of several segments", named("shop.order.line.item.added.v12"), "order-events"},
	{"capitals, digits, - and _", named("Shop-24.order_line.Item-added_2.v1"), "order_line-events"},
	{"a type of 100 characters", named("shop.order." + strings.Repeat("x", 86) + ".v1"), "order-events"},
	{"a type of one segment with a topic", named("LEDGER_POSTED").Topic("ledger"), "ledger"},
	{"a type without version with a topic", named("order.created").Topic("orders"), "orders"},
	{"a topic of 249 characters", named("shop.order.created.v1").Topic(strings.Repeat("x", 249)), strings.Repeat("x", 249)},
	{"a topic of all that Kafka allows", named("shop.order.created.v1").Topic(".a-Z_09."), ".a-Z_09."},
	{"an aggregate type of 100 characters in 300 bytes", aggregate(strings.Repeat("주", 100)), "order-events"},
	{"a content type of 100 characters", encoded(outbox.Codec{ContentType: "a/" + strings.Repeat("x", 98), Encode: encodeNothing, Decode: decodeNothing}), "order-events"},
	{"no function for the key", named("shop.order.created.v1").Key(nil), "order-events"},
}

func TestGoodDefinitions(t *testing.T) {
	t.Parallel()
	for _, tt := range goodDefinitions {
		t.Run(tt.name, func(t *testing.T) {
			events, err := outbox.NewRegistry(strings.Repeat("x", 100), tt.event)
			require.NoError(t, err)
			require.Len(t, events.Types(), 1)
			topic, err := events.Topic(events.Types()[0])
			require.NoError(t, err)
			require.Equal(t, tt.topic, topic)
		})
	}
}

var badDefinitions = []struct {
	name      string
	event     outbox.Definition
	eventType string // in the error
	field     string
	want      error
}{
	{"nil", nil, "no definition", "event", outbox.ErrNilArgument},
	{"a typed nil", (*outbox.EventType[orderCreated])(nil), "no definition", "event", outbox.ErrNilArgument},
	{"a pointer type", outbox.Event("shop.order.created.v1", "Order", (*orderCreated).AggregateID), "shop.order.created.v1", "event", outbox.ErrMalformed},
	{"an interface", outbox.Event("shop.order.created.v1", "Order", func(outbox.DomainEvent) string { return "" }), "shop.order.created.v1", "event", outbox.ErrMalformed},

	{"no event type", named(""), "itest.orderCreated", "event_type", outbox.ErrEmpty},
	{"no event type but a topic", named("").Topic("orders"), "itest.orderCreated", "event_type", outbox.ErrEmpty},
	{"a type without version", named("shop.order.created"), "shop.order.created", "event_type", outbox.ErrMalformed},
	{"a type without action", named("shop.order.v1"), "shop.order.v1", "event_type", outbox.ErrMalformed},
	{"a type of one segment", named("created"), "created", "event_type", outbox.ErrMalformed},
	{"version 0", named("shop.order.created.v0"), "shop.order.created.v0", "event_type", outbox.ErrMalformed},
	{"version 01", named("shop.order.created.v01"), "shop.order.created.v01", "event_type", outbox.ErrMalformed},
	{"a version without number", named("shop.order.created.v"), "shop.order.created.v", "event_type", outbox.ErrMalformed},
	{"a capital V", named("shop.order.created.V1"), "shop.order.created.V1", "event_type", outbox.ErrMalformed},
	{"an empty segment", named("shop..created.v1"), "shop..created.v1", "event_type", outbox.ErrMalformed},
	{"a dot in front", named(".shop.order.created.v1"), ".shop.order.created.v1", "event_type", outbox.ErrMalformed},
	{"a dot behind", named("shop.order.created.v1."), "shop.order.created.v1.", "event_type", outbox.ErrMalformed},
	{"a dot behind and a topic", named("created.").Topic("orders"), "created.", "event_type", outbox.ErrMalformed},
	{"a newline behind", named("shop.order.created.v1\n"), "shop.order.created.v1\n", "event_type", outbox.ErrMalformed},
	{"a space within", named("shop.order created.v1"), "shop.order created.v1", "event_type", outbox.ErrMalformed},
	{"a space within and a topic", named("order created").Topic("orders"), "order created", "event_type", outbox.ErrMalformed},
	{"a letter that no topic can have", named("shop.주문.created.v1"), "shop.주문.created.v1", "event_type", outbox.ErrMalformed},
	{"NUL in the type", named("shop.order.created\x00.v1"), "shop.order.created\x00.v1", "event_type", outbox.ErrNUL},
	{"a type that is not UTF-8", named("shop.order\xff.created.v1"), "shop.order\xff.created.v1", "event_type", outbox.ErrUTF8},
	{"a type of 101 characters", named(longType), longType, "event_type", outbox.ErrTooLong},

	{"no aggregate type", aggregate(""), "shop.order.created.v1", "aggregate_type", outbox.ErrEmpty},
	{"NUL in the aggregate type", aggregate("\x00"), "shop.order.created.v1", "aggregate_type", outbox.ErrNUL},
	{"an aggregate type that is not UTF-8", aggregate("\xc0"), "shop.order.created.v1", "aggregate_type", outbox.ErrUTF8},
	{"an aggregate type of 101 characters", aggregate(strings.Repeat("주", 101)), "shop.order.created.v1", "aggregate_type", outbox.ErrTooLong},
	{"no function for the aggregate id", outbox.Event[orderCreated]("shop.order.created.v1", "Order", nil), "shop.order.created.v1", "aggregate_id", outbox.ErrNilArgument},

	{"topic .", named("shop.order.created.v1").Topic("."), "shop.order.created.v1", "topic", outbox.ErrMalformed},
	{"topic ..", named("shop.order.created.v1").Topic(".."), "shop.order.created.v1", "topic", outbox.ErrMalformed},
	{"a topic with a slash", named("shop.order.created.v1").Topic("shop/orders"), "shop.order.created.v1", "topic", outbox.ErrMalformed},
	{"a topic with an accent", named("shop.order.created.v1").Topic("événements"), "shop.order.created.v1", "topic", outbox.ErrMalformed},
	{"a topic with a newline behind", named("shop.order.created.v1").Topic("orders\n"), "shop.order.created.v1", "topic", outbox.ErrMalformed},
	{"a topic of 250 characters", named("shop.order.created.v1").Topic(strings.Repeat("x", 250)), "shop.order.created.v1", "topic", outbox.ErrMalformed},

	{"no codec", encoded(outbox.Codec{}), "shop.order.created.v1", "content_type", outbox.ErrEmpty},
	{"no encoder", encoded(outbox.Codec{ContentType: "text/plain", Decode: decodeNothing}), "shop.order.created.v1", "content_type", outbox.ErrNilArgument},
	{"no decoder", encoded(outbox.Codec{ContentType: "text/plain", Encode: encodeNothing}), "shop.order.created.v1", "content_type", outbox.ErrNilArgument},
	{"a content type that is no media type", contentType("protobuf"), "shop.order.created.v1", "content_type", outbox.ErrMalformed},
	{"a content type with a blank inside", contentType("a b/c"), "shop.order.created.v1", "content_type", outbox.ErrMalformed},
	{"a content type with blanks around", contentType(" text/plain "), "shop.order.created.v1", "content_type", outbox.ErrMalformed},
	{"a content type that is an event's own", contentType("application/cloudevents+json"), "shop.order.created.v1", "content_type", outbox.ErrMalformed},
	{"a blank aggregate type", aggregate(" "), "shop.order.created.v1", "aggregate_type", outbox.ErrMalformed},
	{"an aggregate type with a control character", aggregate("a\tb"), "shop.order.created.v1", "aggregate_type", outbox.ErrMalformed},
	{"a content type of 101 characters", encoded(outbox.Codec{ContentType: strings.Repeat("é", 101), Encode: encodeNothing, Decode: decodeNothing}), "shop.order.created.v1", "content_type", outbox.ErrTooLong},
}

// 101 characters
var longType = "shop.order." + strings.Repeat("x", 87) + ".v1"

func named(eventType string) *outbox.EventType[orderCreated] {
	return outbox.Event(eventType, "Order", orderCreated.AggregateID)
}

func aggregate(aggregateType string) *outbox.EventType[orderCreated] {
	return outbox.Event("shop.order.created.v1", aggregateType, orderCreated.AggregateID)
}

func encoded(c outbox.Codec) *outbox.EventType[orderCreated] {
	return named("shop.order.created.v1").Codec(c)
}

func contentType(text string) *outbox.EventType[orderCreated] {
	return encoded(outbox.Codec{ContentType: text, Encode: encodeNothing, Decode: decodeNothing})
}

func encodeNothing(context.Context, any) ([]byte, error) { return nil, nil }
func decodeNothing(context.Context, []byte, any) error   { return nil }

func TestBadDefinition(t *testing.T) {
	t.Parallel()
	for _, tt := range badDefinitions {
		t.Run(tt.name, func(t *testing.T) {
			events, err := outbox.NewRegistry("commerce-api",
				outbox.Event("shop.like.created.v1", "Like", likeCreated.AggregateID), tt.event)
			require.Nil(t, events)
			requireRefused(t, err, tt.want, refusal{tt.eventType, 1, tt.field})
		})
	}
}

// One error names them all, so that a service is put right in one go.
func TestAllBadDefinitions(t *testing.T) {
	t.Parallel()
	want := []refusal{{"", -1, "source"}}
	var definitions []outbox.Definition
	for i, tt := range badDefinitions {
		definitions = append(definitions, tt.event)
		want = append(want, refusal{tt.eventType, i, tt.field})
	}
	_, err := outbox.NewRegistry("", definitions...)
	var joined interface{ Unwrap() []error }
	require.ErrorAs(t, err, &joined)
	var got []refusal
	for i, err := range joined.Unwrap() {
		var rejected *outbox.FieldError
		require.ErrorAs(t, err, &rejected)
		got = append(got, refusal{rejected.EventType, rejected.Index, rejected.Field})
		if i > 0 {
			require.ErrorIs(t, err, badDefinitions[i-1].want, badDefinitions[i-1].name)
		}
	}
	require.Equal(t, want, got)
	for _, is := range []error{outbox.ErrEmpty, outbox.ErrNilArgument, outbox.ErrMalformed, outbox.ErrTooLong, outbox.ErrNUL, outbox.ErrUTF8} {
		require.ErrorIs(t, err, is)
	}
	var first *outbox.FieldError
	require.ErrorAs(t, err, &first)
	require.Equal(t, "source", first.Field)
}

func TestDuplicateDefinitions(t *testing.T) {
	t.Parallel()
	created := outbox.Event("shop.order.created.v1", "Order", orderCreated.AggregateID)
	_, err := outbox.NewRegistry("commerce-api", created,
		outbox.Event("shop.order.created.v1", "Order", orderCanceled.AggregateID))
	requireRefused(t, err, outbox.ErrDuplicate, refusal{"shop.order.created.v1", 1, "event_type"})

	_, err = outbox.NewRegistry("commerce-api", created,
		outbox.Event("shop.order.created.v2", "Order", orderCreated.AggregateID))
	requireRefused(t, err, outbox.ErrDuplicate, refusal{"shop.order.created.v2", 1, "event"})
	require.ErrorContains(t, err, "itest.orderCreated")
	require.ErrorContains(t, err, "shop.order.created.v1", "as which it is registered")

	_, err = outbox.NewRegistry("commerce-api", created, created)
	require.ErrorIs(t, err, outbox.ErrDuplicate)
}

var badSources = []struct {
	name, source string
	want         error
}{
	{"empty", "", outbox.ErrEmpty},
	{"with NUL", "a\x00", outbox.ErrNUL},
	{"not UTF-8", "a\xff", outbox.ErrUTF8},
	{"no URI reference", "commerce api", outbox.ErrMalformed},
	{"with a line break", "commerce-api\n", outbox.ErrMalformed},
	{"with letters that a URI has to escape", "서비스", outbox.ErrMalformed},
	{"with signs that a URI has to escape", `a"b<c>{d}`, outbox.ErrMalformed},
	{"that others print otherwise", "HTTP://shop/", outbox.ErrMalformed},
	{"of an empty fragment", "#", outbox.ErrMalformed},
	{"of 101 characters", strings.Repeat("本", 101), outbox.ErrTooLong},
}

func TestBadSource(t *testing.T) {
	t.Parallel()
	for _, tt := range badSources {
		t.Run(tt.name, func(t *testing.T) {
			_, err := outbox.NewRegistry(tt.source)
			requireRefused(t, err, tt.want, refusal{"", -1, "source"})
		})
	}
}

func TestFieldErrorText(t *testing.T) {
	t.Parallel()
	require.EqualError(t, &outbox.FieldError{EventType: "shop.order.created.v1", Index: 2, Field: "aggregate_id", Err: outbox.ErrEmpty},
		"outbox: event 2 (shop.order.created.v1): aggregate_id is empty")
	require.EqualError(t, &outbox.FieldError{EventType: "shop.order.created.v1", Index: -1, Field: "headers", Err: outbox.ErrMalformed},
		"outbox: shop.order.created.v1: headers is malformed")
	require.EqualError(t, &outbox.FieldError{Index: -1, Field: "tx", Err: outbox.ErrNilArgument}, "outbox: tx must not be nil")
}

// refusal has the fields of a FieldError except its reason.
type refusal struct {
	eventType string
	index     int
	field     string
}

// requireRefused requires a FieldError that says so and is want.
func requireRefused(t *testing.T, err, want error, says refusal) {
	t.Helper()
	require.ErrorIs(t, err, want)
	rejected, ok := errors.AsType[*outbox.FieldError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, says, refusal{rejected.EventType, rejected.Index, rejected.Field})
}

// The second segment of an event type names its topic, unless the type was
// registered with one of its own.
func ExampleRegistry_Topic() {
	events, err := outbox.NewRegistry("commerce-api",
		outbox.Event("loopers.order.created.v1", "Order", orderCreated.AggregateID),
		outbox.Event("loopers.product.viewed.v1", "Product", productViewed.AggregateID).Topic("product-view-events"),
	)
	if err != nil {
		panic(err)
	}
	for _, eventType := range append(events.Types(), "loopers.order.lost.v1") {
		topic, err := events.Topic(eventType)
		if errors.Is(err, outbox.ErrUnregistered) {
			topic = err.Error()
		}
		fmt.Println(topic)
	}
	// Output:
	// order-events
	// product-view-events
	// outbox: loopers.order.lost.v1: event_type is not registered
}
