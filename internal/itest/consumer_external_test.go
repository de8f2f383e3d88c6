package itest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// externalRecord is a record at orders/2, offset 17, with headers by name and value.
func externalRecord(value string, headers ...string) *kgo.Record {
	r := &kgo.Record{
		Topic: "orders", Partition: 2, Offset: 17, Key: []byte("order-1"), Value: []byte(value),
		Timestamp: time.Date(2026, 2, 3, 4, 5, 6, 789e6, time.UTC),
	}
	for i := 0; i < len(headers); i += 2 {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: headers[i], Value: []byte(headers[i+1])})
	}
	return r
}

// message is what a externalRecord says if nothing else is said.
func message(change func(*outbox.Message)) *outbox.Message {
	m := &outbox.Message{
		ID: "orders-2-17", Source: "orders", Type: "order.created", Subject: "order-1",
		Time: time.Date(2026, 2, 3, 4, 5, 6, 789e6, time.UTC), Extensions: map[string]string{}, Data: []byte(`{"a": 1}`),
	}
	if change != nil {
		change(m)
	}
	m.ByPosition = strings.HasPrefix(m.ID, "orders-")
	return m
}

type externalCase struct {
	name   string
	as     outbox.PlainRecords
	record *kgo.Record
	want   func(*outbox.Message) // nil: as message has it
}

var (
	ordersCreated = outbox.PlainRecords{Type: "order.created"}
	inMembers     = outbox.PlainRecords{IDMember: "eventId", TypeMember: "type", TimeMember: "occurredAt", DataMember: "payload"}
)

var plainTests = []externalCase{
	{"a payload and nothing else", ordersCreated, externalRecord(`{"a": 1}`), nil},
	{"a source of its own", outbox.PlainRecords{Type: "order.created", Source: "/shop"}, externalRecord(`{"a": 1}`),
		func(m *outbox.Message) { m.Source = "/shop" }},
	{"the header event-id", ordersCreated, externalRecord(`{"a": 1}`, "event-id", "e1"), func(m *outbox.Message) { m.ID = "e1" }},
	{"the header id", ordersCreated, externalRecord(`{"a": 1}`, "id", "e1"), func(m *outbox.Message) { m.ID = "e1" }},
	{"both, and capitals", ordersCreated, externalRecord(`{"a": 1}`, "id", "e2", "Event-ID", "e1"), func(m *outbox.Message) { m.ID = "e1" }},
	{"an id after which another header is no text", ordersCreated, externalRecord(`{"a": 1}`, "event-id", "e1", "id", "\xff"), func(m *outbox.Message) { m.ID = "e1" }},
	{"an id header that is empty", ordersCreated, externalRecord(`{"a": 1}`, "event-id", "", "id", "e1"), func(m *outbox.Message) { m.ID = "e1" }},
	{"the usual headers for the type, which win", ordersCreated, externalRecord(`{"a": 1}`, "eventType", "order.paid"),
		func(m *outbox.Message) { m.Type = "order.paid" }},
	{"headers with names of one's own, and the usual ones beside", outbox.PlainRecords{IDHeader: "X-Id", TypeHeader: "kind", TimeHeader: "At"},
		externalRecord(`{"a": 1}`, "x-id", "e1", "event-id", "e2", "kind", "order.paid", "at", "2026-01-02T03:04:05+01:00"), func(m *outbox.Message) {
			m.ID, m.Type, m.Time, m.Extensions = "e1", "order.paid", time.Date(2026, 1, 2, 2, 4, 5, 0, time.UTC), map[string]string{"event-id": "e2"}
		}},
	{"a time in milliseconds", ordersCreated, externalRecord(`{"a": 1}`, "event-time", "1700000000123"),
		func(m *outbox.Message) { m.Time = time.UnixMilli(1700000000123) }},
	{"the other headers", ordersCreated, externalRecord(`{"a": 1}`, "traceparent", someTraceParent, "correlationId", "c1", "b3", "\xff\x00", "subject", "x"),
		func(m *outbox.Message) {
			m.Extensions = map[string]string{"traceparent": someTraceParent, "correlationid": "c1"}
		}},
	{"members", inMembers, externalRecord(`{"eventId": "e1", "type": "order.paid", "occurredAt": "2026-01-02T03:04:05Z", "payload": {"a": 1}, "x": []}`),
		func(m *outbox.Message) {
			m.ID, m.Type, m.Time = "e1", "order.paid", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
		}},
	{"members that are numbers or null", inMembers, externalRecord(`{"eventId": 12, "type": "order.created", "occurredAt": null, "payload": {"a": 1}}`),
		func(m *outbox.Message) { m.ID = "12" }},
	{"a payload in a text, in a member", inMembers, externalRecord(`{"type": "order.created", "payload": "{\"a\": 1}"}`), nil},
	{"a header before a member, whatever that is", inMembers, externalRecord(`{"eventId": {}, "type": 1, "payload": {"a": 1}}`, "id", "e1", "event-type", "t"),
		func(m *outbox.Message) { m.ID, m.Type = "e1", "t" }},
	{"a payload in a text", ordersCreated, externalRecord(` "{\"a\": 1}" `), nil},
	{"an array in a text", ordersCreated, externalRecord(`"[1]"`), func(m *outbox.Message) { m.Data = []byte(`[1]`) }},
	{"a text that is a text", ordersCreated, externalRecord(`"a"`), func(m *outbox.Message) { m.Data = []byte(`"a"`) }},
	{"an object of schema and payload, which is the payload itself here", ordersCreated, externalRecord(`{"schema": 1, "payload": 2}`),
		func(m *outbox.Message) { m.Data = []byte(`{"schema": 1, "payload": 2}`) }},
	{"what is not JSON", ordersCreated, externalRecord("\"{\x00", "content-type", "application/protobuf"),
		func(m *outbox.Message) { m.ContentType, m.Data = "application/protobuf", []byte("\"{\x00") }},
	{"no bytes that are not JSON", ordersCreated, externalRecord("", "content-type", "application/protobuf"),
		func(m *outbox.Message) { m.ContentType, m.Data = "application/protobuf", []byte{} }},
	{"a key that is no text", ordersCreated, with(externalRecord(`{"a": 1}`), func(r *kgo.Record) { r.Key = []byte{0, 255} }),
		func(m *outbox.Message) { m.Subject = "" }},
	{"keys and headers in quotes, which are theirs", ordersCreated,
		with(externalRecord(`{"a": 1}`, "id", `"e1"`), func(r *kgo.Record) { r.Key = []byte(`"order-1"`) }),
		func(m *outbox.Message) { m.ID, m.Subject = `"e1"`, `"order-1"` }},
	{"no timestamp", ordersCreated, with(externalRecord(`{"a": 1}`), func(r *kgo.Record) { r.Timestamp = time.UnixMilli(-1) }),
		func(m *outbox.Message) { m.Time = time.Time{} }},
	{"one that was sent back", ordersCreated, externalRecord(`{"a": 1}`, outbox.ReplayOf, "orders-0-3", outbox.ReplayGroup, "g", outbox.ReplayAction, "A"),
		func(m *outbox.Message) { m.ID = "orders-0-3" }},
	{"one that was sent back and has an id", ordersCreated, externalRecord(`{"a": 1}`, "id", "e1", outbox.ReplayOf, "orders-0-3"),
		func(m *outbox.Message) { m.ID = "e1" }},
	{"a CloudEvent", ordersCreated, externalRecord(`{"a": 1}`, "ce_specversion", "1.0", "ce_id", "e1", "ce_source", "/s", "ce_type", "t", "id", "e2"),
		func(m *outbox.Message) { m.ID, m.Source, m.Type, m.Subject, m.Time = "e1", "/s", "t", "", time.Time{} }},
	{"a structured CloudEvent", ordersCreated, externalRecord(`{"specversion": "1.0", "id": "e1", "source": "/s", "type": "t", "data": {"a": 1}}`,
		"Content-Type", "application/cloudevents+json"),
		func(m *outbox.Message) { m.ID, m.Source, m.Type, m.Subject, m.Time = "e1", "/s", "t", "", time.Time{} }},
}

const someTraceParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func with(r *kgo.Record, change func(*kgo.Record)) *kgo.Record {
	change(r)
	return r
}

// What the outbox event router sends, by its converters for values, keys and headers.
var debeziumTests = []externalCase{
	{"expanded, or not expanded and a converter for texts", outbox.PlainRecords{Connect: true}, externalRecord(`{"a": 1}`, "id", "e1", "eventType", "order.created"), nil},
	{"not expanded, JsonConverter", outbox.PlainRecords{Connect: true}, externalRecord(`"{\"a\": 1}"`, "id", "e1", "eventType", "order.created"), nil},
	{"not expanded, JsonConverter with schemas", outbox.PlainRecords{Connect: true},
		externalRecord(`{"schema":{"type":"string","optional":true,"name":"io.debezium.data.Json","version":1},"payload":"{\"a\": 1}"}`, "id", "e1", "eventType", "order.created"), nil},
	{"expanded, JsonConverter with schemas", outbox.PlainRecords{Connect: true},
		externalRecord(`{"schema":{"type":"struct","fields":[{"type":"int32","optional":true,"field":"a"}]},"payload":{"a": 1}}`, "id", "e1", "eventType", "order.created"), nil},
	{"keys and headers in quotes", outbox.PlainRecords{Connect: true},
		with(externalRecord(`{"a": 1}`, "id", `"e1"`, "eventType", `"order.created"`), func(r *kgo.Record) { r.Key = []byte(`"order-1"`) }), nil},
	{"keys and headers with schemas", outbox.PlainRecords{Connect: true},
		with(externalRecord(`{"a": 1}`, "id", `{"schema":{"type":"string"},"payload":"e1"}`, "eventType", "order.created"), func(r *kgo.Record) {
			r.Key = []byte(`{"schema":{"type":"string","optional":false},"payload":"order-1"}`)
		}), nil},
	{"a key that is a number", outbox.PlainRecords{Connect: true},
		with(externalRecord(`{"a": 1}`, "id", "e1", "eventType", "order.created"), func(r *kgo.Record) { r.Key = []byte(`42`) }),
		func(m *outbox.Message) { m.Subject = "42" }},
	{"more additional fields, one of them null", outbox.PlainRecords{Connect: true},
		externalRecord(`{"a": 1}`, "id", "e1", "eventType", "order.created", "aggregateType", "Order", "tenant", "null"),
		func(m *outbox.Message) { m.Extensions = map[string]string{"aggregatetype": "Order"} }},
	{"an event of schema, payload and more", outbox.PlainRecords{Connect: true},
		externalRecord(`{"schema": 1, "payload": {}, "a": 1}`, "id", "e1", "eventType", "order.created"),
		func(m *outbox.Message) { m.Data = []byte(`{"schema": 1, "payload": {}, "a": 1}`) }},
	{"the default: only the id", outbox.PlainRecords{Connect: true, Type: "order.created"}, externalRecord(`"{\"a\": 1}"`, "id", "e1"), nil},
	{"the type in the envelope", outbox.PlainRecords{Connect: true, TypeMember: "eventType", DataMember: "payload"},
		externalRecord(`{"payload":"{\"a\": 1}","eventType":"order.created"}`, "id", "e1"), nil},
	{"the type in the envelope, with schemas", outbox.PlainRecords{Connect: true, TypeMember: "eventType", DataMember: "payload"},
		externalRecord(`{"schema":{},"payload":{"payload":"{\"a\": 1}","eventType":"order.created"}}`, "id", "e1"), nil},
}

// A connector that places the columns of outbox sends CloudEvents, whose own headers are in one header.
func TestDebeziumSendsCloudEvents(t *testing.T) {
	t.Parallel()
	attributes := []string{"id", "e1", "ce_specversion", "1.0", "ce_id", "e1", "ce_source", "shop", "ce_type", "acme.order.created.v1", "ce_subject", "order-1",
		"ce_time", "2026-02-03T04:05:06.789Z", "ce_aggregatetype", "Order", "content-type", "application/json"}
	for stored, want := range map[string]map[string]string{
		"":     {"aggregatetype": "Order"},
		"null": {"aggregatetype": "Order"},
		`{"correlationid": "c1", "traceparent": "` + someTraceParent + `", "tenant": "7", "id": "no"}`: {"aggregatetype": "Order", "correlationid": "c1", "traceparent": someTraceParent},
	} {
		record := externalRecord(`{"a": 1}`, append(attributes, "Outbox-Headers", stored)...)
		before := len(record.Headers)
		got, err := outbox.DecodeDebezium(record)
		require.NoError(t, err)
		require.Equal(t, &outbox.Message{ID: "e1", Source: "shop", Type: "acme.order.created.v1", Subject: "order-1", ContentType: "application/json",
			Time: got.Time, Extensions: want, Data: []byte(`{"a": 1}`)}, got)
		require.Len(t, record.Headers, before, "the record stays as it is")
	}
	for _, stored := range []string{`[]`, `{"a": 1}`, "\xff", `{`} {
		_, err := outbox.DecodeDebezium(externalRecord(`{}`, append(attributes, "outbox-headers", stored)...))
		var field *outbox.FieldError
		require.ErrorAs(t, err, &field)
		require.Equal(t, "outbox-headers", field.Field)
		require.ErrorIs(t, err, outbox.ErrMalformed)
	}
	got, err := outbox.DecodeDebezium(externalRecord(`{}`, "id", "e1", "type", "t", "outbox-headers", `{"correlationid": "c1", "tenant": "7"}`))
	require.NoError(t, err)
	require.Equal(t, map[string]string{"tenant": "7", "correlationid": "c1"}, got.Extensions)
}

func TestPlainRecords(t *testing.T) {
	t.Parallel()
	for _, tt := range plainTests {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, message(tt.want)) })
	}
}

func TestDebezium(t *testing.T) {
	t.Parallel()
	for _, tt := range debeziumTests {
		t.Run(tt.name, func(t *testing.T) {
			want := message(func(m *outbox.Message) { m.ID = "e1" })
			if tt.want != nil {
				tt.want(want)
			}
			tt.run(t, want)
			if (tt.as == outbox.PlainRecords{Connect: true}) {
				got, err := outbox.DecodeDebezium(tt.record)
				require.NoError(t, err)
				require.Equal(t, want.Data, got.Data)
			}
		})
	}
}

func (tt externalCase) run(t *testing.T, want *outbox.Message) {
	t.Helper()
	got, err := tt.as.Decode(tt.record)
	require.NoError(t, err)
	require.True(t, want.Time.Equal(got.Time), "%v, not %v", got.Time, want.Time)
	got.Time = want.Time
	require.Equal(t, want, got)
}

var unreadableExternal = []struct {
	name   string
	as     outbox.PlainRecords
	record *kgo.Record
	field  string
	want   error
}{
	{"no type", outbox.PlainRecords{}, externalRecord(`{}`), "type", outbox.ErrEmpty},
	{"a tombstone", ordersCreated, with(externalRecord(""), func(r *kgo.Record) { r.Value = nil }), "value", outbox.ErrEmpty},
	{"no bytes of JSON", ordersCreated, externalRecord(""), "data", outbox.ErrEmpty},
	{"null", ordersCreated, externalRecord(" null "), "data", outbox.ErrEmpty},
	{"null beside a schema", outbox.PlainRecords{Type: "t", Connect: true}, externalRecord(`{"schema":{},"payload":null}`), "data", outbox.ErrEmpty},
	{"members of what is not JSON", inMembers, externalRecord(`{`), "value", outbox.ErrMalformed},
	{"members of what is not UTF-8", inMembers, externalRecord("{\"type\": \"\xff\"}"), "value", outbox.ErrUTF8},
	{"an object for a type", inMembers, externalRecord(`{"type": {}, "payload": {}}`), "type", outbox.ErrMalformed},
	{"no payload", inMembers, externalRecord(`{"type": "t"}`), "data", outbox.ErrEmpty},
	{"half a surrogate pair in a text", ordersCreated, externalRecord(`"{\"a\": \"\ud800\"}"`), "value", outbox.ErrJSON},
	{"bad UTF-8 in a text", ordersCreated, externalRecord("\"{\xff}\""), "value", outbox.ErrUTF8},
	{"a time of no form", ordersCreated, externalRecord(`{}`, "event-time", "yesterday"), "time", outbox.ErrTime},
	{"a time of no year", ordersCreated, externalRecord(`{}`, "event-time", "9223372036854775807"), "time", outbox.ErrTime},
	{"an id that is no text", ordersCreated, externalRecord(`{}`, "event-id", "\xff"), "event-id", outbox.ErrUTF8},
	{"an id with a NUL, before a good one", ordersCreated, externalRecord(`{}`, "id", "e1", "Event-ID", "a\x00"), "event-id", outbox.ErrNUL},
	{"a type that is no text", inMembers, externalRecord(`{"type": "t", "payload": {}}`, "event-type", "\xff"), "event-type", outbox.ErrUTF8},
	{"a content type that is no text", ordersCreated, externalRecord(`{}`, "content-type", "\xff"), "content-type", outbox.ErrUTF8},
	{"half a CloudEvent", ordersCreated, externalRecord(`{}`, "ce_id", "e1"), "specversion", outbox.ErrEmpty},
}

func TestUnreadableForeign(t *testing.T) {
	t.Parallel()
	for _, tt := range unreadableExternal {
		t.Run(tt.name, func(t *testing.T) {
			_, err := tt.as.Decode(tt.record)
			rejected, ok := errors.AsType[*outbox.FieldError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, tt.field, rejected.Field, "%v", err)
			require.ErrorIs(t, err, tt.want)
		})
	}
}

// shipment is what other producers tell of.
type shipment struct {
	Product string `json:"product"`
}

func (shipment) OccurredAt() time.Time { return time.Time{} }
func (s shipment) productID() string   { return s.Product }

type (
	shipmentSent     struct{ shipment }
	shipmentReceived struct{ shipment }
)

// externalFixture is a consumerFixture that also hears of parcels, from a Debezium that names their events
// in a header and from a producer of plain JSON that puts them into members.
type externalFixture struct {
	*consumerFixture
	debezium, plain string
}

func newExternalFixture(t testing.TB) *externalFixture {
	t.Helper()
	d := &externalFixture{debezium: "outbox.event." + uuid.NewString(), plain: "parcels-" + uuid.NewString()}
	d.consumerFixture = newConsumerFixtureOn(t, func(h *relayFixture) {
		for _, topic := range []string{h.topic, d.debezium, d.plain} {
			testenv.CreateTopic(t, h.brokers, topic, 1)
			testenv.CreateTopic(t, h.brokers, outbox.DeadLetterTopic(topic), 1)
		}
	}, outbox.Event("ParcelSent", "Parcel", shipmentSent.productID).Topic(d.debezium),
		outbox.Event("parcel.received", "Parcel", shipmentReceived.productID).Topic(d.plain))
	return d
}

func (d *externalFixture) config() outbox.ConsumerConfig {
	return outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Unknown: outbox.DeadLetterUnknown, Retry: outbox.RetryPolicy{MaxRetries: -1},
			From: outbox.FromStart,
		},
		Decode: outbox.DecodeByTopic(map[string]func(*kgo.Record) (*outbox.Message, error){
			d.debezium: outbox.DecodeDebezium,
			d.plain:    outbox.PlainRecords{TypeMember: "type", TimeMember: "at", DataMember: "parcel"}.Decode,
		}),
	}
}

// handlers count each sort of events under its own name.
func (d *externalFixture) handlers() []outbox.Handler {
	count := func(ctx context.Context, tx pgx.Tx, product string, m outbox.Metadata) error {
		return d.count(ctx, tx, sale{Product: m.Type + " " + product, Amount: 1}, m)
	}
	return []outbox.Handler{
		outbox.Handle("SENT", func(ctx context.Context, tx pgx.Tx, e shipmentSent, m outbox.Metadata) error {
			return count(ctx, tx, e.Product, m)
		}),
		outbox.Handle("RECEIVED", func(ctx context.Context, tx pgx.Tx, e shipmentReceived, m outbox.Metadata) error {
			return count(ctx, tx, e.Product, m)
		}),
		outbox.Handle("SOLD", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			return count(ctx, tx, e.Product, m)
		}),
	}
}

// record is one of a topic, with headers by name and value.
func (d *externalFixture) record(topic, value string, headers ...string) *kgo.Record {
	r := externalRecord(value, headers...)
	return &kgo.Record{Topic: topic, Key: r.Key, Value: r.Value, Headers: r.Headers}
}

// A consumer reads what Debezium, a producer of plain JSON and a relay send. An event
// that comes twice counts once, and what cannot be read is in the dead-letter topic
// with the reason, and stops nothing.
func TestConsumerOfForeignRecords(t *testing.T) {
	t.Parallel()
	testenv.RealBrokers(t)
	d := newExternalFixture(t)
	bad := []struct {
		record     *kgo.Record
		class, why string
	}{
		{d.record(d.debezium, `{"product": "a"}`, "id", "1"), "undecodable", "type is empty"},
		{d.record(d.debezium, `{"product": "a"}`, "id", "2", "eventType", "ParcelLost"), "unknown_type", "ParcelLost: type is not registered"},
		{d.record(d.debezium, `{"product": `, "id", "3", "eventType", "ParcelSent"), "undecodable", "data is malformed"},
		{d.record(d.debezium, `"{\"product\": 7}"`, "id", "4", "eventType", "ParcelSent"), "undecodable", "data is malformed"},
		{d.record(d.debezium, "\xff\x00\xfe", "id", "5", "eventType", "ParcelSent"), "undecodable", "data is malformed"},
		{with(d.record(d.debezium, "", "id", "6", "eventType", "ParcelSent"), func(r *kgo.Record) { r.Value = nil }), "undecodable", "value is empty"},
		{d.record(d.debezium, `{"product": "a"}`, "id", "\xff", "eventType", "ParcelSent"), "undecodable", "id is not valid UTF-8"},
		{d.record(d.debezium, `{"product": "a\u0000"}`, "id", "7", "eventType", "ParcelSent"), "postgres_22021", "22021"},
		{d.record(d.plain, `[]`, "id", "1"), "undecodable", "value is malformed"},
		{d.record(d.plain, ``), "undecodable", "value is malformed"},
		{d.record(d.plain, strings.Repeat("[", 1_000_000)), "undecodable", "value is malformed"},
		{d.record(d.plain, `{"type": {}, "parcel": {}}`), "undecodable", "type is malformed"},
		{d.record(d.plain, `{"type": "parcel.received", "parcel": {"product": "b"}, "at": "noon"}`), "undecodable", "time is not a usable time"},
		{d.record(d.plain, `{"type": "parcel.received", "parcel": null}`), "undecodable", "data is empty"},
	}
	for _, b := range bad {
		d.send(t, b.record)
	}
	sent := d.record(d.debezium, `"{\"product\": \"a\"}"`, "id", uuid.NewString(), "eventType", "ParcelSent")
	received := d.record(d.plain, `{"type": "parcel.received", "parcel": {"product": "b"}, "at": 1700000000000}`, "event-id", "r1")
	nameless := d.record(d.plain, `{"type": "parcel.received", "parcel": {"product": "c"}}`)
	event := d.saleRecord(uuid.NewString(), oneSale)
	again := func(r *kgo.Record) *kgo.Record { c := *r; return &c }
	d.send(t, sent, again(sent), received, again(received), nameless, again(nameless), event, again(event))
	cfg, group := d.config(), "external-"+uuid.NewString()
	for round := range 2 {
		stop := testenv.Run(t, d.groupConsumer(t, group, cfg, d.handlers()...).Run)
		require.Eventually(t, func() bool {
			return assert.ObjectsAreEqual(map[string]int{"ParcelSent a": 1, "parcel.received b": 1, "parcel.received c": 2, saleType + " p": 1 + round}, d.counts(t))
		}, testenv.Patience, 10*time.Millisecond)
		if round == 0 {
			stop()
			d.send(t, again(sent), again(received), d.saleRecord(uuid.NewString(), oneSale))
		} // the second one goes on: what is counted may be so before what is bad is deadLettered
	}
	deadLetters := readDeadLetters(t, d.brokers, len(bad), outbox.DeadLetterTopic(d.debezium), outbox.DeadLetterTopic(d.plain))
	slices.SortFunc(deadLetters, func(a, b *kgo.Record) int { // those of different events come in any order
		place := func(r *kgo.Record) string {
			h := deadLetterHeaders(r)
			return fmt.Sprintf("%t %06s", h[outbox.DeadLetterOriginalTopic] == d.plain, h[outbox.DeadLetterOriginalOffset])
		}
		return strings.Compare(place(a), place(b))
	})
	for i, b := range bad {
		headers := deadLetterHeaders(deadLetters[i])
		require.Equal(t, b.class, headers[outbox.DeadLetterClass], "%q", b.record.Value)
		require.Contains(t, headers[outbox.DeadLetterError], b.why)
		require.Equal(t, b.record.Value, deadLetters[i].Value)
		require.Equal(t, b.record.Topic, headers[outbox.DeadLetterOriginalTopic])
	}
}

// Each topic has its decoder, and the others are CloudEvents.
func TestDecodeByTopic(t *testing.T) {
	t.Parallel()
	decoders := map[string]func(*kgo.Record) (*outbox.Message, error){"orders": ordersCreated.Decode, "none": nil}
	decode := outbox.DecodeByTopic(decoders)
	delete(decoders, "orders")
	m, err := decode(externalRecord(`{}`))
	require.NoError(t, err)
	require.Equal(t, "order.created", m.Type)
	for _, topic := range []string{"none", "payments"} {
		_, err = decode(with(externalRecord(`{}`), func(r *kgo.Record) { r.Topic = topic }))
		requireRefused(t, err, outbox.ErrEmpty, refusal{"", -1, "specversion"})
	}
}

// Whatever a record holds, it is read or rejected; what is read is complete; and what
// Kafka Connect puts around a JSON object comes off.
func FuzzForeign(f *testing.F) {
	for _, tt := range append(plainTests, debeziumTests...) {
		name, value := "id", ""
		if len(tt.record.Headers) > 0 {
			name, value = tt.record.Headers[0].Key, string(tt.record.Headers[0].Value)
		}
		f.Add(tt.record.Key, tt.record.Value, name, value, "type", "payload")
	}
	f.Fuzz(func(t *testing.T, key, value []byte, header, headerValue, typeMember, dataMember string) {
		r := externalRecord(string(value), header, headerValue)
		r.Key = key
		for _, connect := range []bool{false, true} {
			for _, decode := range []func(*kgo.Record) (*outbox.Message, error){
				outbox.PlainRecords{Type: "t", Connect: connect}.Decode,
				outbox.PlainRecords{Type: "t", TypeMember: typeMember, DataMember: dataMember, Connect: connect}.Decode,
				outbox.DecodeDebezium,
			} {
				m, err := decode(r)
				if err != nil {
					_, ok := errors.AsType[*outbox.FieldError](err)
					require.True(t, ok, "%v", err)
					continue
				}
				require.NotEmpty(t, m.ID)
				require.NotEmpty(t, m.Type)
				require.NotEmpty(t, m.Source)
				require.True(t, utf8.ValidString(m.ID+m.Type+m.Source+m.Subject))
			}
		}
		var object map[string]any
		if json.Unmarshal(value, &object) != nil || object == nil || !utf8.Valid(value) {
			return
		}
		if _, hasSchema := object["schema"]; hasSchema && len(object) == 2 { // Kafka Connect has wrapped it already
			return
		}
		text, err := json.Marshal(string(value))
		require.NoError(t, err)
		for _, wrapped := range []string{
			string(value), string(text),
			fmt.Sprintf(`{"schema":{"type":"string"},"payload":%s}`, text), fmt.Sprintf(`{"schema":null,"payload":%s}`, value),
		} {
			m, err := outbox.PlainRecords{Type: "t", Connect: true}.Decode(externalRecord(wrapped))
			require.NoError(t, err)
			require.JSONEq(t, string(value), string(m.Data), wrapped)
		}
	})
}

// A producer without outbox puts the id into a header and the rest into the value.
func ExamplePlainRecords() {
	decode := outbox.PlainRecords{TypeMember: "type", TimeMember: "occurredAt", DataMember: "payload"}.Decode
	m, err := decode(&kgo.Record{
		Topic: "everbit.trade.event", Key: []byte("BTC-1"),
		Headers: []kgo.RecordHeader{{Key: "event-id", Value: []byte("0192f3c0")}},
		Value:   []byte(`{"type": "OrderAccepted", "occurredAt": "2026-02-03T04:05:06.789Z", "payload": {"orderId": 1}}`),
	})
	fmt.Println(m.ID, m.Type, m.Subject, m.Time, string(m.Data), err)
	// Output: 0192f3c0 OrderAccepted BTC-1 2026-02-03 04:05:06.789 +0000 UTC {"orderId": 1} <nil>
}

// Debezium sends the payload as a text, unless it is told to expand it.
func ExampleDecodeDebezium() {
	m, err := outbox.DecodeDebezium(&kgo.Record{
		Topic: "outbox.event.order", Key: []byte("1"),
		Headers: []kgo.RecordHeader{
			{Key: "id", Value: []byte("4d47e190-0402-4048-bc2c-89dd54343cdc")},
			{Key: "eventType", Value: []byte("OrderCreated")},
		},
		Value: []byte(`"{\"id\": 1, \"customerId\": 123}"`),
	})
	fmt.Println(m.ID, m.Type, m.Subject, string(m.Data), err)
	// Output: 4d47e190-0402-4048-bc2c-89dd54343cdc OrderCreated 1 {"id": 1, "customerId": 123} <nil>
}
