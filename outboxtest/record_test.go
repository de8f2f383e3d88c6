package outboxtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A record made for a test is the one that arrives when the event is relayed.
func TestNewRecord(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t)
	ctx := outbox.WithCorrelationID(background, "corr-1")
	event := orderPlaced{ID: "1", Cents: 5, At: noon}
	require.NoError(t, pgx.BeginFunc(ctx, h.db, func(tx pgx.Tx) error { return h.rec.Record(ctx, tx, event) }))
	h.drain(t, kafka, outbox.RelayConfig{})
	arrived := outboxtest.Records(background, t, kafka, "order-events", 1)[0]

	made := outboxtest.NewRecord(ctx, t, h.events, &event)
	require.Equal(t, arrived.Topic, made.Topic)
	require.Equal(t, arrived.Key, made.Key)
	require.JSONEq(t, string(arrived.Value), string(made.Value))
	require.Equal(t, attributes(arrived), attributes(made))
	require.Equal(t, "corr-1", attributes(made)["ce_correlationid"])
	require.WithinDuration(t, time.Now(), made.Timestamp, time.Minute)
	require.NotEqual(t, made.Headers, outboxtest.NewRecord(ctx, t, h.events, event).Headers, "each is an event of its own")
}

// attributes returns the headers of a record without the event id.
func attributes(r *kgo.Record) map[string]string {
	headers := map[string]string{}
	for _, h := range r.Headers {
		if h.Key != "ce_id" {
			headers[h.Key] = string(h.Value)
		}
	}
	return headers
}

func TestNewRecordFails(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	says := failure(t, func(f *fakeT) { outboxtest.NewRecord(background, f, h.events, strayEvent{}) })
	require.Contains(t, says, "strayEvent: event is not registered")
	says = failure(t, func(f *fakeT) { outboxtest.NewRecord(background, f, h.events, orderPlaced{At: noon}) })
	require.Contains(t, says, "aggregate_id is empty")
}

// An event that cannot come is a mistake of the test, not of the handler.
func TestDeliverFails(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	c, err := outbox.NewConsumer(nil, nil, h.events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.HandleNoTx("NOTHING", func(context.Context, orderPlaced, outbox.Metadata) error { panic("not handled") }))
	require.NoError(t, err)
	for _, deliver := range []func(context.Context, outboxtest.T, *outbox.Consumer, *outbox.Registry, outbox.DomainEvent) error{
		outboxtest.Deliver, outboxtest.DeliverTwice,
	} {
		says := failure(t, func(f *fakeT) { _ = deliver(background, f, c, h.events, strayEvent{}) })
		require.Contains(t, says, "strayEvent: event is not registered")
		says = failure(t, func(f *fakeT) { _ = deliver(background, f, c, h.events, productLiked{"1", noon}) })
		require.Contains(t, says, "outboxtest_test.productLiked goes to topic product-events, and the consumer reads [order-events]")
		require.Error(t, deliver(background, &fakeT{returns: true}, c, h.events, strayEvent{}))
	}
}

// An event that the consumer skips because it has no handler for it is a mistake of the test. Where such events are
// dead letters, the test gets their error.
func TestDeliverWithoutHandler(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	consumer := func(unknown outbox.UnknownTypes) *outbox.Consumer {
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Unknown: unknown, Topics: []string{"product-events"}}}
		c, err := outbox.NewConsumer(nil, nil, h.events, "g", cfg, outbox.HandleNoTx("SOLD", func(context.Context, orderPlaced, outbox.Metadata) error { return nil }))
		require.NoError(t, err)
		return c
	}
	skips, deadLetters := consumer(outbox.SkipUnknown), consumer(outbox.DeadLetterUnknown)
	for _, deliver := range []func(context.Context, outboxtest.T, *outbox.Consumer, *outbox.Registry, outbox.DomainEvent) error{
		outboxtest.Deliver, outboxtest.DeliverTwice,
	} {
		says := failure(t, func(f *fakeT) { _ = deliver(background, f, skips, h.events, productLiked{"1", noon}) })
		require.Contains(t, says, "outboxtest_test.productLiked has the type acme.product.liked.v1, which the consumer skips")
		require.ErrorContains(t, deliver(background, t, deadLetters, h.events, productLiked{"1", noon}), "acme.product.liked.v1")
		require.NoError(t, deliver(background, t, skips, h.events, orderPlaced{ID: "1", At: noon}))
	}
	require.Equal(t, []string{"SOLD"}, skips.Actions("acme.order.placed.v1"))
	require.Empty(t, skips.Actions("acme.product.liked.v1"))
	require.Equal(t, []string{""}, deadLetters.Actions("acme.product.liked.v1"))
}
