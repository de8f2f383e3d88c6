package itest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An event with options is stored with what they say, and the rest is as for all of its type;
// by one statement, by several rows of one, and by COPY.
func TestEventOptions(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("post-office",
		outbox.Event(parcelSent, "Parcel", parcel.Number).Attribute("schemaversion", func(parcel) string { return "1" }).Attribute("to", parcel.To),
		outbox.Event(rawSent, "Raw", rawParcel.Number).Topic("raw").Key(rawParcel.To).Codec(rawCodec),
	)
	require.NoError(t, err)
	c := newCounter(t, events)
	rec := c.recorder(t, outbox.RecorderConfig{Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string {
		return map[string]string{"tenant": "all", "kind": fmt.Sprintf("%T", e)}
	}})
	addressed := parcel{ID: "1", Address: "KR", Sent: noon}
	attributes, headers := map[string]string{"market": "KRW-BTC", "schemaversion": "2", "to": ""}, map[string]string{"tenant": "own"}
	id := uuid.New()
	own := func(n int) outbox.DomainEvent {
		return outbox.With(&addressed, outbox.EventOptions{ID: uuid.UUID{15: byte(n)}, Topic: "own", Key: "k", Attributes: attributes, Headers: headers})
	}
	for n, add := range []func(tx pgx.Tx) error{
		func(tx pgx.Tx) error { return rec.Record(background, tx, own(1)) },
		func(tx pgx.Tx) error { return rec.Record(background, tx, own(2), addressed) },
		func(tx pgx.Tx) error {
			all := make([]outbox.DomainEvent, 500)
			for i := range all {
				all[i] = addressed
			}
			all[0] = own(3)
			return rec.Record(background, tx, all...)
		},
		func(tx pgx.Tx) error {
			var batch pgx.Batch
			return errors.Join(rec.Queue(background, &batch, own(4)), tx.SendBatch(background, &batch).Close())
		},
	} {
		require.NoError(t, pgx.BeginFunc(background, c.db, add))
		var topic, key string
		var stored map[string]string
		require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT topic, partition_key, headers FROM {s}.outbox WHERE event_id = $1`), uuid.UUID{15: byte(n + 1)}).Scan(&topic, &key, &stored))
		require.Equal(t, []string{"own", "k"}, []string{topic, key})
		require.Equal(t, map[string]string{"ce_market": "KRW-BTC", "ce_schemaversion": "2", "tenant": "own", "kind": "itest.parcel"}, stored)
	}
	var others int
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox WHERE topic IS NULL AND partition_key IS NULL
		AND headers = '{"ce_schemaversion": "1", "ce_to": "KR", "tenant": "all", "kind": "itest.parcel"}'`)).Scan(&others))
	require.Equal(t, 500, others, "events beside it are as usual")
	var small int
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox WHERE size < octet_length(payload::text) + octet_length(headers::text)`)).Scan(&small))
	require.Zero(t, small, "sizes have attributes in them")

	r, err := rec.KafkaRecord(background, outbox.With(raw("key", []byte("x")), outbox.EventOptions{ID: id, Attributes: map[string]string{"market": "X"}}))
	require.NoError(t, err)
	require.Equal(t, []string{"raw", "key", id.String(), "X"}, []string{r.Topic, string(r.Key), eventIDOf(r), deadLetterHeaders(r)["ce_market"]}, "what is zero is as for the type")
}

// Options are taken over when they are given, and new ones replace what they say.
func TestEventOptionsOfOptions(t *testing.T) {
	t.Parallel()
	attributes := map[string]string{"a": "1", "b": "1"}
	first := outbox.With(good, outbox.EventOptions{Topic: "first", Key: "first", Attributes: attributes})
	attributes["a"] = "changed"
	event := outbox.With(first, outbox.EventOptions{Topic: "second", Attributes: map[string]string{"b": "2"}, Headers: map[string]string{"h": "2"}})
	inner, options := outbox.Unwrap(event)
	require.Equal(t, good, inner)
	require.Equal(t, outbox.EventOptions{Topic: "second", Key: "first", Attributes: map[string]string{"a": "1", "b": "2"}, Headers: map[string]string{"h": "2"}}, options)
	require.Equal(t, noon, event.OccurredAt())
	options.Attributes["a"] = "changed"
	_, options = outbox.Unwrap(event)
	require.Equal(t, "1", options.Attributes["a"])
	inner, options = outbox.Unwrap(good)
	require.Equal(t, good, inner)
	require.Zero(t, options)
	require.Zero(t, outbox.With(nil, outbox.EventOptions{}).OccurredAt(), "Record refuses it")
}

// What options cannot say is refused before anything is written.
func TestRecordRefusesOptions(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	attribute := func(name, value string) outbox.EventOptions {
		return outbox.EventOptions{Attributes: map[string]string{name: value}}
	}
	for _, tt := range []struct {
		name    string
		options outbox.EventOptions
		field   string
		want    error
	}{
		{"a topic that is none", outbox.EventOptions{Topic: "a b"}, "topic", outbox.ErrMalformed},
		{"a topic of dots", outbox.EventOptions{Topic: ".."}, "topic", outbox.ErrMalformed},
		{"a topic that is too long", outbox.EventOptions{Topic: strings.Repeat("x", 250)}, "topic", outbox.ErrMalformed},
		{"a key that is too long", outbox.EventOptions{Key: strings.Repeat("x", 256)}, "partition_key", outbox.ErrTooLong},
		{"a key with NUL", outbox.EventOptions{Key: "\x00"}, "partition_key", outbox.ErrNUL},
		{"a reserved header", outbox.EventOptions{Headers: map[string]string{"ce_own": "1"}}, "headers", outbox.ErrMalformed},
		{"an attribute without a name", attribute("", "1"), "attributes", outbox.ErrEmpty},
		{"an attribute with capitals", attribute("schemaVersion", "1"), "attributes", outbox.ErrMalformed},
		{"an attribute with a prefix", attribute("ce_market", "1"), "attributes", outbox.ErrMalformed},
		{"an attribute that is not ASCII", attribute("märkt", "1"), "attributes", outbox.ErrMalformed},
		{"an attribute with a line break", attribute("market", "a\nb"), "attributes", outbox.ErrMalformed},
		{"an attribute that is not UTF-8", attribute("market", badText), "attributes", outbox.ErrUTF8},
		{"an attribute with NUL", attribute("market", "\x00"), "attributes", outbox.ErrNUL},
		{"attributes that are too large", attribute("market", strings.Repeat("x", 8<<10)), "headers", outbox.ErrTooLarge},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.requireRefused(t, background, c.rec, tt.want, refusal{parcelSent, 1, tt.field}, good, outbox.With(good, tt.options))
		})
	}
	for _, name := range []string{
		"id", "source", "specversion", "type", "subject", "time", "datacontenttype", "dataschema", "data", "aggregatetype", "correlationid", "traceid", "traceparent",
	} {
		c.requireRefused(t, background, c.rec, outbox.ErrMalformed, refusal{parcelSent, 0, "attributes"}, outbox.With(good, attribute(name, "1")))
		err := c.rec.Queue(background, &pgx.Batch{}, outbox.With(good, attribute(name, "1")))
		require.ErrorContains(t, err, `"`+name+`"`)
		require.ErrorContains(t, err, "reserved")
		_, err = outbox.NewRegistry("s", outbox.Event(parcelSent, "Parcel", parcel.Number).Attribute(name, parcel.To))
		require.ErrorContains(t, err, `"`+name+`"`)
	}
	c.requireRefused(t, background, c.rec, outbox.ErrNilArgument, refusal{"<nil>", 0, "event"}, outbox.With(nil, outbox.EventOptions{Topic: "t"}))
	c.requireRefused(t, background, c.rec, outbox.ErrUnregistered, refusal{"itest.strayParcel", 0, "event"}, outbox.With(strayParcel{good}, outbox.EventOptions{Topic: "t"}))
	c.requireRefused(t, outbox.WithTraceID(background, strings.Repeat("x", 256)), c.rec, outbox.ErrTooLong, refusal{parcelSent, 0, "trace_id"}, good)
}

// Attributes of a type are checked when the registry is made.
func TestRegistryRefusesAttributes(t *testing.T) {
	t.Parallel()
	event := outbox.Event(parcelSent, "Parcel", parcel.Number)
	for want, e := range map[error]outbox.Definition{
		outbox.ErrMalformed:   event.Attribute("ownerId", parcel.To),
		outbox.ErrNilArgument: event.Attribute("ownerid", nil),
		outbox.ErrDuplicate:   event.Attribute("ownerid", parcel.To).Attribute("ownerid", parcel.To),
		outbox.ErrEmpty:       event.Attribute("", parcel.To),
	} {
		_, err := outbox.NewRegistry("s", e)
		rejected, is := errors.AsType[*outbox.FieldError](err)
		require.True(t, is)
		require.ErrorIs(t, err, want)
		require.Equal(t, []any{"attributes", 0, parcelSent}, []any{rejected.Field, rejected.Index, rejected.EventType})
	}
	_, err := outbox.NewRegistry("s", event)
	require.NoError(t, err, "definitions are not changed")
}

// Hooks of a recorder get what Record was given.
func TestRecordingSeesOptions(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	var seen []outbox.DomainEvent
	rec := c.recorder(t, outbox.RecorderConfig{Hooks: outbox.RecorderHooks{Recording: func(ctx context.Context, events []outbox.DomainEvent) (context.Context, func(error)) {
		seen = events
		return ctx, func(error) {}
	}}})
	c.commit(t, background, rec, outbox.With(good, outbox.EventOptions{Topic: "own"}))
	inner, options := outbox.Unwrap(seen[0])
	require.Equal(t, good, inner)
	require.Equal(t, "own", options.Topic)
}

// arrivals are what handlers were told.
type arrivals struct {
	mu   sync.Mutex
	seen []outbox.Metadata
	ids  []string // trace ids of their contexts
}

func (a *arrivals) add(ctx context.Context, m outbox.Metadata) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seen, a.ids = append(a.seen, m), append(a.ids, outbox.TraceID(ctx))
	return len(a.seen)
}

func (a *arrivals) await(t testing.TB, n int) ([]outbox.Metadata, []string) {
	t.Helper()
	require.Eventually(t, func() bool { a.mu.Lock(); defer a.mu.Unlock(); return len(a.seen) >= n }, testenv.Patience, 5*time.Millisecond)
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.seen, a.ids
}

var traded = outbox.EventOptions{Attributes: map[string]string{"market": "KRW-BTC", "ownerid": "주문 7"}, Headers: map[string]string{"Tenant": "a\n"}}

// What an event carries reaches the handler from a topic of its own, in both modes: at once, after the
// event was parked, and when it was sent back.
func TestConsumerGetsHeaders(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.Binary, outbox.Structured} {
		s := newConsumerFixture(t, 1)
		own := s.topic + "-own"
		testenv.CreateTopic(t, s.brokers, own, 1)
		testenv.CreateTopic(t, s.brokers, own+".dlq", 1)
		relayed := quick
		relayed.Mode, relayed.IDHeader, relayed.TraceHeader = mode, "event-id", "x-trace-id"
		testenv.Run(t, s.relay(t, relayed).Run)
		options := traded
		options.Topic, options.Key, options.ID = own, "own key", uuid.New()
		ctx := outbox.WithTraceID(background, "trace-1")
		require.NoError(t, pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error { return s.rec.Record(ctx, tx, outbox.With(sale{Product: "p"}, options)) }))

		var got arrivals
		c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Topics: []string{own}, From: outbox.FromStart}},
			outbox.Handle("COUNTED", func(ctx context.Context, _ pgx.Tx, _ sale, m outbox.Metadata) error {
				if got.add(ctx, m) == 1 {
					return errTest
				}
				return nil
			}))
		require.Equal(t, []string{s.topic, own}, c.Topics())
		testenv.Run(t, c.Run)
		seen, ids := got.await(t, 2)
		require.Equal(t, []string{"trace-1", "trace-1"}, ids)
		for n, m := range seen {
			require.Equal(t, map[string][]string{"Tenant": {"a\n"}, "event-id": {options.ID.String()}, "x-trace-id": {"trace-1"}}, m.Headers)
			require.Equal(t, map[string]string{"market": "KRW-BTC", "ownerid": "주문 7", "traceid": "trace-1", "aggregatetype": "Product"}, m.Extensions)
			require.Equal(t, []any{options.ID.String(), own, "own key", n + 1}, []any{m.ID, m.Topic(), m.Key(), m.Attempt})
			require.Equal(t, "a\n", m.Header("tenant"))
			require.Empty(t, m.Header("market"))
		}
		r := readAll(t, s.brokers, own, 1)[0]
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: outbox.ReplayOf, Value: []byte(own + "-0-0")}, kgo.RecordHeader{Key: "dlq_error", Value: []byte("x")})
		again := s.consumer(t, outbox.ConsumerConfig{}, outbox.Handle("AGAIN", func(ctx context.Context, _ pgx.Tx, _ sale, m outbox.Metadata) error {
			got.add(ctx, m)
			return nil
		}))
		require.NoError(t, again.Deliver(background, r))
		seen, _ = got.await(t, 3)
		require.Equal(t, seen[0].Headers, seen[2].Headers, "without those of dead letters and replays")
	}
}

// A worker tells handlers what the record would have said.
func TestWorkerGetsHeaders(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var got arrivals
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Topics: []string{"own"}, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond},
		f.effects("COUNTED", nil), outbox.HandleNoTx("SEEN", func(ctx context.Context, _ step, m outbox.Metadata) error { got.add(ctx, m); return nil }))
	options := traded
	options.Topic, options.Key = "own", "own key"
	ctx := outbox.WithTraceID(background, "trace-1")
	require.NoError(t, pgx.BeginFunc(ctx, f.db, func(tx pgx.Tx) error {
		return f.rec.Record(ctx, tx, outbox.With(step{"a", 1}, options), step{"a", 2}, outbox.With(step{"b", 3}, outbox.EventOptions{Topic: "elsewhere"}))
	}))
	seen, ids := got.await(t, 2)
	f.await(2)
	require.Len(t, seen, 2, "what goes elsewhere is for others")
	require.Equal(t, []string{"trace-1", "trace-1"}, ids)
	for _, m := range seen {
		if m.Topic() == "bank-events" || m.Topic() == "account-events" {
			require.Empty(t, m.Headers)
			continue
		}
		require.Equal(t, []string{"own", "own key"}, []string{m.Topic(), m.Key()})
		require.Equal(t, map[string][]string{"Tenant": {"a\n"}}, m.Headers)
		require.Equal(t, "KRW-BTC", m.Extensions["market"])
	}
}

// Headers of other producers come as they are, in their order, whatever bytes they hold.
func TestForeignHeaders(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var got arrivals
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", func(ctx context.Context, _ pgx.Tx, _ sale, m outbox.Metadata) error {
		got.add(ctx, m)
		return nil
	}))
	testenv.Run(t, c.Run)
	r := s.saleRecord(uuid.NewString(), []byte(`{"product": "p", "amount": 1}`))
	for _, h := range [][2]string{{"route", "a"}, {"", "nameless"}, {"Route", "c"}, {"route", "b\xff\x00"}, {"Content-Type", "application/json"}, {"CE_market", "X"}, {"empty", ""}} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
	}
	s.send(t, r)
	seen, _ := got.await(t, 1)
	require.Equal(t, map[string][]string{"route": {"a", "b\xff\x00"}, "Route": {"c"}, "": {"nameless"}, "empty": {""}}, seen[0].Headers)
	require.Equal(t, "X", seen[0].Extensions["market"])
	require.Equal(t, []string{"b\xff\x00", "c", "", ""}, []string{seen[0].Header("route"), seen[0].Header("Route"), seen[0].Header("none"), seen[0].Header("Market")})
	require.Equal(t, "b\xff\x00", seen[0].Header("ROUTE"), "always the same one")
}

var foreignTraces = []struct {
	name    string
	headers []string
	want    string
}{
	{"none", nil, ""},
	{"x-trace-id", []string{"x-trace-id", "t1"}, "t1"},
	{"X-Trace-ID", []string{"X-Trace-ID", "t1"}, "t1"},
	{"traceid", []string{"traceid", "t1"}, "t1"},
	{"TraceId", []string{"TraceId", "t1"}, "t1"},
	{"both", []string{"X-TRACE-ID", "t2", "traceid", "t1"}, "t1"},
	{"one that could not be recorded", []string{"x-trace-id", "a\nb"}, ""},
	{"one that could not be recorded, and one that could", []string{"x-trace-id", strings.Repeat("x", 256), "traceid", "t1"}, "t1"},
	{"one that is no text", []string{"x-trace-id", "\xff"}, ""},
}

// A trace id of another producer becomes that of the handler's context, and of what it records.
func TestForeignTraceID(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var got arrivals
	handle := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, _ sale, m outbox.Metadata) error {
		got.add(ctx, m)
		return s.rec.Record(ctx, tx, sale{Product: "follows"})
	})
	for _, connect := range []bool{false, true} {
		plain := s.consumer(t, outbox.ConsumerConfig{Decode: outbox.PlainRecords{Type: saleType, Connect: connect}.Decode}, handle)
		for _, tt := range foreignTraces {
			r := s.saleRecord(uuid.NewString(), []byte(`{"product": "p", "amount": 1}`))
			external := &kgo.Record{Topic: s.topic, Key: []byte("k"), Value: r.Value, Timestamp: time.Now(), Headers: []kgo.RecordHeader{{Key: "id", Value: []byte(uuid.NewString())}}}
			for i := 0; i < len(tt.headers); i += 2 {
				h := kgo.RecordHeader{Key: tt.headers[i], Value: []byte(tt.headers[i+1])}
				r.Headers = append(r.Headers, h)
				if text, err := json.Marshal(tt.headers[i+1]); connect && err == nil && tt.name != "one that is no text" {
					h.Value = text // as a converter of Kafka Connect writes it
				}
				external.Headers = append(external.Headers, h)
			}
			for _, one := range []*kgo.Record{r, external} {
				require.NoError(t, plain.Deliver(background, one), tt.name)
				seen, ids := got.await(t, 1)
				require.Equal(t, []string{tt.want, tt.want}, []string{ids[len(ids)-1], seen[len(seen)-1].Extensions["traceid"]}, tt.name)
				var recorded *string
				require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT headers ->> 'ce_traceid' FROM {s}.outbox ORDER BY id DESC LIMIT 1`)).Scan(&recorded))
				assert.Equal(t, tt.want != "", recorded != nil)
			}
		}
	}
}

// A CloudEvent whose id is where other outboxes and Debezium put it is read all the same.
func TestForeignEventID(t *testing.T) {
	t.Parallel()
	attributes := []string{"ce_specversion", "1.0", "ce_source", "/s", "ce_type", "t"}
	for want, more := range map[string][]string{
		"e1": {"id", "e2", "Event-ID", "e1"}, "e2": {"id", "e2"}, "e3": {"ce_id", "e3", "event-id", "e1"},
	} {
		m, err := outbox.DecodeCloudEvent(externalRecord(`{"a": 1}`, append(more, attributes...)...))
		require.NoError(t, err)
		require.Equal(t, want, m.ID)
		require.False(t, m.ByPosition)
	}
	_, err := outbox.DecodeCloudEvent(externalRecord(`{"a": 1}`, attributes...))
	require.ErrorIs(t, err, outbox.ErrEmpty)
}

// A resolver replaces the convention for types that have no topic, and the rows have what it said.
func TestResolveTopics(t *testing.T) {
	t.Parallel()
	const completed = "io.hhplus.ecommerce.order.completed"
	resolve := outbox.ResolveTopics(func(eventType string) (string, error) {
		parts := strings.Split(eventType, ".")
		if len(parts) < 2 {
			return "", errTest
		}
		if parts[0] != "io" {
			return "", nil // as by convention
		}
		return strings.Join(parts[len(parts)-3:len(parts)-1], "."), nil
	})
	definitions := []outbox.Definition{
		outbox.Event(completed, "Order", parcel.Number),
		outbox.Event(rawSent, "Raw", rawParcel.Number).Topic("raw").Codec(rawCodec),
		outbox.Event("test.map.sent.v1", "Map", mapParcel.Number),
		resolve,
	}
	events, err := outbox.NewRegistry("/order-service", definitions...)
	require.NoError(t, err)
	topics := map[string]string{}
	for _, r := range events.Registrations() {
		topics[r.EventType] = r.Topic
	}
	require.Equal(t, map[string]string{completed: "ecommerce.order", rawSent: "raw", "test.map.sent.v1": "map-events"}, topics)
	c := newCounter(t, events)
	c.commit(t, background, c.rec, good, raw("k", nil), mapParcel{"id": "1"})
	stored := map[string]*string{}
	for _, r := range c.rows(t) {
		stored[r.EventType] = r.Topic
	}
	require.True(t, maps.EqualFunc(stored, map[string]*string{completed: new("ecommerce.order"), rawSent: new("raw"), "test.map.sent.v1": nil},
		func(a, b *string) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }))
	consumer, err := outbox.NewConsumer(c.db, nil, events, "g", outbox.ConsumerConfig{},
		outbox.HandleNoTx("SEEN", func(context.Context, parcel, outbox.Metadata) error { return nil }))
	require.NoError(t, err)
	require.Equal(t, []string{"ecommerce.order"}, consumer.Topics())

	for want, bad := range map[error][]outbox.Definition{
		outbox.ErrNilArgument: {outbox.ResolveTopics(nil)},
		outbox.ErrDuplicate:   {resolve, resolve},
		errTest:               {resolve, outbox.Event("LEDGER_POSTED", "Ledger", parcel.Number)},
		outbox.ErrMalformed:   {outbox.ResolveTopics(func(string) (string, error) { return "a b", nil }), outbox.Event(parcelSent, "Parcel", parcel.Number)},
	} {
		_, err := outbox.NewRegistry("s", bad...)
		rejected, is := errors.AsType[*outbox.FieldError](err)
		require.True(t, is)
		require.ErrorIs(t, err, want)
		require.Equal(t, "topic", rejected.Field)
	}
}

// An event without a handler is dead at once, if that is asked for, and the reason names its type.
func TestUnknownTypeIsDead(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	events, err := outbox.NewRegistry("bank", outbox.Event("bank.account.closed.v1", "Account", oldStep.owner).Topic("account-events"))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Unknown: outbox.DeadLetterUnknown, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}, f.effects("COUNTED", nil))
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return rec.Record(t.Context(), tx, oldStep{Owner: "a"}) }))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 0 AND last_error_code = 'unknown_type'
		AND last_error_message = 'no handler of the group takes events of type bank.account.closed.v1'`, 1)
}

// Topics are checked like all else.
func TestRefusedTopics(t *testing.T) {
	t.Parallel()
	events := parcels(t)
	handler := outbox.HandleNoTx("SEEN", func(context.Context, parcel, outbox.Metadata) error { return nil })
	for _, topic := range []string{"", "a b", ".."} {
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Topics: []string{"fine", topic}, From: outbox.FromStart}}
		_, err := outbox.NewConsumer(nil, nil, events, "g", cfg, handler)
		require.ErrorIs(t, err, outbox.ErrMalformed)
		require.ErrorContains(t, err, "field Topics")
	}
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Topics: []string{"b", "parcel-events", "b"}, From: outbox.FromStart}}
	c, err := outbox.NewConsumer(nil, nil, events, "g", cfg, handler)
	require.NoError(t, err)
	require.Equal(t, []string{"b", "parcel-events"}, c.Topics())
	cfg.Topics = []string{"parcel-events.dlq"}
	_, err = outbox.NewConsumer(nil, nil, events, "g", cfg, handler)
	require.ErrorContains(t, err, "which this consumer reads")
	_, err = outbox.NewRelay(nil, nil, outbox.RelayConfig{IDHeader: "a", TraceHeader: "A"})
	require.ErrorContains(t, err, "IDHeader and TraceHeader")
	for _, relay := range []outbox.RelayConfig{{IDHeader: "ce_id"}, {TraceHeader: "traceparent"}, {IDHeader: "a\x00"}} {
		_, err := outbox.NewRelay(nil, nil, relay)
		require.ErrorContains(t, err, "Header is ")
	}
}
