package itest

import (
	"context"
	"encoding"
	"encoding/json"
	"math"
	"math/big"
	"os"
	"os/exec"
	"reflect"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

const badText = "caf\xe9" // Latin-1

type (
	// note is a text in a field.
	note struct {
		Text string `json:"text"`
	}
	// sealed keeps its text in an unexported field of an unexported field.
	sealed struct{ inner struct{ text *string } }
	// labelled has texts of a named type, as keys and as values.
	labelled struct{ Labels map[label]label }
	label    string
	// spoken knows how to turn itself into text.
	spoken []byte
)

func seal(text string) (s sealed) { s.inner.text = &text; return s }

// hidden is written by its MarshalJSON alone.
type hidden struct {
	Text string `json:"-"`
}

var someTexts = []string{"a", "b", badText}

func (h hidden) MarshalJSON() ([]byte, error) { return json.Marshal(h.Text) }

// stamp may be nil.
type stamp struct{}

func (*stamp) MarshalText() ([]byte, error) { return []byte("stamp"), nil }

func (s sealed) MarshalJSON() ([]byte, error) { return json.Marshal(s.inner.text) }
func (s spoken) MarshalText() ([]byte, error) { return s, nil }

// encoding/json would write U+FFFD for invalid UTF-8 without an error.
var badTexts = []struct {
	name  string
	value any
}{
	{"in a string", badText},
	{"at the end of a field", note{"abc" + badText}},
	{"in an embedded struct", struct{ note }{note{badText}}},
	{"behind a pointer", &note{badText}},
	{"behind a pointer to a pointer", new(new(badText))},
	{"in a slice", []string{"a", badText}},
	{"in an array", [2]note{{}, {badText}}},
	{"in a map's value", map[string]any{"a": 1, "b": badText}},
	{"in a map's key", map[string]int{badText: 1}},
	{"in a map in a map in a slice", []any{map[string]any{"a": map[string][]string{"b": {badText}}}}},
	{"of a named type", labelled{map[label]label{"a": badText}}},
	{"of a named type as key", labelled{map[label]label{badText: "a"}}},
	{"in an unexported field behind MarshalJSON", seal(badText)},
	{"in the middle of what is large", append(make([]string, 1000), badText, strings.Repeat("x", 1<<20))},
	{"beside U+FFFD", []string{"\ufffd", badText}},
	{"behind the end of a shorter slice of the same array", [][]string{someTexts[:1], someTexts}},
	{"behind an empty slice of the same array", struct{ None, All []string }{someTexts[:0], someTexts}},
	{"in a field that JSON leaves out but MarshalJSON writes", hidden{Text: badText}},
	{"as a surrogate in UTF-8", "\xed\xa0\x80"},
	{"as half a character", "\xf0\x9f\x98"},
}

func TestJSONRefusesBadText(t *testing.T) {
	t.Parallel()
	for _, tt := range badTexts {
		t.Run(tt.name, func(t *testing.T) {
			_, err := json.Marshal(tt.value)
			require.NoError(t, err, "encoding/json sees nothing")
			_, err = outbox.JSON().Encode(t.Context(), tt.value)
			require.ErrorIs(t, err, outbox.ErrUTF8)
		})
	}
}

// encoding/json writes null for it, and there is nothing to ask.
func TestJSONRefusesBadTextBesideNil(t *testing.T) {
	t.Parallel()
	type pair struct {
		M    encoding.TextMarshaler
		Text string
	}
	require.NotPanics(t, func() {
		_, err := outbox.JSON().Encode(t.Context(), pair{nil, badText})
		require.ErrorIs(t, err, outbox.ErrUTF8)
		_, err = outbox.JSON().Encode(t.Context(), pair{(*stamp)(nil), badText})
		require.ErrorIs(t, err, outbox.ErrUTF8)
	})
}

// The text that MarshalText returns is no string field of anybody, and
// encoding/json replaces its bad bytes too.
func TestJSONRefusesBadMarshalText(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]any{
		"as a value": spoken(badText), "in a field": struct{ S spoken }{spoken(badText)},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := outbox.JSON().Encode(t.Context(), value)
			require.ErrorIs(t, err, outbox.ErrUTF8)
		})
	}
}

var goodTexts = []struct {
	name  string
	value any
	want  string
}{
	{"a real U+FFFD", note{"a\ufffdb"}, `{"text":"a` + "\ufffd" + `b"}`},
	{"the six characters of its escape as JSON", json.RawMessage(`"\ufffd"`), `"\ufffd"`},
	{"its escape in capitals", json.RawMessage(`"\uFFFD"`), `"\uFFFD"`},
	{"the six characters of its escape as text", note{`\ufffd`}, `{"text":"\\ufffd"}`},
	{"its escape beside good texts", map[string]any{"a": json.RawMessage(`"\ufffd"`), "b": "주문"}, `{"a":"\ufffd","b":"주문"}`},
	{"its escape beside nil", []any{nil, (*note)(nil), map[string]string(nil), json.RawMessage(`"\ufffd"`)}, `[null,null,null,"\ufffd"]`},
	{"its escape beside bytes that are no text", []any{[]byte(badText), json.RawMessage(`"\ufffd"`)}, `["Y2Fm6Q==","\ufffd"]`},
	{"bytes that are no text", []byte(badText), `"Y2Fm6Q=="`},
	{"good text in an unexported field", seal("주문"), `"주문"`},
	{"every other control character", "\x01\x1f\x7f", `"\u0001\u001f` + "\x7f" + `"`},
}

func TestJSONAcceptsGoodText(t *testing.T) {
	t.Parallel()
	for _, tt := range goodTexts {
		t.Run(tt.name, func(t *testing.T) {
			b, err := outbox.JSON().Encode(t.Context(), tt.value)
			require.NoError(t, err)
			require.Equal(t, tt.want, string(b))
		})
	}
}

func TestJSONCannotEncode(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]any{"a channel": make(chan int), "a function": func() {}, "NaN": math.NaN(), "infinity": math.Inf(1)} {
		_, err := outbox.JSON().Encode(t.Context(), value)
		require.Error(t, err, name)
	}
}

// priced has a member that only a pointer to it encodes; marked and noted are such values themselves.
type (
	priced struct {
		Amount big.Int
	}
	marked struct{ text string }
	noted  struct{ text string }
)

func (m *marked) MarshalJSON() ([]byte, error)   { return json.Marshal(m.text) }
func (m *marked) UnmarshalJSON(b []byte) error   { return json.Unmarshal(b, &m.text) }
func (n *noted) MarshalText() ([]byte, error)    { return []byte(n.text), nil }
func (n *noted) UnmarshalText(text []byte) error { n.text = string(text); return nil }

// An event is a value, and what its pointer says of its encoding holds as well.
func TestJSONAsksPointers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		event, decoded any
		want           string
	}{
		{priced{*big.NewInt(42)}, new(priced), `{"Amount":42}`},
		{marked{"a"}, new(marked), `"a"`},
		{noted{"a"}, new(noted), `"a"`},
		{[1]marked{{"a"}}, new([1]marked), `["a"]`},
	} {
		data, err := outbox.JSON().Encode(t.Context(), tt.event)
		require.NoError(t, err)
		require.Equal(t, tt.want, string(data), "%T", tt.event)
		require.NoError(t, outbox.JSON().Decode(t.Context(), data, tt.decoded))
		require.Equal(t, tt.event, reflect.ValueOf(tt.decoded).Elem().Interface())
	}
	for _, event := range []any{marked{badText}, noted{badText}, struct{ N noted }{noted{badText}}} {
		_, err := outbox.JSON().Encode(t.Context(), event)
		require.ErrorIs(t, err, outbox.ErrUTF8, "%T", event)
	}
	data, err := outbox.JSON().Encode(t.Context(), nulled{})
	require.NoError(t, err, "it decides that by itself")
	require.Equal(t, "null", string(data))
	_, err = outbox.JSON().Encode(t.Context(), nil)
	require.ErrorContains(t, err, "null")
}

// nulled is null.
type nulled struct{}

func (*nulled) MarshalJSON() ([]byte, error) { return []byte("null"), nil }

// What JSON encodes, it decodes.
func TestJSONDecode(t *testing.T) {
	t.Parallel()
	codec := outbox.JSON()
	require.Equal(t, "application/json", codec.ContentType)
	b, err := codec.Encode(t.Context(), note{"주문 \u2028 <>&"})
	require.NoError(t, err)
	var got note
	require.NoError(t, codec.Decode(t.Context(), b, &got))
	require.Equal(t, note{"주문 \u2028 <>&"}, got)
	require.Error(t, codec.Decode(t.Context(), []byte(`{`), &got))
}

// family has a child that knows its parent; JSON leaves the way back out.
type family struct {
	Parent   *family   `json:"-"`
	Children []*family `json:"children,omitempty"`
	Name     string    `json:"name"`
}

// A bad byte in a name, which may come from any user, sends the search for it
// round in circles where values point back at each other. A stack overflow
// cannot be recovered from: it ends the process, so it happens in another one.
func TestJSONRefusesBadTextInCircle(t *testing.T) {
	t.Parallel()
	if os.Getenv("OUTBOX_TEST_CIRCLE") != "" {
		debug.SetMaxStack(16 << 20)
		parent := &family{Name: badText}
		parent.Children = []*family{{Parent: parent, Name: "good"}}
		_, err := outbox.JSON().Encode(t.Context(), *parent)
		require.ErrorIs(t, err, outbox.ErrUTF8)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestJSONRefusesBadTextInCircle$")
	cmd.Env = append(os.Environ(), "OUTBOX_TEST_CIRCLE=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out[:min(len(out), 300)])
}

// A codec gets the context of Record in the recorder, and the context of the handlers in a
// consumer.
func TestCodecContext(t *testing.T) {
	t.Parallel()
	type tenantKey struct{}
	codec := outbox.JSON()
	var encodedFor any
	var decodedFor string
	codec.Encode = func(ctx context.Context, event any) ([]byte, error) {
		encodedFor = ctx.Value(tenantKey{})
		return outbox.JSON().Encode(ctx, event)
	}
	codec.Decode = func(ctx context.Context, data []byte, event any) error {
		decodedFor = outbox.CorrelationID(ctx)
		return outbox.JSON().Decode(ctx, data, event)
	}
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Codec(codec))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	ctx := context.WithValue(outbox.WithCorrelationID(t.Context(), "corr-1"), tenantKey{}, "acme")
	record, err := rec.KafkaRecord(ctx, sale{Product: "p"})
	require.NoError(t, err)
	require.Equal(t, "acme", encodedFor)
	c, err := outbox.NewConsumer(nil, nil, events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error { return nil }))
	require.NoError(t, err)
	require.NoError(t, c.Deliver(t.Context(), record))
	require.Equal(t, "corr-1", decodedFor, "from the event, as handlers have it")
}

// The attribute dataschema is what the codec says; a text that is none is refused.
func TestCodecDataSchema(t *testing.T) {
	t.Parallel()
	for schema, want := range map[string]error{"https://schemas.example/ids/7": nil, "": nil, "a\nb": outbox.ErrMalformed} {
		codec := outbox.JSON()
		codec.DataSchema = func(ctx context.Context) string {
			require.Equal(t, "corr-1", outbox.CorrelationID(ctx))
			return schema
		}
		events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Codec(codec))
		require.NoError(t, err)
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
		require.NoError(t, err)
		record, err := rec.KafkaRecord(outbox.WithCorrelationID(t.Context(), "corr-1"), sale{Product: "p"})
		if want != nil {
			requireRefused(t, err, want, refusal{saleType, -1, "attributes"})
			continue
		}
		require.NoError(t, err)
		m, err := outbox.DecodeCloudEvent(record)
		require.NoError(t, err)
		require.Equal(t, schema, m.Extensions["dataschema"])
	}
}

// While something that a codec needs is unavailable, a handler fails with that, and the event is no dead letter.
func TestCodecUnavailable(t *testing.T) {
	t.Parallel()
	codec := outbox.JSON()
	codec.Decode = func(context.Context, []byte, any) error { return outbox.Unavailable(errDown) }
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Codec(codec))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	record, err := rec.KafkaRecord(t.Context(), sale{Product: "p"})
	require.NoError(t, err)
	c, err := outbox.NewConsumer(nil, nil, events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error { return nil }))
	require.NoError(t, err)
	err = c.Deliver(t.Context(), record)
	require.ErrorIs(t, err, errDown)
	require.NotErrorIs(t, err, outbox.ErrMalformed)
}

// closed is an event without members, and remarked one without required members.
type (
	closed   struct{}
	remarked struct {
		Remark string `json:"remark,omitempty"`
	}
)

// A payload that is null, or has nothing of what an event of its type always has, is no
// event: encoding/json would make a zero event of it.
func TestJSONIsNoZeroEvent(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		data  string
		event any
		want  bool
	}{
		{`null`, new(note), false},
		{" null\n", new(note), false},
		{`null`, new(map[string]int), false},
		{`{}`, new(note), false},
		{`{"payload": {"text": "abc"}}`, new(note), false},
		{`{"text": ""}`, new(note), true},
		{`{"TEXT": ""}`, new(note), true},
		{`{"text": null, "more": 1}`, new(note), true},
		{`{"text": "a"}`, new(note), true},
		{`{}`, new(closed), true},
		{`{"unknown": 1}`, new(closed), true},
		{`{}`, new(remarked), true},
		{`{}`, new(map[string]int), true},
		{`0`, new(int), true},
		{`""`, new(string), true},
		{`null`, new(int), false},
		{`null`, new(decided), true},
		{`{}`, new(decided), true},
	} {
		err := outbox.JSON().Decode(t.Context(), []byte(tt.data), tt.event)
		require.Equal(t, tt.want, err == nil, "%s of %T: %v", tt.data, tt.event, err)
	}
	_, err := outbox.JSON().Encode(t.Context(), map[string]int(nil))
	require.ErrorContains(t, err, "null", "no consumer could read it")
	data, err := outbox.JSON().Encode(t.Context(), decided{})
	require.NoError(t, err)
	require.Equal(t, "null", string(data))
}

// decided says itself how it is written and read.
type decided struct{}

func (decided) MarshalJSON() ([]byte, error)  { return []byte("null"), nil }
func (*decided) UnmarshalJSON(_ []byte) error { return nil }
