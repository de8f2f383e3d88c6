package outboxtest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

// consumer returns one of the fixture with these handlers, and a table to work on.
func (h *schemaFixture) consumer(t testing.TB, handlers ...outbox.Handler) *outbox.Consumer {
	t.Helper()
	h.exec(t, `CREATE TABLE IF NOT EXISTS {s}.sales (cents bigint NOT NULL)`)
	c, err := outbox.NewConsumer(h.db, nil, h.events, "sales", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: h.schema}}, handlers...)
	require.NoError(t, err)
	return c
}

// sell is a handler that is done once for each event.
func (h *schemaFixture) sell(ctx context.Context, tx pgx.Tx, e orderPlaced, _ outbox.Metadata) error {
	_, err := tx.Exec(ctx, `INSERT INTO `+h.table("sales")+` VALUES ($1)`, e.Cents)
	return err
}

func (h *schemaFixture) sales(t testing.TB) (cents int64) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(background, `SELECT coalesce(sum(cents), 0)::bigint FROM `+h.table("sales")).Scan(&cents))
	return cents
}

func TestDeliver(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	c := h.consumer(t, outbox.Handle("SOLD", h.sell))
	event := orderPlaced{ID: "1", Cents: 5, At: noon}
	require.NoError(t, outboxtest.Deliver(background, t, c, h.events, event))
	require.EqualValues(t, 5, h.sales(t), "and it is committed")
	require.NoError(t, outboxtest.Deliver(background, t, c, h.events, &event))
	require.EqualValues(t, 10, h.sales(t), "the same again is another event")
	require.NoError(t, outboxtest.DeliverTwice(background, t, c, h.events, event))
	require.EqualValues(t, 15, h.sales(t), "one that arrives twice is one")
}

// A handler gets the Metadata that it would get of an event from Kafka.
func TestDeliverMetadata(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	var events []parcelSent
	var received []outbox.Metadata
	var correlation string
	c, err := outbox.NewConsumer(nil, nil, h.events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.HandleNoTx("NOTED", func(ctx context.Context, e parcelSent, m outbox.Metadata) error {
			events, received, correlation = append(events, e), append(received, m), outbox.CorrelationID(ctx)
			return nil
		}))
	require.NoError(t, err)
	ctx := outbox.WithCorrelationID(background, "corr-1")
	require.NoError(t, outboxtest.DeliverTwice(ctx, t, c, h.events, parcelSent{"7", noon}))
	require.Equal(t, []parcelSent{{Number: "7"}, {Number: "7"}}, events)
	require.Equal(t, "corr-1", correlation)
	require.Equal(t, received[0].ID, received[1].ID, "it is the same event")
	require.Less(t, received[0].Kafka.Offset, received[1].Kafka.Offset, "that arrives again")
	m := received[0]
	require.NotEmpty(t, m.ID)
	require.True(t, noon.Equal(m.Time))
	require.Equal(t, []string{"shop", "acme.parcel.sent.v1", "7", "application/x-parcel", "parcel-events", "7"},
		[]string{m.Source, m.Type, m.Subject, m.ContentType, m.Kafka.Topic, string(m.Kafka.Key)})
	require.Equal(t, "Parcel", m.Extensions["aggregatetype"])
}

var errDeclined = errors.New("declined")

// The test gets the error of a handler, whose changes are rolled back.
func TestDeliverReturnsTheError(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	calls := 0
	c := h.consumer(t, outbox.Handle("SOLD", func(ctx context.Context, tx pgx.Tx, e orderPlaced, m outbox.Metadata) error {
		calls++
		return errors.Join(h.sell(ctx, tx, e, m), errDeclined)
	}))
	require.ErrorIs(t, outboxtest.Deliver(background, t, c, h.events, orderPlaced{ID: "1", Cents: 5, At: noon}), errDeclined)
	require.Equal(t, 1, calls)
	require.ErrorIs(t, outboxtest.DeliverTwice(background, t, c, h.events, orderPlaced{ID: "1", Cents: 5, At: noon}), errDeclined)
	require.Equal(t, 2, calls, "not a second time after an error")
	require.Zero(t, h.sales(t))
}

// A handler that is not idempotent is found out.
func TestDeliverTwiceBites(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	c := h.consumer(t, outbox.HandleNoTx("SOLD", func(ctx context.Context, e orderPlaced, m outbox.Metadata) error {
		return pgx.BeginFunc(ctx, h.db, func(tx pgx.Tx) error { return h.sell(ctx, tx, e, m) })
	}))
	require.NoError(t, outboxtest.DeliverTwice(background, t, c, h.events, orderPlaced{ID: "1", Cents: 5, At: noon}))
	require.EqualValues(t, 10, h.sales(t))
}
