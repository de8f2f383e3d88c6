package envelope

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/eventheader"
)

const someTrace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// orderCreated is an event as a relay reads it; change makes it another.
func orderCreated(change func(*Event)) *Event {
	e := &Event{
		ID:            7,
		EventID:       []byte("0190a5c4-7b1e-7c3d-8a2b-1f2e3d4c5b6a"),
		EventType:     []byte("loopers.order.created.v1"),
		Source:        []byte("commerce-api"),
		AggregateType: []byte("Order"),
		AggregateID:   []byte("order-1"),
		Payload:       []byte(`{"total": 1.50}`),
		IsJSON:        true,
		ContentType:   []byte("application/json"),
		OccurredAt:    AppendTime(nil, time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)),
	}
	if change != nil {
		change(e)
	}
	return e
}

// field is a header of a record.
type field struct{ name, value string }

// recordOf collects what Record passes to its callbacks.
func recordOf(e *Event, inJSON bool) (value []byte, headers []field, err error) {
	value, err = e.Record(RecordForm{InJSON: inJSON}, func(name string, value []byte) { headers = append(headers, field{name, string(value)}) })
	return value, headers, err
}

var orderCreatedAttributes = []field{
	{"ce_specversion", "1.0"},
	{"ce_id", "0190a5c4-7b1e-7c3d-8a2b-1f2e3d4c5b6a"},
	{"ce_source", "commerce-api"},
	{"ce_type", "loopers.order.created.v1"},
	{"ce_subject", "order-1"},
	{"ce_time", "2026-02-03T04:05:06Z"},
	{"ce_aggregatetype", "Order"},
	{"content-type", "application/json"},
}

var binaryTests = []struct {
	name   string
	change func(*Event)
	more   []field // behind orderCreatedAttributes
}{
	{"no headers", nil, nil},
	{"headers of SQL NULL in JSON", func(e *Event) { e.Headers = []byte(`null`) }, nil},
	{"no headers in an object", func(e *Event) { e.Headers = []byte(`{}`) }, nil},
	{"a correlation id", func(e *Event) { e.Headers = []byte(`{"correlationid": "corr-1"}`) },
		[]field{{"ce_correlationid", "corr-1"}}},
	{"a trace, also where tracing libraries look", func(e *Event) { e.Headers = []byte(`{"traceparent": "` + someTrace + `"}`) },
		[]field{{"ce_traceparent", someTrace}, {"traceparent", someTrace}}},
	{"headers of its own, sorted", func(e *Event) { e.Headers = []byte(`{"tenant": "a \"b\" é", "Region": "", "zone": "1"}`) },
		[]field{{"Region", ""}, {"tenant", `a "b" é`}, {"zone", "1"}}},
	{"other attributes, which are no headers as such", func(e *Event) {
		e.Headers = []byte(`{"market": "no attribute", "ce_market": "KRW-BTC", "ce_traceid": "t1", "traceid": "no attribute either"}`)
	}, []field{{"ce_market", "KRW-BTC"}, {"ce_traceid", "t1"}, {"market", "no attribute"}, {"traceid", "no attribute either"}}},
	{"everything", func(e *Event) {
		e.Headers = []byte(`{"a": "1", "correlationid": "c", "traceparent": "` + someTrace + `", "z": "2"}`)
	}, []field{{"a", "1"}, {"ce_correlationid", "c"}, {"ce_traceparent", someTrace}, {"traceparent", someTrace}, {"z", "2"}}},
}

// https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/kafka-protocol-binding.md#32-binary-content-mode
func TestBinary(t *testing.T) {
	t.Parallel()
	for _, tt := range binaryTests {
		t.Run(tt.name, func(t *testing.T) {
			value, headers, err := recordOf(orderCreated(tt.change), false)
			require.NoError(t, err)
			require.Equal(t, `{"total": 1.50}`, string(value))
			want := append([]field(nil), orderCreatedAttributes...)
			require.Equal(t, append(want, tt.more...), headers)
		})
	}
}

// Bytes travel as they are, under their own content type.
func TestBinaryBytes(t *testing.T) {
	t.Parallel()
	value, headers, err := recordOf(protobuf([]byte{0, 1, 255}), false)
	require.NoError(t, err)
	require.Equal(t, []byte{0, 1, 255}, value)
	require.Contains(t, headers, field{"content-type", "application/protobuf"})
}

func protobuf(payload []byte) *Event {
	return orderCreated(func(e *Event) {
		e.Payload, e.IsJSON, e.ContentType = payload, false, []byte("application/protobuf")
	})
}

// https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md
func TestStructured(t *testing.T) {
	t.Parallel()
	e := orderCreated(func(e *Event) {
		e.Headers = []byte(`{"ce_market": "KRW-\"BTC\"", "ce_traceid": "t1", "correlationid": "corr-1", "tenant": "a", "traceparent": "` + someTrace + `"}`)
	})
	value, headers, err := recordOf(e, true)
	require.NoError(t, err)
	require.Equal(t, `{"specversion":"1.0","id":"0190a5c4-7b1e-7c3d-8a2b-1f2e3d4c5b6a","source":"commerce-api",`+
		`"type":"loopers.order.created.v1","subject":"order-1","time":"2026-02-03T04:05:06Z","aggregatetype":"Order",`+
		`"market":"KRW-\"BTC\"","traceid":"t1","correlationid":"corr-1","traceparent":"`+someTrace+`","datacontenttype":"application/json","data":{"total": 1.50}}`, string(value))
	require.Equal(t, []field{
		{"content-type", "application/cloudevents+json; charset=UTF-8"}, {"tenant", "a"}, {"traceparent", someTrace},
	}, headers)
}

var hardTexts = []string{
	`a"b`, `a\b`, "a\nb\tc\x01\x7f", "</script>&", "주문 😀", "\u2028\u2029", "\ufffd", strings.Repeat("x", 255), `{"a":1}`, `\u0041`,
}

// Whatever the texts are, the value is JSON with those texts in it.
func TestStructuredEscapes(t *testing.T) {
	t.Parallel()
	for _, text := range hardTexts {
		headers, err := json.Marshal(map[string]string{"own": text, eventheader.Correlation: text}) // a row may hold what Record refuses
		require.NoError(t, err)
		e := orderCreated(func(e *Event) {
			e.Source, e.EventType, e.AggregateID, e.AggregateType, e.ContentType = []byte(text), []byte(text), []byte(text), []byte(text), []byte(text+"+json")
			e.Headers = headers
		})
		value, own, err := recordOf(e, true)
		require.NoError(t, err)
		var got map[string]any
		require.NoError(t, json.Unmarshal(value, &got), "%s", value)
		require.Equal(t, map[string]any{
			"specversion": "1.0", "id": string(e.EventID), "time": "2026-02-03T04:05:06Z", "data": map[string]any{"total": 1.5},
			"source": text, "type": text, "subject": text, "aggregatetype": text, "datacontenttype": text + "+json", "correlationid": text,
		}, got)
		require.Contains(t, own, field{"own", text})

		_, binary, err := recordOf(e, false)
		require.NoError(t, err)
		for _, name := range []string{"ce_source", "ce_type", "ce_subject", "ce_aggregatetype", "ce_correlationid", "own"} {
			require.Contains(t, binary, field{name, text}, "as it is, in bytes")
		}
		require.Contains(t, binary, field{"content-type", text + "+json"})
	}
}

// data is any JSON value; data_base64 is what is not JSON, or is JSON under another content type.
func TestStructuredData(t *testing.T) {
	t.Parallel()
	for _, data := range []string{`null`, `[]`, `"text"`, `1e5`, `{"a": "주문"}`} {
		value, _, err := recordOf(orderCreated(func(e *Event) { e.Payload = []byte(data) }), true)
		require.NoError(t, err)
		var got map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(value, &got))
		require.Equal(t, data, string(got["data"]))
		require.NotContains(t, got, "data_base64")
	}
	value, _, err := recordOf(orderCreated(func(e *Event) { e.ContentType, e.Payload = []byte("text/plain"), []byte(`"a text"`) }), true)
	require.NoError(t, err)
	require.Contains(t, string(value), `"data_base64":"`+base64.StdEncoding.EncodeToString([]byte(`"a text"`))+`"}`)
	for _, data := range [][]byte{{}, {0}, {0, 1, 254, 255}, []byte("text"), []byte(strings.Repeat("\xff", 1000))} {
		value, _, err := recordOf(protobuf(data), true)
		require.NoError(t, err)
		var got map[string]any
		require.NoError(t, json.Unmarshal(value, &got))
		require.Equal(t, base64.StdEncoding.EncodeToString(data), got["data_base64"])
		require.Equal(t, "application/protobuf", got["datacontenttype"])
		require.NotContains(t, got, "data")
	}
}

var timeTests = []struct {
	name string
	time time.Time
	want string
}{
	{"a whole second", time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC), "2026-02-03T04:05:06Z"},
	{"microseconds", time.Date(2026, 2, 3, 4, 5, 6, 123456000, time.UTC), "2026-02-03T04:05:06.123456Z"},
	{"a tenth of a second", time.Date(2026, 2, 3, 4, 5, 6, 100000000, time.UTC), "2026-02-03T04:05:06.1Z"},
	{"one microsecond", time.Date(2026, 2, 3, 4, 5, 6, 1000, time.UTC), "2026-02-03T04:05:06.000001Z"},
	{"another zone", time.Date(2026, 2, 3, 4, 5, 6, 0, time.FixedZone("KST", 9*3600)), "2026-02-02T19:05:06Z"},
	{"a zone of half an hour", time.Date(2026, 2, 3, 4, 5, 6, 0, time.FixedZone("", -(3*3600+1800))), "2026-02-03T07:35:06Z"},
	{"the year 1", time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), "0001-01-01T00:00:00.000001Z"},
	{"the last microsecond of 9999", time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC), "9999-12-31T23:59:59.999999Z"},
}

func TestEventTime(t *testing.T) {
	t.Parallel()
	for _, tt := range timeTests {
		t.Run(tt.name, func(t *testing.T) {
			e := orderCreated(func(e *Event) { e.OccurredAt = AppendTime(nil, tt.time) })
			_, headers, err := recordOf(e, false)
			require.NoError(t, err)
			require.Contains(t, headers, field{"ce_time", tt.want})
			value, _, err := recordOf(e, true)
			require.NoError(t, err)
			require.Contains(t, string(value), `"time":"`+tt.want+`"`)
			parsed, err := time.Parse(time.RFC3339Nano, tt.want)
			require.NoError(t, err)
			require.True(t, tt.time.Equal(parsed))
		})
	}
}

func TestDestinationAndKey(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name       string
		change     func(*Event)
		topic, key string
	}{
		{"by convention", nil, "order-events", "order-1"},
		{"a topic of its own", func(e *Event) { e.Topic = []byte("orders") }, "orders", "order-1"},
		{"a key of its own", func(e *Event) { e.PartitionKey = []byte("user-1") }, "order-events", "user-1"},
		{"an empty key, which is not NULL", func(e *Event) { e.PartitionKey = []byte{} }, "order-events", ""},
		{"a type without form but with a topic", func(e *Event) { e.EventType, e.Topic = []byte("!"), []byte("orders") }, "orders", "order-1"},
		{"a type of two segments", func(e *Event) { e.EventType = []byte("shop.order") }, "order-events", "order-1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := orderCreated(tt.change)
			topic, err := e.Destination()
			require.NoError(t, err)
			require.Equal(t, tt.topic, topic)
			require.Equal(t, tt.key, string(e.Key()))
		})
	}
}

// Rows of another writer cannot be sent if no topic follows from their type.
func TestDestinationOfForeignRow(t *testing.T) {
	t.Parallel()
	for _, eventType := range []string{"", "order", "LEDGER_POSTED", "a..b", ".order", "shop.", "shop.order created", "shop.주문", "shop.order\n", "shop/order.x"} {
		_, err := orderCreated(func(e *Event) { e.EventType = []byte(eventType) }).Destination()
		require.ErrorIs(t, err, check.ErrMalformed, "%q", eventType)
		rejected, ok := errors.AsType[*FieldError](err)
		require.True(t, ok)
		require.Equal(t, FieldError{EventType: eventType, Index: -1, Field: "event_type", Err: check.ErrMalformed}, *rejected)
	}
}

// Headers of another writer are an object of strings, or an error.
func TestHeadersOfForeignRow(t *testing.T) {
	t.Parallel()
	for _, headers := range []string{`{"ce_id": "1"}`, `{"ce_Market": "1"}`, `{"ce_traceparent": "1"}`, `{"ce_correlationid": "1"}`, `{"CE_ID": "1"}`, `{"Content-Type": "a/b"}`, `[]`, `"a"`, `1`, `true`, `{"a": 1}`, `{"a": {"b": "c"}}`, `{"a": ["b"]}`, ``, `{`} {
		for _, inJSON := range []bool{false, true} {
			_, _, err := recordOf(orderCreated(func(e *Event) { e.Headers = []byte(headers) }), inJSON)
			require.ErrorIs(t, err, check.ErrMalformed, headers)
			rejected, ok := errors.AsType[*FieldError](err)
			require.True(t, ok)
			require.Equal(t, "headers", rejected.Field)
			require.Equal(t, "loopers.order.created.v1", rejected.EventType)
			require.Equal(t, -1, rejected.Index)
		}
	}
}

// A content type of another writer does not make readers take the payload for the event.
func TestContentTypeOfForeignRow(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{"application/cloudevents+json", " Application/CloudEvents-Batch+json; a=b", "application/cloudevents"} {
		_, _, err := recordOf(orderCreated(func(e *Event) { e.ContentType = []byte(contentType) }), false)
		require.ErrorIs(t, err, check.ErrMalformed, contentType)
		rejected, ok := errors.AsType[*FieldError](err)
		require.True(t, ok)
		require.Equal(t, "content_type", rejected.Field)
	}
}

// Consumers that know nothing of CloudEvents find id and trace where they look, unless the
// event says something else there.
func TestFurtherHeaders(t *testing.T) {
	t.Parallel()
	form := RecordForm{Further: eventheader.Further{ID: "event-id", Trace: "x-trace-id"}}
	for headers, want := range map[string][]field{
		``:                     {{"event-id", string(orderCreated(nil).EventID)}},
		`{"ce_traceid": "t1"}`: {{"ce_traceid", "t1"}, {"event-id", string(orderCreated(nil).EventID)}, {"x-trace-id", "t1"}},
		`{"ce_traceid": "t1", "X-Trace-ID": "own", "Event-ID": "own"}`: {{"Event-ID", "own"}, {"X-Trace-ID", "own"}, {"ce_traceid", "t1"}},
	} {
		for _, inJSON := range []bool{false, true} {
			e := orderCreated(nil)
			if headers != "" {
				e.Headers = []byte(headers)
			}
			form.InJSON = inJSON
			var got []field
			_, err := e.Record(form, func(name string, value []byte) { got = append(got, field{name, string(value)}) })
			require.NoError(t, err)
			if !inJSON {
				require.Equal(t, append(slices.Clone(orderCreatedAttributes), want...), got)
				continue
			}
			want = slices.DeleteFunc(slices.Clone(want), func(f field) bool { return f.name == "ce_traceid" })
			require.Equal(t, want, got[1:])
		}
	}
}

// A traceparent is found as jsonb prints it, as anybody else may write it, and nowhere
// else.
func TestTraceParentOfEnvelope(t *testing.T) {
	t.Parallel()
	const tp = someTrace
	for headers, want := range map[string]string{
		``:                              "",
		`{}`:                            "",
		`{"traceparent": "` + tp + `"}`: tp,
		`{"a": "b", "traceparent": "` + tp + `", "z": "y"}`:                        tp,
		`{"a":"b","traceparent":"` + tp + `"}`:                                     tp,
		`{"a": "\"traceparent\": \"` + tp + `\""}`:                                 "",
		`{"a": "\"traceparent\": \"", "traceparent": "` + tp + `"}`:                tp,
		`{"a": "traceparent"}`:                                                     "",
		`{"a": "traceparent", "traceparent": "` + tp + `"}`:                        tp,
		`{"traceparent": "short", "z": "123456789012345678901234567890123456789"}`: "short",
		`{"traceparent": "\u0061` + tp[6:] + `"}`:                                  "a" + tp[6:],
		`{"traceparent": 1}`:                                                       "",
		`{"traceparent`:                                                            "",
	} {
		e := Event{}
		if headers != "" {
			e.Headers = []byte(headers)
		}
		require.Equal(t, want, e.TraceParent(), headers)
	}
}
