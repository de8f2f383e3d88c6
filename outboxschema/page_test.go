package outboxschema_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxschema"
)

// OrderPlaced says that a customer placed an order.
type OrderPlaced struct {
	OrderID  string    `json:"order_id" avro:"order_id"`
	Total    int64     `json:"total" avro:"total"`
	Currency string    `json:"currency" avro:"currency,default=EUR"`
	PlacedAt time.Time `json:"placed_at" avro:"placed_at,timestamp-micros"`
}

func (e OrderPlaced) OccurredAt() time.Time { return e.PlacedAt }
func (e OrderPlaced) AggregateID() string   { return e.OrderID }

// The steps of docs/formats.md, from JSON to Avro.
func TestFormatsPage(t *testing.T) {
	t.Parallel()
	g, s := newGate(t), newShop(t)
	ctx, topic, address := t.Context(), s.topic, g.url
	event := outbox.Event("loopers.order.placed.v1", "Order", OrderPlaced.AggregateID).Topic(topic)
	placed := OrderPlaced{OrderID: "17", Total: 34_80, Currency: "EUR", PlacedAt: noon}

	// The readers.
	client, err := sr.NewClient(sr.URLs(address))
	if err != nil {
		t.Fatal(err)
	}
	schemas := outboxschema.New(client, nil)
	format := outboxschema.Avro[OrderPlaced]()
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Codecs: []outbox.Codec{schemas.Reader(format)}}}
	arrived := make(chan OrderPlaced, 2)
	s.consume(t, "billing", registryOf(t, event), cfg, into("BILL", arrived))
	s.relay(t, outbox.Binary)
	require.NoError(t, s.record(ctx, s.recorder(t, event), placed))
	requireEvent(t, placed, await(t, arrived))

	// The schema.
	err = register(ctx, schemas, topic, format)
	require.NoError(t, err)

	// The writers.
	rec := s.recorder(t, event.Codec(schemas.Codec(topic, format)))
	require.NoError(t, s.record(ctx, rec, placed))
	requireEvent(t, placed, await(t, arrived))
}

func register(ctx context.Context, schemas *outboxschema.Registry, topic string, format outboxschema.Format) error {
	schemas.Codec(topic, format)
	return schemas.Register(ctx)
}
