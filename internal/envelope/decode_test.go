package envelope

import (
	"encoding/json"
	"iter"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/eventheader"
)

// sdkRecord is a case of testdata/cloudevents_sdk.json: a record that the official
// CloudEvents SDK has sent, and the event that it was asked to send.
type sdkRecord struct {
	Name       string
	Headers    map[string]string
	Value      *sdkContent
	Attributes map[string]string
	Data       *sdkContent
}

type sdkContent struct {
	Text   string
	Base64 []byte
}

func (c *sdkContent) bytes() []byte {
	switch {
	case c == nil:
		return nil
	case c.Base64 != nil:
		return c.Base64
	default:
		return []byte(c.Text)
	}
}

// What the SDK sends is read as it was meant.
func TestDecodeSDK(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("testdata/cloudevents_sdk.json")
	require.NoError(t, err)
	var records []sdkRecord
	require.NoError(t, json.Unmarshal(file, &records))
	require.GreaterOrEqual(t, len(records), 40)
	for _, r := range records {
		t.Run(r.Name, func(t *testing.T) {
			got, err := DecodeRecord(r.Value.bytes(), headersIn(r.Headers))
			if r.Attributes["specversion"] != "1.0" {
				requireUnreadable(t, err, "specversion", check.ErrMalformed)
				return
			}
			require.NoError(t, err)
			require.Equal(t, r.Attributes, attributesOf(got))
			require.Equal(t, r.Data.bytes(), got.Data, "and nil is nil")
		})
	}
}

func headersIn(all map[string]string) iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			if !yield(name, []byte(all[name])) {
				return
			}
		}
	}
}

// attributesOf returns everything of an event but its data.
func attributesOf(r *Message) map[string]string {
	all := map[string]string{
		"specversion": "1.0", "id": r.ID, "source": r.Source, "type": r.Type, "subject": r.Subject, "datacontenttype": r.ContentType,
	}
	maps.DeleteFunc(all, func(_, value string) bool { return value == "" })
	if !r.Time.IsZero() {
		all["time"] = r.Time.UTC().Format(time.RFC3339Nano)
	}
	maps.Copy(all, r.Extensions)
	return all
}

func requireUnreadable(t *testing.T, err error, field string, want error) {
	t.Helper()
	var rejected *FieldError
	require.ErrorAs(t, err, &rejected)
	require.Equal(t, field, rejected.Field, "%v", err)
	require.ErrorIs(t, err, want)
}

// What we send, we read.
func TestDecodeRecord(t *testing.T) {
	t.Parallel()
	headers := []byte(`{"ce_market": "KRW-BTC", "ce_traceid": "t1", "correlationid": "corr-1", "tenant": "a", "traceparent": "` + someTrace + `"}`)
	for name, e := range map[string]*Event{
		"JSON":      orderCreated(func(e *Event) { e.Headers = headers }),
		"JSON null": orderCreated(func(e *Event) { e.Headers, e.Payload = headers, []byte(`null`) }),
		"bytes":     protobuf([]byte{0, 1, 255}),
		"no bytes":  protobuf([]byte{}),
		"microseconds": orderCreated(func(e *Event) {
			e.OccurredAt = AppendTime(nil, time.Date(2026, 2, 3, 4, 5, 6, 1000, time.UTC))
		}),
	} {
		own, err := e.OwnHeaders()
		require.NoError(t, err)
		want := map[string]string{
			"specversion": "1.0", "id": string(e.EventID), "source": "commerce-api", "type": "loopers.order.created.v1", "subject": "order-1",
			"time": string(e.OccurredAt), "aggregatetype": "Order", "datacontenttype": string(e.ContentType),
		}
		for name, value := range own {
			if attribute := eventheader.Attribute(name); attribute != "" { // tenant is none
				want[attribute] = value
			}
		}
		for _, inJSON := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				value, headers, err := recordOf(e, inJSON)
				require.NoError(t, err)
				got, err := DecodeRecord(value, func(yield func(string, []byte) bool) {
					for _, h := range headers {
						if !yield(h.name, []byte(h.value)) {
							return
						}
					}
				})
				require.NoError(t, err)
				require.Equal(t, want, attributesOf(got))
				require.Equal(t, e.Payload, got.Data)
			})
		}
	}
}

var structuredRecord = map[string]string{"content-type": "Application/CloudEvents+JSON ; charset=UTF-8"}

var readableTests = []struct {
	name, value string
	want        map[string]string // in addition to id, source and type
	data        string
}{
	{"members that are null", `"subject": null, "time": null, "data_base64": null, "x": null, "data": 1`, nil, "1"},
	{"data of a JSON type, which is not looked into", `"datacontenttype": "a/B+JSON;c=d", "data": "{}"`, map[string]string{"datacontenttype": "a/B+JSON;c=d"}, `"{}"`},
	{"data of another JSON type", `"datacontenttype": "text/json", "data": [1,  2]`, map[string]string{"datacontenttype": "text/json"}, "[1,  2]"},
	{"data that is null", `"data": null`, nil, "null"},
	{"an integer, and what is true", `"n": -5, "t": true, "data": 1`, map[string]string{"n": "-5", "t": "true"}, "1"},
	{"a time in small letters", `"time": "2026-02-03t04:05:06z", "data": 1`, map[string]string{"time": "2026-02-03T04:05:06Z"}, "1"},
}

func TestDecodeStructured(t *testing.T) {
	t.Parallel()
	for _, tt := range readableTests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := DecodeRecord([]byte(`{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", `+tt.value+`}`), headersIn(structuredRecord))
			require.NoError(t, err)
			want := map[string]string{"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}
			maps.Copy(want, tt.want)
			require.Equal(t, want, attributesOf(got))
			require.Equal(t, tt.data, string(got.Data))
		})
	}
}

var unreadableTests = []struct {
	name, value, field string
	want               error
}{
	{"not JSON", `{`, "value", check.ErrMalformed},
	{"an array", `[]`, "value", check.ErrMalformed},
	{"null", `null`, "specversion", check.ErrEmpty},
	{"bad UTF-8", "{\"id\": \"\xff\"}", "value", check.ErrUTF8},
	{"no id", `{"specversion": "1.0", "source": "/s", "type": "t"}`, "id", check.ErrEmpty},
	{"an empty source", `{"specversion": "1.0", "id": "1", "source": "", "type": "t"}`, "source", check.ErrEmpty},
	{"a type that is null", `{"specversion": "1.0", "id": "1", "source": "/s", "type": null}`, "type", check.ErrEmpty},
	{"another version", `{"specversion": "2.0", "id": "1", "source": "/s", "type": "t"}`, "specversion", check.ErrMalformed},
	{"a time of no form", `{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "time": "today"}`, "time", check.ErrTime},
	{"an object for an attribute", `{"x": {}}`, "x", check.ErrMalformed},
	{"an object for an attribute without a name", `{"": {}}`, "attributes", check.ErrMalformed},
	{"half a surrogate pair", `{"id": "\udead"}`, "id", check.ErrJSON},
	{"a NUL", `{"id": "\u0000"}`, "id", check.ErrNUL},
	{"data twice", `{"data": 1, "data_base64": "AA=="}`, "data", check.ErrMalformed},
	{"data that is not base64", `{"data_base64": "?"}`, "data", check.ErrMalformed},
	{"data that is not the text it should be", `{"datacontenttype": "text/plain", "data": 1}`, "data", check.ErrMalformed},
}

func TestDecodeUnreadable(t *testing.T) {
	t.Parallel()
	for _, tt := range unreadableTests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := DecodeRecord([]byte(tt.value), headersIn(structuredRecord))
			requireUnreadable(t, err, tt.field, tt.want)
		})
	}
	_, err := DecodeRecord(nil, headersIn(map[string]string{"content-type": "application/cloudevents-batch+json"}))
	requireUnreadable(t, err, "content-type", check.ErrMalformed)
	_, err = DecodeRecord([]byte(`{}`), headersIn(map[string]string{"content-type": "application/json"}))
	requireUnreadable(t, err, "specversion", check.ErrEmpty)
	_, err = DecodeRecord(nil, headersIn(map[string]string{"ce_specversion": "1.0", "ce_id": "\xff", "ce_source": "/s", "ce_type": "t"}))
	requireUnreadable(t, err, "id", check.ErrUTF8)
	_, err = DecodeRecord(nil, headersIn(map[string]string{"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/s", "ce_type": "t", "ce_": "\xff"}))
	requireUnreadable(t, err, "attributes", check.ErrUTF8)
}

// Errors about megabytes are short, wherever those are in a record.
func TestErrorsOfHugeRecordsAreShort(t *testing.T) {
	t.Parallel()
	huge := strings.Repeat("9", 1<<20)
	good := map[string]string{"ce_specversion": "1.0", "ce_id": "i", "ce_source": "s", "ce_type": "t", "content-type": "application/json"}
	structured := func(value string) (string, map[string]string) {
		return value, map[string]string{"content-type": "application/cloudevents+json"}
	}
	with := func(header, value string) (string, map[string]string) {
		headers := maps.Clone(good)
		headers[header] = value
		return "", headers
	}
	type input func() (value string, headers map[string]string)
	for name, hostile := range map[string]input{
		"a type":         func() (string, map[string]string) { _, h := with("ce_type", huge); h["ce_id"] = ""; return "", h },
		"a version":      func() (string, map[string]string) { return with("ce_specversion", huge) },
		"a time":         func() (string, map[string]string) { return with("ce_time", huge) },
		"an attribute":   func() (string, map[string]string) { return with("ce_"+huge, "\x00") },
		"a content type": func() (string, map[string]string) { return with("content-type", "application/cloudevents+"+huge) },
		"a member":       func() (string, map[string]string) { return structured(`{"` + huge + `": {}}`) },
		"a number": func() (string, map[string]string) {
			return structured(`{"datacontenttype": "text/plain", "data": ` + huge + `}`)
		},
		"a number in base64": func() (string, map[string]string) { return structured(`{"data_base64": ` + huge + `}`) },
	} {
		value, headers := hostile()
		_, err := DecodeRecord([]byte(value), func(yield func(string, []byte) bool) {
			for name, value := range headers {
				if !yield(name, []byte(value)) {
					return
				}
			}
		})
		require.ErrorAs(t, err, new(*FieldError), name)
		require.LessOrEqual(t, len(err.Error()), 2000, name)
	}
}
