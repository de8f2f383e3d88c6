package envelope

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/jsonb"
)

// A row that a writer has inserted is a record in both forms, from which a consumer reads the same event, or an error
// that names the field.
func FuzzStoredEvent(f *testing.F) {
	f.Add("shop.order.created.v1", "shop", "Order", "1", "application/json", `{"total": 1.50}`, `{"correlationid": "c", "traceparent": "`+someTrace+`"}`, true)
	f.Add("order", "/s", "", "<&>\u2028", "text/plain", `"a text"`, `{"ce_market": "KRW", "tenant": "\"traceparent\": \"x\""}`, true)
	f.Add("t", "s", "a", "i", "", "\xff\x00", `null`, false)
	f.Add("t", "s", "a", "i", "", " 0", "", true)
	f.Add("t", "s", "a", "i", "application/cloudevents+json", `{"specversion":"1.0","id":"2","source":"s","type":"t"}`, `{}`, true)
	f.Add("t", "s", "a", "i", "application/json", `1`, `{"Content-Type": "a/b", "CE_ID": "2", "dlq_error": "e", "replay_of": "t-0-1"}`, true)
	f.Add("t", "s", "a", "i", "application/json", `1`, `{"ce_": "", "": "1"}`, true)
	f.Fuzz(func(t *testing.T, eventType, source, aggregateType, aggregateID, contentType, payload, headers string, isJSON bool) {
		for _, text := range []string{eventType, source, aggregateType, aggregateID, contentType} {
			if text != "" && check.Text(text, MaxAggregateID) != nil {
				return // no row has it
			}
		}
		if isJSON {
			payload = strings.Trim(payload, " \t\r\n") // jsonb prints none around a value
			if _, err := jsonb.Check([]byte(payload)); err != nil {
				return
			}
		}
		if _, err := jsonb.Check([]byte(headers)); headers != "" && err != nil {
			return
		}
		e := orderCreated(func(e *Event) {
			e.EventType, e.Source, e.AggregateType, e.AggregateID = []byte(eventType), []byte(source), []byte(aggregateType), []byte(aggregateID)
			e.ContentType, e.Payload, e.IsJSON = []byte(contentType), []byte(payload), isJSON
			if headers != "" {
				e.Headers = []byte(headers)
			}
		})
		for _, inJSON := range []bool{false, true} {
			value, fields, err := recordOf(e, inJSON)
			if err != nil {
				var bad *FieldError
				require.ErrorAs(t, err, &bad)
				require.Less(t, len(err.Error()), 2_000)
				require.Contains(t, []string{"event_type", "source", "aggregate_id", "content_type", "headers"}, bad.Field)
				continue
			}
			requireSameEvent(t, e, value, fields)
		}
	})
}

// requireSameEvent requires that a consumer reads the event of a row from its record.
func requireSameEvent(t *testing.T, e *Event, value []byte, fields []field) {
	t.Helper()
	each := func(yield func(string, []byte) bool) {
		for _, f := range fields {
			if !yield(f.name, []byte(f.value)) {
				return
			}
		}
	}
	m, err := DecodeRecord(value, each)
	require.NoError(t, err)
	own, err := e.OwnHeaders()
	require.NoError(t, err)
	wantExtensions, wantHeaders := map[string]string{"aggregatetype": string(e.AggregateType)}, map[string][]string{}
	for name, value := range own {
		attribute := eventheader.Attribute(name)
		if attribute != "" {
			wantExtensions[attribute] = value
		}
		if (attribute == "" || attribute == eventheader.TraceParent) && !deadletter.IsOwn(name) {
			wantHeaders[name] = []string{value}
		}
	}
	got := PlainHeaders(each)
	if got == nil {
		got = map[string][]string{}
	}
	require.Equal(t, []string{string(e.EventID), string(e.Source), string(e.EventType), string(e.AggregateID), string(e.ContentType)},
		[]string{m.ID, m.Source, m.Type, m.Subject, m.ContentType})
	require.Equal(t, string(e.OccurredAt), string(AppendTime(nil, m.Time)))
	require.Equal(t, wantExtensions, m.Extensions)
	require.Equal(t, wantHeaders, got)
	require.True(t, bytes.Equal(e.Payload, m.Data), "%q, want %q", m.Data, e.Payload)
	printed := Event{Headers: printedHeaders(t, own)}
	require.Equal(t, own[eventheader.TraceParent], printed.TraceParent())
}

// printedHeaders returns headers as jsonb prints them.
func printedHeaders(t *testing.T, own map[string]string) []byte {
	t.Helper()
	var members []string
	for _, name := range slices.Sorted(maps.Keys(own)) {
		var pair [2]bytes.Buffer
		for i, text := range []string{name, own[name]} {
			encoder := json.NewEncoder(&pair[i])
			encoder.SetEscapeHTML(false)
			require.NoError(t, encoder.Encode(text))
		}
		members = append(members, strings.TrimSpace(pair[0].String())+": "+strings.TrimSpace(pair[1].String()))
	}
	return []byte("{" + strings.Join(members, ", ") + "}")
}
