package protobuf_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/protobuf"
	"github.com/outboxgo/outbox/examples/protobuf/shoppb"
	"github.com/outboxgo/outbox/internal/testenv"
)

var anOrder = protobuf.OrderCreated{OrderCreated: &shoppb.OrderCreated{
	OrderId: 17, UserId: 4, TotalAmount: 34_80,
	Items:     []*shoppb.Item{{ProductId: 8, Quantity: 2, Price: 19_90}, {ProductId: 1 << 40, Quantity: 1, Price: -5_00}},
	CreatedAt: timestamppb.New(time.Date(2026, 5, 4, 12, 30, 0, 250_000_000, time.UTC)),
}}

// The message that is recorded is the one that a handler gets, in both modes.
func TestThroughKafka(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]outbox.Mode{"binary": outbox.Binary, "structured": outbox.Structured} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
			defer cancel()
			db, schema := testenv.Schema(t)
			require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema}))
			topic, kafka := "test-"+uuid.NewString(), testenv.KafkaOpts(testenv.RealBrokers(t))
			events, err := outbox.NewRegistry("test", protobuf.Orders().Topic(topic))
			require.NoError(t, err)
			rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
			require.NoError(t, err)
			require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, anOrder) }))
			relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{Schema: schema, Mode: mode})
			require.NoError(t, err)
			defer testenv.Run(t, relay.Run)()

			type arrival struct {
				event protobuf.OrderCreated
				about outbox.Metadata
			}
			arrived := make(chan arrival, 1)
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: schema, From: outbox.FromStart}}
			c, err := outbox.NewConsumer(db, kafka, events, topic, cfg, outbox.Handle("SEEN",
				func(_ context.Context, _ pgx.Tx, e protobuf.OrderCreated, about outbox.Metadata) error {
					arrived <- arrival{e, about}
					return nil
				}))
			require.NoError(t, err)
			defer testenv.Run(t, c.Run)()
			select {
			case got := <-arrived:
				require.True(t, proto.Equal(anOrder, got.event), "%v", got.event)
				require.Equal(t, "application/protobuf", got.about.ContentType)
				require.Equal(t, "17", got.about.Subject)
			case <-ctx.Done():
				require.Fail(t, "nothing was handled")
			}
		})
	}
}
