package outboxschema_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/avro"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxschema"
	"github.com/outboxgo/outbox/outboxschema/internal/shoppb"
)

const (
	orderCreated = "loopers.order.created.v1"
	orderSchema  = `{"title": "Order", "type": "object", "required": ["order_id", "lines", "created_at"],
		"properties": {"order_id": {"type": "integer", "minimum": 1}, "lines": {"type": "array", "items": {"$ref": "line.json"}}}}`
	lineSchema = `{"type": "object", "required": ["product_id"], "properties": {"quantity": {"type": "integer"}}}`
	lineAvro   = `{"type": "record", "name": "Line", "namespace": "loopers.shop", "fields": [
		{"name": "product_id", "type": "long"}, {"name": "quantity", "type": "int"}]}`
	orderAvro = `{"type": "record", "name": "Order", "namespace": "loopers.shop", "fields": [
		{"name": "order_id", "type": "long"}, {"name": "lines", "type": {"type": "array", "items": "loopers.shop.Line"}},
		{"name": "created_at", "type": {"type": "long", "logicalType": "timestamp-micros"}}]}`
)

func jsonFormat() outboxschema.Format {
	return outboxschema.JSON[order](orderSchema, outboxschema.Reference{Name: "line.json", Subject: "line-" + uuid.NewString(), Schema: lineSchema})
}

// message returns an order as its message.
func message(e order) *shoppb.OrderCreated {
	m := &shoppb.OrderCreated{OrderId: e.OrderID, CreatedAt: timestamppb.New(e.CreatedAt)}
	for _, l := range e.Lines {
		m.Lines = append(m.Lines, &shoppb.OrderCreated_Line{ProductId: l.ProductID, Quantity: l.Quantity})
	}
	return m
}

func structFormat() outboxschema.Format {
	return outboxschema.ProtobufOf(message, func(m *shoppb.OrderCreated) (order, error) {
		e := order{OrderID: m.GetOrderId(), CreatedAt: m.GetCreatedAt().AsTime()}
		for _, l := range m.GetLines() {
			e.Lines = append(e.Lines, line{ProductID: l.GetProductId(), Quantity: l.GetQuantity()})
		}
		return e, nil
	})
}

// Every format passes through PostgreSQL and Kafka, with a registry and without one.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	total := protoOrder{message(orderOf(7))}
	total.Total = &shoppb.Money{Cents: 34_80}
	t.Run("protobuf", func(t *testing.T) {
		roundTrip(t, "protobuf", outboxschema.Protobuf[protoOrder](), protoOrder.AggregateID, total, "\x02\x02")
	})
	t.Run("protobuf of a struct", func(t *testing.T) {
		roundTrip(t, "protobuf", structFormat(), order.AggregateID, orderOf(7), "\x02\x02")
	})
	t.Run("avro", func(t *testing.T) {
		roundTrip(t, "avro", outboxschema.Avro[order](avro.WithNamespace("loopers")), order.AggregateID, orderOf(7), "")
	})
	t.Run("avro by schema", func(t *testing.T) {
		f := outboxschema.AvroSchema[order](orderAvro, outboxschema.Reference{Name: "loopers.shop.Line", Subject: "line-" + uuid.NewString(), Schema: lineAvro})
		roundTrip(t, "avro", f, order.AggregateID, orderOf(7), "")
	})
	t.Run("json", func(t *testing.T) { roundTrip(t, "json", jsonFormat(), order.AggregateID, orderOf(7), "") })
	t.Run("json with an id", func(t *testing.T) {
		f := outboxschema.JSON[order](strings.Replace(orderSchema, "{", `{"$id": "https://acme.com/order.json", `, 1),
			outboxschema.Reference{Name: "line.json", Subject: "line-" + uuid.NewString(), Schema: lineSchema})
		roundTrip(t, "json", f, order.AggregateID, orderOf(7), "")
	})
}

// The id of a schema is what names of references are relative to, in every draft, in references of references, and
// where a part of a schema has an id. Without one they are relative to each other.
func TestJSONReferences(t *testing.T) {
	t.Parallel()
	const (
		draft4 = `"$schema": "http://json-schema.org/draft-04/schema#", `
		lines  = `"properties": {"lines": {"items": `
		id     = `"$id": "https://acme.com/v1/order.json", `
	)
	line := func(name string) outboxschema.Reference {
		return outboxschema.Reference{Name: name, Schema: lineSchema}
	}
	list := func(name, schema string, of ...outboxschema.Reference) outboxschema.Reference {
		return outboxschema.Reference{Name: name, Schema: schema, References: of}
	}
	toLine := `{"type": "array", "items": {"$ref": "line.json"}}`
	for name, tt := range map[string]struct {
		schema     string
		references []outboxschema.Reference
	}{
		"no id":                      {`{` + lines + `{"$ref": "line.json"}}}}`, []outboxschema.Reference{line("line.json")}},
		"id":                         {`{` + id + lines + `{"$ref": "line.json"}}}}`, []outboxschema.Reference{line("line.json")}},
		"id of draft 4":              {`{` + draft4 + strings.Replace(id, "$id", "id", 1) + lines + `{"$ref": "line.json"}}}}`, []outboxschema.Reference{line("line.json")}},
		"whole URL":                  {`{` + id + lines + `{"$ref": "https://acme.com/v2/line.json"}}}}`, []outboxschema.Reference{line("https://acme.com/v2/line.json")}},
		"whole URL, relative name":   {`{` + id + lines + `{"$ref": "https://acme.com/v1/line.json"}}}}`, []outboxschema.Reference{line("line.json")}},
		"id of a part":               {`{` + lines + `{"$id": "https://acme.com/part.json", "$ref": "line.json"}}}}`, []outboxschema.Reference{line("line.json")}},
		"reference of a reference":   {`{` + id + `"properties": {"lines": {"$ref": "list.json"}}}`, []outboxschema.Reference{list("list.json", toLine, line("line.json"))}},
		"in a folder":                {`{` + id + `"properties": {"lines": {"$ref": "a/list.json"}}}`, []outboxschema.Reference{list("a/list.json", toLine, line("line.json"))}},
		"in a folder, without an id": {`{"properties": {"lines": {"$ref": "a/list.json"}}}`, []outboxschema.Reference{list("a/list.json", toLine, line("line.json"))}},
		"id of a reference": {`{` + id + `"properties": {"lines": {"$ref": "list.json"}}}`,
			[]outboxschema.Reference{list("list.json", `{"$id": "https://acme.org/list", "type": "array", "items": {"$ref": "line.json"}}`, line("line.json"))}},
		"one used twice": {`{` + id + `"properties": {"lines": {"allOf": [{"$ref": "list.json"}, {"items": {"$ref": "line.json"}}]}}}`,
			[]outboxschema.Reference{list("list.json", toLine, line("line.json")), line("line.json")}},
		"a name of ours": {`{` + lines + `{"$ref": "schema.json"}}}}`, []outboxschema.Reference{line("schema.json")}},
	} {
		require.NotPanics(t, func() {
			codec := outboxschema.JSON[order](tt.schema, tt.references...).Codec()
			var e order
			require.NoError(t, codec.Decode(t.Context(), []byte(`{"order_id": 1, "lines": [{"product_id": 2}]}`), &e), name)
			require.ErrorContains(t, codec.Decode(t.Context(), []byte(`{"order_id": 1, "lines": [{}]}`), &e), "product_id", name)
		}, name)
	}
	for name, references := range map[string][]outboxschema.Reference{
		"of another name":      {line("other.json")},
		"of another folder":    {line("a/line.json")},
		"two of the same name": {line("line.json"), list("line.json", `{"type": "string"}`)},
		"no JSON":              {line("line.json"), list("unused.json", `{`)},
	} {
		require.Panics(t, func() { outboxschema.JSON[order](`{`+id+lines+`{"$ref": "line.json"}}}}`, references...) }, name)
	}
}

// roundTrip expects index between the id of the schema and the payload.
func roundTrip[E outbox.DomainEvent](t *testing.T, media string, f outboxschema.Format, id func(E) string, event E, index string) {
	t.Parallel()
	g := newGate(t)
	for _, mode := range []outbox.Mode{outbox.Binary, outbox.Structured} {
		s := newShop(t)
		schemas := g.registry(t, nil)
		definition := outbox.Event(orderCreated, "Order", id).Topic(s.topic)
		rec := s.recorder(t, definition.Codec(schemas.Codec(s.topic, f)))
		require.NoError(t, schemas.Register(t.Context()))
		require.NoError(t, s.record(t.Context(), rec, event))
		s.relay(t, mode)

		arrived := make(chan E, 2)
		reader := g.registry(t, nil).Reader(f)
		s.consume(t, "billing", registryOf(t, definition.Codec(reader)), outbox.ConsumerConfig{}, into("SEE", arrived))
		requireEvent(t, event, await(t, arrived))

		record := s.records(t, s.topic, 1)[0]
		contentType, schema, payload := headerOf(record, "content-type"), headerOf(record, "ce_dataschema"), record.Value
		if mode == outbox.Structured {
			var e struct {
				DataContentType, DataSchema string
				Payload                     []byte `json:"data_base64"`
			}
			require.NoError(t, json.Unmarshal(record.Value, &e))
			contentType, schema, payload = e.DataContentType, e.DataSchema, e.Payload
		}
		require.Equal(t, "application/vnd.schemaregistry."+media, contentType)
		require.Equal(t, byte(0), payload[0])
		number := binary.BigEndian.Uint32(payload[1:])
		require.Regexp(t, `^http://127\.0\.0\.1:\d+/schemas/ids/`+uintText(number)+"$", schema)
		require.Equal(t, index, string(payload[5:5+len(index)]))

		plain, err := f.Codec().Encode(t.Context(), event)
		require.NoError(t, err)
		require.Equal(t, plain, payload[5+len(index):])
		require.Equal(t, "application/"+media, f.Codec().ContentType)
		var decoded E
		require.NoError(t, f.Codec().Decode(t.Context(), plain, &decoded))
		requireEvent(t, event, decoded)
	}
}

func uintText(n uint32) string { b, _ := json.Marshal(n); return string(b) }

func requireEvent(t *testing.T, want, got any) {
	t.Helper()
	if m, is := want.(proto.Message); is {
		require.True(t, proto.Equal(m, got.(proto.Message)), "%v", got)
		return
	}
	b, err := json.Marshal(want)
	require.NoError(t, err)
	c, err := json.Marshal(got) // times of another zone are the same
	require.NoError(t, err)
	require.JSONEq(t, string(b), string(c))
}

// While the registry is away, events of known schemas are recorded without asking it. Others are refused, in time, and
// are recorded once it is back.
func TestAwayAtRecord(t *testing.T) {
	t.Parallel()
	g, s := newGate(t), newShop(t)
	schemas := g.registry(t, nil)
	known := s.recorder(t, outbox.Event(orderCreated, "Order", order.AggregateID).Topic(s.topic).Codec(schemas.Codec(s.topic, structFormat())))
	require.NoError(t, schemas.Register(t.Context()))
	require.NoError(t, g.registry(t, nil).Lookup(t.Context()), "nothing to look up")
	fresh := g.registry(t, nil)
	unknown := s.recorder(t, outbox.Event(orderCreated, "Order", order.AggregateID).Topic(s.topic).Codec(fresh.Codec(s.topic, structFormat())))

	g.closed.Store(true)
	asked := g.asked.Load()
	require.NoError(t, s.record(t.Context(), known, orderOf(1)))
	require.Equal(t, asked, g.asked.Load(), "it was not asked")
	err := s.record(t.Context(), unknown, orderOf(2))
	require.ErrorIs(t, err, outbox.ErrEncode)
	require.ErrorContains(t, err, "subject "+s.topic+"-value")

	asked = g.asked.Load()
	require.Error(t, s.record(t.Context(), unknown, orderOf(2)))
	require.Equal(t, asked, g.asked.Load(), "it was asked just now")
	g.closed.Store(false)
	require.Eventually(t, func() bool { return s.record(t.Context(), unknown, orderOf(2)) == nil }, testenv.Patience, 50*time.Millisecond)
}

// While the registry is away, events whose schema is not known wait: no attempt counts and none is dead. Events of
// known schemas go on.
func TestAwayAtDecode(t *testing.T) {
	t.Parallel()
	g, s := newGate(t), newShop(t)
	schemas := g.registry(t, nil)
	definition := outbox.Event(orderCreated, "Order", order.AggregateID).Topic(s.topic)
	rec := s.recorder(t, definition.Codec(schemas.Codec(s.topic, structFormat())))
	require.NoError(t, schemas.Register(t.Context()))
	g.closed.Store(true)

	const orders = 30
	consumed, worked, plain := make(chan order, 2*orders), make(chan order, 2*orders), make(chan order, 2*orders)
	readers := func() *outbox.Registry {
		return registryOf(t, definition.Codec(g.registry(t, nil).Reader(structFormat())))
	}
	cfg := outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, Logger: quiet, Retry: outbox.RetryPolicy{MaxRetries: -1, RetryWait: 10 * time.Millisecond, MaxRetryWait: 200 * time.Millisecond}}
	s.consume(t, "consumer", readers(), outbox.ConsumerConfig{HandlerConfig: cfg}, into("SEE", consumed))
	s.consume(t, "plain", readers(), outbox.ConsumerConfig{HandlerConfig: cfg}, outbox.HandleNoTx("SEE",
		func(_ context.Context, e order, _ outbox.Metadata) error { plain <- e; return nil }))
	w, err := outbox.NewWorker(s.db, readers(), "worker", outbox.WorkerConfig{HandlerConfig: cfg}, into("SEE", worked))
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	for i := range orders {
		require.NoError(t, s.record(t.Context(), rec, orderOf(int64(1+i%3))))
	}
	s.relay(t, outbox.Binary)

	asked := g.asked.Load()
	require.Eventually(t, func() bool { return g.asked.Load() >= asked+6 }, testenv.Patience, 10*time.Millisecond, "they ask again")
	require.Empty(t, consumed)
	require.Empty(t, worked)
	require.Empty(t, plain)
	g.closed.Store(false)
	for range orders {
		await(t, consumed)
		await(t, worked)
		await(t, plain)
	}
	var dead, attempts int
	require.NoError(t, s.db.QueryRow(t.Context(), "SELECT count(*) FILTER (WHERE status = 'DEAD'), coalesce(max(attempt_count), 0) FROM "+
		pgx.Identifier{s.schema, "event_delivery"}.Sanitize()).Scan(&dead, &attempts))
	require.Zero(t, dead)
	require.LessOrEqual(t, attempts, 1)
	time.Sleep(100 * time.Millisecond) // a repeat would come now
	require.Empty(t, consumed)
	require.Empty(t, worked)
	require.Empty(t, plain)
}

// A service without the right to register gets a clear error until somebody has registered its schema.
func TestLookupOnly(t *testing.T) {
	t.Parallel()
	g, topic := newGate(t), "test-"+uuid.NewString()
	service, deploy := g.registry(t, nil), g.registry(t, nil)
	codec := service.Codec(topic, structFormat())
	deploy.Codec(topic, structFormat())
	err := service.Lookup(t.Context())
	require.ErrorContains(t, err, "outboxschema_test.order")
	require.ErrorContains(t, err, "not")
	_, err = codec.Encode(t.Context(), orderOf(1))
	require.ErrorContains(t, err, "subject")
	require.Empty(t, codec.DataSchema(t.Context()))
	require.NoError(t, deploy.Register(t.Context()))
	require.NoError(t, service.Lookup(t.Context()))
	_, err = codec.Encode(t.Context(), orderOf(1))
	require.NoError(t, err)
	_, err = service.Reader(structFormat()).Encode(t.Context(), orderOf(1))
	require.ErrorContains(t, err, "only reads")
}

// The names of subjects follow from the topic, the record, or both.
func TestSubjects(t *testing.T) {
	t.Parallel()
	g, topic := newGate(t), "test-"+uuid.NewString()
	client := g.client(t)
	name := "loopers.n" + uuid.NewString()[:8]
	for want, subject := range map[string]outboxschema.SubjectName{
		topic + "-value": outboxschema.TopicName, name + ".order": outboxschema.RecordName, topic + "-" + name + ".order": outboxschema.TopicRecordName,
	} {
		schemas := g.registry(t, subject)
		schemas.Codec(topic, outboxschema.Avro[order](avro.WithNamespace(name)))
		require.NoError(t, schemas.Register(t.Context()))
		_, err := client.SchemaByVersion(t.Context(), want, -1)
		require.NoError(t, err, want)
	}
}

// wideOrder is a later version of order, and narrowOrder one that cannot read earlier events.
type (
	wideOrder struct {
		order `avro:",inline"`
		Note  string `avro:"note,default=none"`
	}
	narrowOrder struct {
		order `avro:",inline"`
		Gift  bool `avro:"gift"`
	}
)

// Events are read with the schema that they were written with: by newer readers and by older ones.
func TestEvolution(t *testing.T) {
	t.Parallel()
	g, topic := newGate(t), "test-"+uuid.NewString()
	before, after := g.registry(t, nil), g.registry(t, nil)
	name := avro.WithName("Order")
	v1, v2 := before.Codec(topic, outboxschema.Avro[order](name)), after.Codec(topic, outboxschema.Avro[wideOrder](name))
	require.NoError(t, before.Register(t.Context()))
	client := g.client(t)
	require.NoError(t, client.SetCompatibility(t.Context(), sr.SetCompatibility{Level: sr.CompatBackward}, topic+"-value")[0].Err)
	require.NoError(t, after.Register(t.Context()))

	old, err := v1.Encode(t.Context(), orderOf(7))
	require.NoError(t, err)
	young, err := v2.Encode(t.Context(), wideOrder{orderOf(8), "fragile"})
	require.NoError(t, err)
	require.NotEqual(t, old[:5], young[:5])

	var wide wideOrder
	require.NoError(t, v2.Decode(t.Context(), old, &wide))
	requireEvent(t, wideOrder{orderOf(7), "none"}, wide)
	var narrow order
	require.NoError(t, v1.Decode(t.Context(), young, &narrow))
	requireEvent(t, orderOf(8), narrow)

	asked := g.asked.Load()
	require.NoError(t, v2.Decode(t.Context(), old, &wide))
	require.Equal(t, asked, g.asked.Load(), "the schema is cached")

	bad := g.registry(t, nil)
	bad.Codec(topic, outboxschema.Avro[narrowOrder](name))
	err = bad.Register(t.Context())
	require.ErrorContains(t, err, "outboxschema_test.narrowOrder")
	require.ErrorContains(t, err, "subject "+topic+"-value")
	require.ErrorContains(t, err, "gift at /fields/", "the registry's reason")
}

// What no retry can change is no outage: payloads in another form, schemas that do not exist, other messages.
func TestUndecodable(t *testing.T) {
	t.Parallel()
	g, topic := newGate(t), "test-"+uuid.NewString()
	schemas := g.registry(t, nil)
	orders := schemas.Codec(topic, structFormat())
	require.NoError(t, schemas.Register(t.Context()))
	good, err := orders.Encode(t.Context(), orderOf(7))
	require.NoError(t, err)
	unknown, other := append([]byte{}, good...), append([]byte{}, good...)
	binary.BigEndian.PutUint32(unknown[1:], 1<<31-1)
	other = append(append(other[:5:5], 0), other[7:]...) // the first message of the file
	for want, data := range map[string][]byte{
		"header": []byte("{}"), "schema 2147483647: ": unknown, "it is a loopers.shop.v1.OrderCancelled": other, "index of the message": good[:5], "proto:": append(good[:7:7], 0xff),
	} {
		var e order
		err := orders.Decode(t.Context(), data, &e)
		require.ErrorContains(t, err, want)
		require.Equal(t, order{}, e)
	}
	var e order
	require.ErrorContains(t, schemas.Reader(outboxschema.Avro[wideOrder]()).Decode(t.Context(), good, &e), "no AVRO format")

	s := newShop(t)
	definition := outbox.Event(orderCreated, "Order", order.AggregateID).Topic(s.topic)
	testenv.CreateTopic(t, s.brokers, s.topic+".dlq", 1)
	arrived := make(chan order, 2)
	s.consume(t, "billing", registryOf(t, definition.Codec(schemas.Reader(structFormat()))), outbox.ConsumerConfig{}, into("SEE", arrived))
	record, err := s.recorder(t, definition.Codec(orders)).KafkaRecord(t.Context(), orderOf(7))
	require.NoError(t, err)
	producer, err := kgo.NewClient(testenv.KafkaOpts(s.brokers)...)
	require.NoError(t, err)
	defer producer.Close()
	bad := *record
	bad.Value, bad.Headers = unknown, append([]kgo.RecordHeader{}, record.Headers...)
	require.NoError(t, producer.ProduceSync(t.Context(), &bad, record).FirstErr())
	requireEvent(t, orderOf(7), await(t, arrived))
	require.Equal(t, unknown, s.records(t, s.topic+".dlq", 1)[0].Value)
}

// Whoever writes records chooses among many encodings of the index of a message. All of them share one reader.
func TestEncodingsOfAnIndex(t *testing.T) {
	t.Parallel()
	g, topic := newGate(t), "test-"+uuid.NewString()
	schemas := g.registry(t, nil)
	orders := schemas.Codec(topic, structFormat())
	require.NoError(t, schemas.Register(t.Context()))
	good, err := orders.Encode(t.Context(), orderOf(7))
	require.NoError(t, err)
	require.Equal(t, []byte{2, 2}, good[5:7], "one index, 1")
	var e order
	require.NoError(t, orders.Decode(t.Context(), good, &e))
	asked := g.asked.Load()
	for _, index := range [][]byte{{2, 0x82, 0}, {0x82, 0, 2}, {0x82, 0x80, 0, 0x82, 0x80, 0}} {
		var e order
		require.NoError(t, orders.Decode(t.Context(), slices.Concat(good[:5], index, good[7:]), &e))
		requireEvent(t, orderOf(7), e)
	}
	require.Equal(t, asked, g.asked.Load())
}

// Schemas refuse what does not match, on either side.
func TestJSONIsChecked(t *testing.T) {
	t.Parallel()
	codec := jsonFormat().Codec()
	_, err := codec.Encode(t.Context(), orderOf(0))
	require.ErrorContains(t, err, "minimum")
	var e order
	require.ErrorContains(t, codec.Decode(t.Context(), []byte(`{"order_id": 1, "created_at": "x", "lines": [{}]}`), &e), "product_id")
	require.Panics(t, func() { outboxschema.JSON[order](`{"type": 3}`) })
	require.Panics(t, func() { outboxschema.JSON[order](`{"$ref": "/etc/passwd"}`) })
	require.Panics(t, func() { outboxschema.AvroSchema[order](`{"type": "recor"}`) })
	require.Panics(t, func() { outboxschema.Protobuf[*shoppb.Money]() })
}
