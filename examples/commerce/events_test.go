package main

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
)

var eventTests = []struct {
	event            outbox.DomainEvent
	name, topic, key string
}{
	{OrderCreatedEventV1{OrderID: 7, happened: noon}, "loopers.order.created.v1", "order-events", "7"},
	{OrderPaidEventV1{OrderID: 7, happened: noon}, "loopers.order.paid.v1", "order-events", "7"},
	{OrderCanceledEventV1{OrderID: 7, happened: noon}, "loopers.order.canceled.v1", "order-events", "7"},
	{PaymentCreatedEventV1{PaymentID: 8, OrderID: 7, happened: noon}, "loopers.payment.created.v1", "payment-events", "8"},
	{PaymentPaidEventV1{PaymentID: 8, OrderID: 7, happened: noon}, "loopers.payment.paid.v1", "payment-events", "8"},
	{PaymentFailedEventV1{PaymentID: 8, OrderID: 7, happened: noon}, "loopers.payment.failed.v1", "payment-events", "8"},
	{LikeCreatedEventV1{LikeID: 9, UserID: 1, ProductID: 3, happened: noon}, "loopers.like.created.v1", "like-events", "3"},
	{LikeCanceledEventV1{LikeID: 9, UserID: 1, ProductID: 3, happened: noon}, "loopers.like.canceled.v1", "like-events", "3"},
	{ProductViewedEventV1{ProductID: 3, UserID: 1, happened: noon}, "loopers.product.viewed.v1", "product-view-events", "3"},
	{StockDepletedEventV1{ProductID: 3, happened: noon}, "loopers.stock.depleted.v1", "stock-events", "3"},
}

// What is recorded is the type, topic and key that each event is to have.
func TestHowEventsTravel(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	require.Len(t, a.events.Types(), len(eventTests))
	for _, tt := range eventTests {
		t.Run(tt.name, func(t *testing.T) {
			topic, err := a.events.Topic(tt.name)
			require.NoError(t, err)
			require.Equal(t, tt.topic, topic)

			a.record(t, tt.event)
			var key, source string
			row := a.db.QueryRow(t.Context(), `SELECT coalesce(partition_key, aggregate_id), source FROM outbox WHERE event_type = $1`, tt.name)
			require.NoError(t, row.Scan(&key, &source))
			require.Equal(t, tt.key, key)
			require.Equal(t, a.source, source)
		})
	}
}

func TestTypeWithoutADomain(t *testing.T) {
	t.Parallel()
	_, err := outbox.NewRegistry("commerce-api", outbox.Event("loopers", "Order", OrderPaidEventV1.order))
	require.ErrorIs(t, err, outbox.ErrMalformed)
}

// record commits events.
func (a *app) record(t *testing.T, events ...outbox.DomainEvent) {
	t.Helper()
	rec, err := outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: a.id})
	require.NoError(t, err)
	s := &shop{rec: rec, inTx: func(ctx context.Context, f func(pgx.Tx) error) error { return pgx.BeginFunc(ctx, a.db, f) }}
	require.NoError(t, s.commit(t.Context(), func(pgx.Tx) ([]outbox.DomainEvent, error) { return events, nil }))
}
