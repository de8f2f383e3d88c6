package interop

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/cloudevents/sdk-go/protocol/kafka_sarama/v2"
	"github.com/cloudevents/sdk-go/v2/binding"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// fact is a domain event with everything that a test may want to say about it.
// What is empty becomes that of an order.
type fact struct {
	source, eventType, aggregateType, aggregate string

	key         string // "" = aggregate
	contentType string
	data        string // JSON as jsonb prints it
	at          time.Time

	correlation, trace string
	traceID            string
	headers            map[string]string
	attributes         map[string]string
}

func (f fact) OccurredAt() time.Time        { return f.at }
func (f fact) aggregateID() string          { return f.aggregate }
func (f fact) partitionKey() string         { return f.key }
func (f fact) MarshalJSON() ([]byte, error) { return []byte(f.data), nil }

func (f fact) withDefaults() fact {
	f.source = cmp.Or(f.source, "commerce-api")
	f.eventType = cmp.Or(f.eventType, "acme.order.created.v1")
	f.aggregateType = cmp.Or(f.aggregateType, "Order")
	f.aggregate = cmp.Or(f.aggregate, "order-1")
	f.key = cmp.Or(f.key, f.aggregate)
	f.at = cmp.Or(f.at, time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC))
	if f.contentType == "" {
		f.contentType, f.data = "application/json", cmp.Or(f.data, `{"total": 1.50}`)
	}
	return f
}

const (
	trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	// awkward is text that an encoding may trip over.
	awkward = `100% %41 + "a" 'b' \ \n \u0041 {"a":1} <b>&amp; é 주문 😀 ` + "\u00a0\u2028\ufeff\ufffd\U000e0067" + ` end`
	// controls may be in payloads, keys and headers, and not in attributes.
	controls = "a\x01\t\r\n\x1f\x7f\u0080"
)

var relayTests = []struct {
	name string
	fact
}{
	{"plain", fact{}},
	{"another kind", fact{eventType: "acme.product-view.page_viewed.v12", aggregateType: "Product", aggregate: "7"}},
	{"a type of another form", fact{eventType: "LEDGER_POSTED", aggregateType: "Ledger", aggregate: "l/1"}},
	{"a source with all that a URI may have", fact{source: `https://u@acme.example:8080/a%20b/%EC%A3%BC;v=1/%2f?q='a'&r=%22#%7e`}},
	{"a source that is a path", fact{source: "/shop/orders"}},
	{"a source that is a URN", fact{source: "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66"}},
	{"awkward attributes", fact{aggregate: awkward, aggregateType: awkward, correlation: awkward}},
	{"attributes as long as they may be", fact{
		aggregate: strings.Repeat("주", 255), aggregateType: strings.Repeat("주", 100), correlation: strings.Repeat("😀", 255),
	}},
	{"a key of its own", fact{key: "user-1"}},
	{"an awkward key", fact{key: awkward}},
	{"a key with control characters", fact{key: controls}},
	{"a correlation id and a trace", fact{correlation: "corr-1", trace: trace}},
	{"attributes of its own", fact{traceID: "0123456789ABCDEF", correlation: "corr-1", attributes: map[string]string{
		"schemaversion": "1", "ownerid": awkward, "market": "KRW-BTC", "a": "é", "9": "9", "averylongnamethatcloudeventsdoesnotlike": "x",
	}, headers: map[string]string{"market": "no attribute", "traceid": "nor this"}}},
	{"headers of its own, which are no attributes", fact{trace: trace, headers: map[string]string{
		"tenant": awkward, "x-region": "", "controls": controls, "subject": "not this", "id": "nor that", "partitionkey": "no",
	}}},

	{"JSON with awkward text", fact{data: `{"주문": "\"é\" \\ 😀 \u0001 </script> %41 ` + "\u2028" + `"}`}},
	{"JSON with long numbers", fact{data: `[12345678901234567890, 0.10000000000000000000001, -1.50]`}},
	{"JSON null", fact{data: `null`}},
	{"JSON false", fact{data: `false`}},
	{"a JSON text", fact{data: `"text"`}},
	{"an empty JSON text", fact{data: `""`}},
	{"a JSON text that holds JSON", fact{data: `"{\"a\": 1}"`}},
	{"an empty JSON object", fact{data: `{}`}},
	{"JSON that looks like an event", fact{data: `{"id": "no", "data_base64": "AA==", "specversion": "0.3"}`}},

	{"bytes", fact{contentType: "application/protobuf", data: "\x00\x01\xfe\xff"}},
	{"bytes that look like JSON", fact{contentType: "application/protobuf", data: `{"a":  1}`}},
	{"many bytes", fact{contentType: "application/protobuf", data: strings.Repeat("\xff\x00", 300_000)}},
	{"text", fact{contentType: "text/plain; charset=utf-8", data: awkward + controls}},
	{"JSON of another content type", fact{contentType: "application/json; charset=utf-8", data: `{"b":1,  "a":2}`}},
	{"JSON of a type of its own", fact{contentType: "application/vnd.acme.order+json", data: `{"b":1,  "a":2}`}},
	{"a content type in quotes", fact{contentType: `multipart/mixed; boundary="a \"b\" c"`, data: "--"}},
	{"no bytes at all", fact{contentType: "application/protobuf", data: ""}},

	{"microseconds", fact{at: time.Date(2026, 2, 3, 4, 5, 6, 123456000, time.UTC)}},
	{"nanoseconds, of which microseconds remain", fact{at: time.Date(2026, 2, 3, 4, 5, 6, 123456789, time.UTC)}},
	{"another zone", fact{at: time.Date(2026, 2, 3, 4, 5, 6, 1000, time.FixedZone("KST", 9*3600))}},
	{"a zone of half an hour", fact{at: time.Date(2026, 2, 3, 4, 5, 6, 0, time.FixedZone("", -(3*3600+1800)))}},
	{"before 1970", fact{at: time.Date(1912, 6, 23, 0, 0, 0, 999999000, time.UTC)}},
	{"the first day of the year 1", fact{at: time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC)}},
	{"the last microsecond of 9999", fact{at: time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC)}},
}

var modes = []struct {
	name     string
	mode     outbox.Mode
	encoding binding.Encoding
}{
	{"binary", outbox.Binary, binding.EncodingBinary},
	{"structured", outbox.Structured, binding.EncodingStructured},
}

// The SDK reads what a relay has sent, and finds in it what was recorded.
func TestSDKReadsRelay(t *testing.T) {
	t.Parallel()
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			brokers := testenv.RealBrokers(t)
			db, schema := testenv.Schema(t)
			require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
			topic := newTopic(t, brokers)
			ids := make([]string, len(relayTests))
			for i, tt := range relayTests {
				ids[i] = record(t, db, schema, topic, tt.withDefaults())
			}
			relay(t, db, brokers, outbox.RelayConfig{Schema: schema, Mode: m.mode})
			messages := consume(t, brokers, topic)
			for i, tt := range relayTests {
				cm := next(t, messages)
				t.Run(tt.name, func(t *testing.T) { requireFact(t, tt.withDefaults(), ids[i], m.encoding, cm) })
			}
		})
	}
}

// record stores f in a transaction of its own and returns the event's id.
func record(t *testing.T, db *pgxpool.Pool, schema, topic string, f fact) string {
	t.Helper()
	def := outbox.Event(f.eventType, f.aggregateType, fact.aggregateID).Topic(topic).Key(fact.partitionKey)
	if f.contentType != "application/json" {
		def = def.Codec(outbox.Codec{
			ContentType: f.contentType,
			Encode:      func(_ context.Context, e any) ([]byte, error) { return []byte(e.(fact).data), nil },
			Decode:      func(context.Context, []byte, any) error { return errors.ErrUnsupported },
		})
	}
	events, err := outbox.NewRegistry(f.source, def)
	require.NoError(t, err)
	id := uuid.New()
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{
		Schema:  schema,
		NewID:   func() (uuid.UUID, error) { return id, nil },
		Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string { return e.(fact).headers },
	})
	require.NoError(t, err)
	ctx := outbox.WithTraceID(outbox.WithTraceParent(outbox.WithCorrelationID(t.Context(), f.correlation), f.trace), f.traceID)
	event := outbox.With(f, outbox.EventOptions{Attributes: f.attributes})
	require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, event) }))
	return id.String()
}

// relay runs one until the test ends.
func relay(t *testing.T, db *pgxpool.Pool, brokers []string, cfg outbox.RelayConfig) {
	t.Helper()
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	r, err := outbox.NewRelay(db, testenv.KafkaOpts(brokers), cfg)
	require.NoError(t, err)
	testenv.Run(t, r.Run)
}

// requireFact requires that the SDK finds f in a message.
func requireFact(t *testing.T, f fact, id string, encoding binding.Encoding, cm *sarama.ConsumerMessage) {
	t.Helper()
	require.Equal(t, f.key, string(cm.Key))
	message := kafka_sarama.NewMessageFromConsumerMessage(cm)
	require.Equal(t, encoding, message.ReadEncoding())
	for name, value := range f.headers {
		require.Equal(t, value, string(message.Headers[name]), name)
	}

	e, err := binding.ToEvent(t.Context(), message)
	require.NoError(t, err)
	require.NoError(t, e.Validate())
	require.Equal(t, "1.0", e.SpecVersion())
	require.Equal(t, id, e.ID())
	require.Equal(t, f.source, e.Source())
	require.Equal(t, f.eventType, e.Type())
	require.Equal(t, f.aggregate, e.Subject())
	require.Equal(t, f.at.UTC().Truncate(time.Microsecond), e.Time())
	require.Equal(t, f.contentType, e.DataContentType())
	require.Empty(t, e.DataSchema())

	extensions := map[string]any{"aggregatetype": f.aggregateType}
	if f.correlation != "" {
		extensions["correlationid"] = f.correlation
	}
	if f.traceID != "" {
		extensions["traceid"] = f.traceID
	}
	for name, value := range f.attributes {
		extensions[name] = value
	}
	if f.trace != "" {
		extensions["traceparent"] = f.trace
		require.Equal(t, f.trace, string(message.Headers["traceparent"]), "where tracing libraries look")
	}
	got := maps.Clone(e.Extensions())
	maps.DeleteFunc(got, func(name string, _ any) bool { return strings.HasPrefix(name, "kafka") }) // the binding's own
	require.Equal(t, extensions, got)

	require.Equal(t, f.data, string(e.Data()))
	require.NotNil(t, cm.Value, "a value that is null would be a tombstone")
}
