package itest

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

var kafkaRecordTests = []struct {
	name               string
	parcel             parcel
	correlation, trace string
	headers            map[string]string
}{
	{"plain", parcel{ID: "1", Sent: noon, Content: map[string]any{"bb": 1, "a": []int{1, 2}}}, "", "", nil},
	{"null", parcel{ID: "1", Sent: noon}, "", "", nil},
	{"nanoseconds of another zone", parcel{ID: "1", Sent: time.Date(1969, 1, 2, 3, 4, 5, 123456789, time.FixedZone("", 3600)), Content: 1}, "", "", nil},
	{"with all that ctx and the configuration add", parcel{ID: "주문 1", Sent: noon, Content: 1e21}, "corr 1", traceparent,
		map[string]string{"tenant": "é", "empty": ""}},
}

// What the tests of a consumer are given is what a relay sends, but for what jsonb
// makes of JSON.
func TestKafkaRecord(t *testing.T) {
	t.Parallel()
	topic := "test-" + uuid.NewString()
	events, err := outbox.NewRegistry("post-office",
		outbox.Event(parcelSent, "Parcel", parcel.Number).Topic(topic),
		outbox.Event(rawSent, "Raw", rawParcel.Number).Topic(topic).Key(rawParcel.To).Codec(rawCodec),
	)
	require.NoError(t, err)
	c := newCounter(t, events)
	var want []*kgo.Record
	for _, tt := range kafkaRecordTests {
		raw := rawParcel{parcel{ID: tt.parcel.ID, Address: "to " + tt.name, Sent: tt.parcel.Sent, Content: []byte(tt.name)}}
		for _, event := range []outbox.DomainEvent{tt.parcel, &raw} {
			id := uuid.New()
			rec := c.recorder(t, outbox.RecorderConfig{
				NewID:   func() (uuid.UUID, error) { return id, nil },
				Headers: func(context.Context, outbox.DomainEvent) map[string]string { return tt.headers },
			})
			ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, tt.correlation), tt.trace)
			c.commit(t, ctx, rec, event)
			record, err := rec.KafkaRecord(ctx, event)
			require.NoError(t, err, tt.name)
			want = append(want, record)
		}
	}
	require.Len(t, c.ids(t), len(want), "KafkaRecord stores nothing")
	sent := c.sent(t, topic, len(want))
	for i, want := range want {
		name, sent := kafkaRecordTests[i/2].name, sent[eventIDOf(want)]
		require.NotNil(t, sent, name)
		require.Equal(t, want.Topic, sent.Topic, name)
		require.Equal(t, string(want.Key), string(sent.Key), name)
		require.Equal(t, want.Headers, sent.Headers, name)
		if isJSON := i%2 == 0; isJSON {
			require.JSONEq(t, string(want.Value), string(sent.Value), name)
		} else {
			require.Equal(t, string(want.Value), string(sent.Value), name)
		}
	}
}

func eventIDOf(r *kgo.Record) string { return string(r.Headers[1].Value) }

// sent relays all that is committed and returns the n records of a topic, by the
// ids of their events.
func (c *counter) sent(t *testing.T, topic string, n int) map[string]*kgo.Record {
	t.Helper()
	brokers := testenv.Brokers(t)
	client, err := kgo.NewClient(append(testenv.KafkaOpts(brokers), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	cfg := quick
	cfg.Schema = c.schema
	relay, err := outbox.NewRelay(c.db, testenv.KafkaOpts(brokers), cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	records := map[string]*kgo.Record{}
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err())
		fetches.EachRecord(func(r *kgo.Record) { records[eventIDOf(r)] = r })
	}
	return records
}

func TestKafkaRecordRefuses(t *testing.T) {
	t.Parallel()
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	for _, tt := range []struct {
		event outbox.DomainEvent
		want  error
		says  refusal
	}{
		{nil, outbox.ErrNilArgument, refusal{"<nil>", -1, "event"}},
		{strayParcel{}, outbox.ErrUnregistered, refusal{"itest.strayParcel", -1, "event"}},
		{parcel{Sent: noon}, outbox.ErrEmpty, refusal{parcelSent, -1, "aggregate_id"}},
		{parcel{ID: "1"}, outbox.ErrTime, refusal{parcelSent, -1, "occurred_at"}},
	} {
		record, err := rec.KafkaRecord(background, tt.event)
		require.Nil(t, record)
		requireRefused(t, err, tt.want, tt.says)
	}
}
