package protobuf_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/protobuf"
	"github.com/outboxgo/outbox/examples/protobuf/shoppb"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

var (
	anOrder = protobuf.OrderCreated{
		OrderID: 17, UserID: 4,
		Items:     []protobuf.Item{{ProductID: 8, Quantity: 2, Price: 19_90}, {ProductID: 1 << 40, Quantity: 1, Price: -5_00}},
		CreatedAt: time.Date(2026, 5, 4, 12, 30, 0, 250_000_000, time.UTC),
	}
	// itsMessage is anOrder as the author of the .proto would say it.
	itsMessage = &shoppb.OrderCreated{
		OrderId: 17, UserId: 4, TotalAmount: 34_80,
		Items:     []*shoppb.Item{{ProductId: 8, Quantity: 2, Price: 19_90}, {ProductId: 1 << 40, Quantity: 1, Price: -5_00}},
		CreatedAt: timestamppb.New(time.Date(2026, 5, 4, 12, 30, 0, 250_000_000, time.UTC)),
	}
)

// In binary mode the value of the record is the message and nothing else.
func TestBinary(t *testing.T) {
	t.Parallel()
	record, eventID := throughKafka(t, outbox.Binary)
	require.Equal(t, "application/protobuf", header(record, "content-type"))
	require.Equal(t, "loopers.order.created.v1", header(record, "ce_type"))
	require.Equal(t, eventID, header(record, "ce_id"))
	require.Equal(t, "17", header(record, "ce_subject"))
	require.Equal(t, "17", string(record.Key))
	requireOrder(t, record.Value)
}

// In structured mode the message is in data_base64, because JSON has no bytes.
func TestStructured(t *testing.T) {
	t.Parallel()
	record, eventID := throughKafka(t, outbox.Structured)
	require.Contains(t, header(record, "content-type"), "application/cloudevents+json")
	var event struct {
		ID              string          `json:"id"`
		Type            string          `json:"type"`
		DataContentType string          `json:"datacontenttype"`
		Data            json.RawMessage `json:"data"`
		DataBase64      []byte          `json:"data_base64"` // encoding/json decodes it
	}
	require.NoError(t, json.Unmarshal(record.Value, &event))
	require.Equal(t, "application/protobuf", event.DataContentType)
	require.Equal(t, "loopers.order.created.v1", event.Type)
	require.Equal(t, eventID, event.ID)
	require.Nil(t, event.Data)
	requireOrder(t, event.DataBase64)
}

// requireOrder finds in a payload the bytes of itsMessage, and in these anOrder.
func requireOrder(t *testing.T, payload []byte) {
	t.Helper()
	want, err := proto.MarshalOptions{Deterministic: true}.Marshal(itsMessage)
	require.NoError(t, err)
	require.Equal(t, want, payload)
	var decoded protobuf.OrderCreated
	require.NoError(t, protobuf.OrderCodec().Decode(t.Context(), payload, &decoded))
	require.Equal(t, anOrder, decoded)
}

// throughKafka records anOrder in a transaction, relays it, and returns the
// record that arrived and the id of the event in the table.
func throughKafka(t *testing.T, mode outbox.Mode) (*kgo.Record, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema}))
	topic := "test-" + uuid.NewString()
	events, err := outbox.NewRegistry("test", protobuf.Orders().Topic(topic))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, anOrder) }))

	brokers := kgo.SeedBrokers(testenv.RealBrokers(t)...)
	relay, err := outbox.NewRelay(db, []kgo.Opt{brokers, kgo.AllowAutoTopicCreation()},
		outbox.RelayConfig{Schema: schema, Mode: mode})
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	record := first(ctx, t, brokers, topic)
	stop()
	require.Equal(t, anOrder, firstHandled(ctx, t, db, brokers, events, topic, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: schema, From: outbox.FromStart}}))
	return record, storedID(ctx, t, db, schema)
}

// firstHandled returns the first order that a consumer passes to its handler.
func firstHandled(ctx context.Context, t *testing.T, db *pgxpool.Pool, brokers kgo.Opt, events *outbox.Registry, group string, cfg outbox.ConsumerConfig) protobuf.OrderCreated {
	t.Helper()
	orders := make(chan protobuf.OrderCreated, 1)
	c, err := outbox.NewConsumer(db, []kgo.Opt{brokers}, events, group, cfg, outbox.Handle("SEEN",
		func(_ context.Context, _ pgx.Tx, e protobuf.OrderCreated, _ outbox.Metadata) error {
			orders <- e
			return nil
		}))
	require.NoError(t, err)
	defer testenv.Run(t, c.Run)()
	select {
	case order := <-orders:
		return order
	case <-ctx.Done():
		require.Fail(t, "nothing was handled")
	}
	return protobuf.OrderCreated{}
}

// first returns the first record of a topic.
func first(ctx context.Context, t *testing.T, brokers kgo.Opt, topic string) *kgo.Record {
	t.Helper()
	client, err := kgo.NewClient(brokers, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(t, err)
	defer client.Close()
	for {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "nothing arrived")
		if records := fetches.Records(); len(records) > 0 {
			require.Len(t, records, 1)
			return records[0]
		}
	}
}

func storedID(ctx context.Context, t *testing.T, db *pgxpool.Pool, schema string) (id string) {
	t.Helper()
	sql := "SELECT event_id::text FROM " + pgx.Identifier{schema, "outbox"}.Sanitize()
	require.NoError(t, db.QueryRow(ctx, sql).Scan(&id))
	return id
}

func header(record *kgo.Record, name string) string {
	for _, h := range record.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// ticket is not an order.
type ticket struct{}

func TestCodecRefuses(t *testing.T) {
	t.Parallel()
	_, err := protobuf.OrderCodec().Encode(t.Context(), ticket{})
	require.ErrorContains(t, err, "protobuf_test.ticket")
	require.ErrorContains(t, protobuf.OrderCodec().Decode(t.Context(), nil, &ticket{}), "protobuf_test.ticket")

	kept := anOrder
	require.Error(t, protobuf.OrderCodec().Decode(t.Context(), []byte{0xff}, &kept), "not a message")
	require.ErrorContains(t, protobuf.OrderCodec().Decode(t.Context(), nil, &kept), "created_at", "an empty message is valid Protobuf")
	require.Equal(t, anOrder, kept, "what cannot be decoded changes nothing")
}

func TestSameEventSameBytes(t *testing.T) {
	t.Parallel()
	one, err := protobuf.OrderCodec().Encode(t.Context(), anOrder)
	require.NoError(t, err)
	for range 100 {
		again, err := protobuf.OrderCodec().Encode(t.Context(), anOrder)
		require.NoError(t, err)
		require.True(t, bytes.Equal(one, again))
	}
}

// An event goes in as a struct and comes out as one; Protobuf is in between.
func ExampleCodec() {
	ctx := context.Background()
	codec := protobuf.OrderCodec()
	payload, err := codec.Encode(ctx, protobuf.OrderCreated{
		OrderID: 17, UserID: 4, CreatedAt: time.Unix(1_800_000_000, 0),
		Items: []protobuf.Item{{ProductID: 8, Quantity: 2, Price: 19_90}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	var order protobuf.OrderCreated
	if err := codec.Decode(ctx, payload, &order); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s, %d bytes: order %d of %d cents\n", codec.ContentType, len(payload), order.OrderID, order.TotalAmount())
	// Output: application/protobuf, 24 bytes: order 17 of 3980 cents
}
