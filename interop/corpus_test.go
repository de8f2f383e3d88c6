package interop

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/IBM/sarama"
	"github.com/cloudevents/sdk-go/protocol/kafka_sarama/v2"
	"github.com/cloudevents/sdk-go/v2/binding"
	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/cloudevents/sdk-go/v2/types"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

var update = flag.Bool("update", false, "write "+corpus+" anew")

const corpus = "../internal/envelope/testdata/cloudevents_sdk.json"

// sdkRecord is a case of the corpus: a record as franz-go reads it, and the
// event that the SDK was asked to send.
type sdkRecord struct {
	Name    string            `json:"name"`
	Key     *content          `json:"key"`
	Headers map[string]string `json:"headers"`
	Value   *content          `json:"value"`

	Attributes map[string]string `json:"attributes"` // in the form that CloudEvents calls canonical
	Data       *content          `json:"data"`
}

// content is bytes, as text where they are that. Nil is none at all.
type content struct {
	Text   string `json:"text,omitempty"`
	Base64 []byte `json:"base64,omitempty"`
}

func contentOf(b []byte) *content {
	switch {
	case b == nil:
		return nil
	case utf8.Valid(b):
		return &content{Text: string(b)}
	default:
		return &content{Base64: b}
	}
}

// sdkTests are events as users of the SDK make them: set completes one that has
// id, source and type. Left out is what the SDK itself does not carry: empty data
// has no record of its own in binary mode, and a JSON value of a content type
// that ends in +json becomes a text in structured mode.
var sdkTests = []struct {
	name string
	set  func(*event.Event) error
}{
	{"nothing but what must be", func(*event.Event) error { return nil }},
	{"another version of CloudEvents", func(e *event.Event) error {
		e.SetSpecVersion("0.3")
		return nil
	}},
	{"every attribute", func(e *event.Event) error {
		e.SetSubject("order-1")
		e.SetTime(time.Date(2026, 2, 3, 4, 5, 6, 123456000, time.UTC))
		e.SetDataSchema("https://acme.example/schemas/order?v=1")
		e.SetExtension("aggregatetype", "Order")
		e.SetExtension("correlationid", "corr-1")
		e.SetExtension("traceparent", trace)
		e.SetExtension("partitionkey", "order-1")
		return e.SetData("application/json", map[string]any{"total": 1.5})
	}},
	{"extensions of every type", func(e *event.Event) error {
		for name, value := range map[string]any{
			"text": "7", "empty": "", "yes": true, "no": false, "zero": 0, "least": -1 << 31, "most": 1<<31 - 1,
			"bytes": []byte{0, 254, 255}, "at": time.Date(2026, 2, 3, 4, 5, 6, 7000, time.UTC),
			"uri": types.ParseURI("https://acme.example/%41?q=%22"),
			"ref": types.ParseURIRef("../a%20b#c"), "a0123456789012345678901234567890": "a long name",
		} {
			e.SetExtension(name, value)
		}
		return nil
	}},
	{"awkward text in attributes", func(e *event.Event) error {
		e.SetID(awkward)
		e.SetType(awkward)
		e.SetSubject(awkward)
		e.SetSource(`https://u@acme.example:8080/a%20b/%EC%A3%BC;v=1/%2f?q='a'&r=%22#%7e`)
		e.SetExtension("correlationid", awkward)
		return nil
	}},
	{"nanoseconds and a zone", func(e *event.Event) error {
		e.SetTime(time.Date(2026, 2, 3, 4, 5, 6, 123456789, time.FixedZone("", -(3*3600+1800))))
		return nil
	}},

	{"JSON with awkward text", func(e *event.Event) error {
		return e.SetData("application/json", map[string]string{"주문": awkward + controls})
	}},
	{"JSON as it was written", func(e *event.Event) error {
		return e.SetData("application/json", json.RawMessage(`[12345678901234567890,1e5,-0.0,{"b":1,"a":null}]`))
	}},
	{"JSON null", func(e *event.Event) error { return e.SetData("application/json", json.RawMessage(`null`)) }},
	{"JSON false", func(e *event.Event) error { return e.SetData("application/json", false) }},
	{"a JSON text", func(e *event.Event) error { return e.SetData("application/json", "text") }},
	{"a JSON text that holds JSON", func(e *event.Event) error { return e.SetData("application/json", `{"a": 1}`) }},
	{"JSON as bytes", func(e *event.Event) error { return e.SetData("application/json", []byte(`{"b":1,  "a":2}`)) }},
	{"JSON of a content type with parameters", func(e *event.Event) error {
		e.SetDataContentType(`Application/JSON; charset="utf-8"`)
		e.DataEncoded = []byte(`{"a":1}`)
		return nil
	}},
	{"JSON of a type of its own, as bytes", func(e *event.Event) error {
		return e.SetData("application/vnd.acme.order+json", []byte(`{"b":1,  "a":2}`))
	}},
	{"JSON without a content type", func(e *event.Event) error {
		e.DataEncoded = []byte(`{"a":1}`)
		return nil
	}},

	{"bytes", func(e *event.Event) error { return e.SetData("application/protobuf", []byte{0, 1, 254, 255}) }},
	{"bytes without a content type", func(e *event.Event) error {
		e.DataEncoded, e.DataBase64 = []byte{0, 1, 254, 255}, true
		return nil
	}},
	{"text", func(e *event.Event) error { return e.SetData("text/plain", awkward+controls) }},
	{"XML", func(e *event.Event) error {
		e.SetDataContentType("application/xml")
		e.DataEncoded = []byte(`<order id="1">주문 &amp; ` + "\n" + `</order>`)
		return nil
	}},
}

// The corpus is what the SDK sends.
func TestCorpus(t *testing.T) {
	t.Parallel()
	brokers := testenv.RealBrokers(t)
	var records []sdkRecord
	for _, m := range modes {
		topic := newTopic(t, brokers)
		send(t, brokers, topic, m.encoding)
		for i, r := range fetch(t, brokers, topic, len(sdkTests)) {
			e := sdkEvent(t, i)
			records = append(records, sdkRecord{
				Name: m.name + ": " + sdkTests[i].name, Key: contentOf(r.Key), Headers: headersOf(t, r), Value: contentOf(r.Value),
				Attributes: attributesOf(t, e), Data: contentOf(e.Data()),
			})
		}
	}
	var got bytes.Buffer
	file := json.NewEncoder(&got)
	file.SetEscapeHTML(false)
	file.SetIndent("", "  ")
	require.NoError(t, file.Encode(records))
	if *update {
		require.NoError(t, os.WriteFile(corpus, got.Bytes(), 0o644))
	}
	want, err := os.ReadFile(corpus)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String(), "the flag -update writes the file anew")
}

// sdkEvent makes the event of a test, anew because sending may change it.
func sdkEvent(t *testing.T, i int) *event.Event {
	t.Helper()
	e := event.New()
	e.SetID("id-1")
	e.SetSource("/shop")
	e.SetType("acme.order.created.v1")
	require.NoError(t, sdkTests[i].set(&e), sdkTests[i].name)
	require.NoError(t, e.Validate(), sdkTests[i].name)
	return &e
}

// send sends the events of sdkTests.
func send(t *testing.T, brokers []string, topic string, encoding binding.Encoding) {
	t.Helper()
	sender, err := kafka_sarama.NewSender(brokers, sarama.NewConfig(), topic)
	require.NoError(t, err)
	ctx := binding.WithForceBinary(t.Context())
	if encoding == binding.EncodingStructured {
		ctx = binding.WithForceStructured(t.Context())
	}
	for i := range sdkTests {
		require.NoError(t, sender.Send(ctx, binding.ToMessage(sdkEvent(t, i))))
	}
	require.NoError(t, sender.Close(ctx))
}

// headersOf returns the headers by name; the SDK sends extensions in any order.
func headersOf(t *testing.T, r *kgo.Record) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, h := range r.Headers {
		all[h.Key] = string(h.Value)
	}
	require.Len(t, all, len(r.Headers), "a header came twice")
	return all
}

func attributesOf(t *testing.T, e *event.Event) map[string]string {
	t.Helper()
	all := map[string]string{
		"specversion": e.SpecVersion(), "id": e.ID(), "source": e.Source(), "type": e.Type(), "subject": e.Subject(),
		"dataschema": e.DataSchema(), "datacontenttype": e.DataContentType(),
	}
	maps.DeleteFunc(all, func(_, value string) bool { return value == "" })
	if !e.Time().IsZero() {
		all["time"] = types.FormatTime(e.Time())
	}
	for name, value := range e.Extensions() {
		text, err := types.Format(value)
		require.NoError(t, err)
		all[name] = text
	}
	return all
}
