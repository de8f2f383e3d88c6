package outboxcontract_test

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxcontract"
)

// happened has what each event needs.
type happened struct{}

func (happened) OccurredAt() time.Time { return time.Unix(1, 0) }

func id[E any](E) string { return "id" }

// basics have the types that encoding/json knows.
type basics struct {
	happened
	Int      int
	Small    int8
	Unsigned uint32
	Float    float32
	Bool     bool
	Text     string
	Bytes    []byte
	Array    [2]byte
	Any      any
	Raw      json.RawMessage
	Number   json.Number
	Time     time.Time
	UUID     uuid.UUID
	Duration time.Duration
	Ints     map[int]string
	Addrs    map[netip.Addr]bool
	Addr     netip.Addr
	Ignored  string `json:"-"`
	Dash     string `json:"-,"` //nolint:staticcheck // it is allowed
	hidden   string //nolint:unused // it is not written
}

// options have the options of tags.
type options struct {
	happened
	Empty       string         `json:"empty,omitempty"`
	EmptyTime   time.Time      `json:"emptyTime,omitempty"` // never omitted
	ZeroTime    time.Time      `json:"zeroTime,omitzero"`
	EmptyArray  [1]int         `json:"emptyArray,omitempty"` // never omitted
	EmptyMap    map[string]int `json:"emptyMap,omitempty"`
	EmptyList   []line         `json:"emptyList,omitempty"`
	EmptyLine   *line          `json:"emptyLine,omitempty"`
	ZeroLine    line           `json:"zeroLine,omitzero"`
	Quoted      int64          `json:"quoted,string"`
	QuotedText  string         `json:"quotedText,string"`
	QuotedMaybe *bool          `json:"quotedMaybe,string"`
	QuotedTime  time.Time      `json:"quotedTime,string"` //nolint:staticcheck // not quoted
	QuotedOwn   Status         `json:"quotedOwn,string"`  // not quoted: MarshalText
	BadName     int            `json:"bad'name"`          //nolint:staticcheck // it is ignored
}

// pointers have what may be null.
type pointers struct {
	happened
	Int     *int
	Line    *line
	Time    *time.Time
	UUID    *uuid.UUID
	Lines   []line
	Maybe   []*line
	ByName  map[string]*line
	Twice   **string
	List    lines
	Version *version
	Status  *Status
}

type line struct {
	SKU   string `json:"sku"`
	Count int32  `json:"count"`
}

type lines []line

// embeds has fields of embedded structs, some of which hide others.
type embeds struct {
	happened
	base
	*Pointed
	Named  `json:"named"`
	Same   string
	Nested struct{ Same int }
}

type base struct {
	ID       string `json:"id"`
	Same     int
	Twice    string
	TagTwice string `json:"Tagged"`
}

// Pointed is embedded by a pointer: without it, its fields are missing.
type Pointed struct {
	Twice  int
	Tagged int
	Deep   float64
}

// Named is embedded under a name.
type Named struct{ Name string }

// tree is recursive.
type tree struct {
	happened
	Name     string           `json:"name"`
	Parent   *tree            `json:"parent"`
	Children []tree           `json:"children,omitempty"`
	Forest   forest           `json:"forest"`
	Labels   map[string]*tree `json:"labels,omitempty"`
}

type forest map[string]forest

// extremes have the values that are furthest from zero.
type extremes struct {
	happened
	Least    int64           `json:"least"`
	Most     int             `json:"most"`
	Unsigned uint64          `json:"unsigned"`
	Quoted   uint            `json:"quoted,string"`
	Float    float32         `json:"float"`
	Negative float32         `json:"negative"`
	Double   float64         `json:"double"`
	Number   json.Number     `json:"number,string"`
	Choice   *either         `json:"choice"`
	Choices  map[string]*six `json:"choices"`
}

// either and six have schemas of their own, which do not allow null.
type (
	either string
	six    int
)

func (either) JSONSchema() json.RawMessage {
	return json.RawMessage(`{"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]}`)
}

func (six) JSONSchema() json.RawMessage {
	return json.RawMessage(`{"allOf": [{"const": 6}], "x-enum-varnames": ["Six"]}`)
}

// version has a MarshalText, and others a MarshalJSON.
type (
	version struct{ Major, Minor int }
	byValue struct{ A int }
	byPtr   struct{ A int }
	// Status says its own schema.
	Status string
)

func (v version) MarshalText() ([]byte, error) { return []byte{byte('0' + v.Major&7)}, nil }
func (v byValue) MarshalJSON() ([]byte, error) { return []byte(`[1, "a"]`), nil }
func (v *byPtr) MarshalJSON() ([]byte, error)  { return []byte(`"a"`), nil }
func (s Status) MarshalText() ([]byte, error)  { return []byte("open"), nil }

func (Status) JSONSchema() json.RawMessage {
	return json.RawMessage(`{"enum": ["open", "paid"]}`)
}

type marshalers struct {
	happened
	Version  version
	Versions map[string]version
	Value    byValue
	Values   []byValue
	Ptr      byPtr // not addressable
	Ptrs     []byPtr
	PtrPtr   *byPtr
	Status   Status
	Statuses []Status
	Maybe    Status `json:"maybe,omitempty"`
}

// alone is an event with a form of its own.
type alone struct{ happened }

func (alone) MarshalJSON() ([]byte, error) { return []byte(`["alone"]`), nil }

// closed has schemas forbid members that they do not name, so that a missing one is found.
func closed(schema any) {
	switch v := schema.(type) {
	case map[string]any:
		if v["properties"] != nil || v["type"] == "object" && v["additionalProperties"] == nil {
			v["additionalProperties"] = false
		}
		for key, value := range v {
			if key != "enum" && key != "required" {
				closed(value)
			}
		}
	case []any:
		for _, value := range v {
			closed(value)
		}
	}
}

// payloadSchema compiles the schema of an event type, closed.
func payloadSchema(t *testing.T, document []byte, eventType string) *jsonschema.Schema {
	t.Helper()
	var doc map[string]any
	require.NoError(t, json.Unmarshal(document, &doc))
	closed(doc["components"].(map[string]any)["schemas"])
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft7)
	c.AssertFormat()
	c.AssertContent()
	require.NoError(t, c.AddResource("contract.json", doc))
	schema, err := c.Compile("contract.json#/components/schemas/" + eventType)
	require.NoError(t, err)
	return schema
}

// Extreme values, and null in place of types with schemas of their own, are valid.
func TestSchemasAllowExtremes(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("test", outbox.Event("test.thing.extremes.v1", "Thing", id[extremes]))
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, outboxcontract.Export(&b, events))
	schema := payloadSchema(t, b.Bytes(), "test.thing.extremes.v1")
	c, number := either("b"), six(6)
	value := extremes{Least: math.MinInt64, Most: math.MaxInt64, Unsigned: math.MaxUint64, Quoted: math.MaxUint64, Float: math.MaxFloat32,
		Negative: -math.MaxFloat32, Double: math.MaxFloat64, Number: "7", Choice: &c, Choices: map[string]*six{"a": &number, "b": nil}}
	valid := func() error {
		text, err := json.Marshal(value)
		require.NoError(t, err)
		decoded, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		require.NoError(t, err)
		return schema.Validate(decoded)
	}
	require.NoError(t, valid())
	value.Choice = nil
	require.NoError(t, valid())
	c, value.Choice = "c", &c
	require.ErrorContains(t, valid(), "/choice")
	c, number = "b", 7
	require.ErrorContains(t, valid(), "/choices/a")
}

// The schema of a type allows whatever encoding/json writes for it, and has all members of it.
func TestSchemasAllowWhatIsWritten(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("test",
		outbox.Event("test.thing.basics.v1", "Thing", id[basics]), outbox.Event("test.thing.options.v1", "Thing", id[options]),
		outbox.Event("test.thing.pointers.v1", "Thing", id[pointers]), outbox.Event("test.thing.embeds.v1", "Thing", id[embeds]),
		outbox.Event("test.thing.tree.v1", "Thing", id[tree]), outbox.Event("test.thing.marshalers.v1", "Thing", id[marshalers]),
		outbox.Event("test.thing.alone.v1", "Thing", id[alone]))
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, outboxcontract.Export(&b, events))
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, reg := range events.Registrations() {
		schema := payloadSchema(t, b.Bytes(), reg.EventType)
		seen := map[string]int{}
		const tries = 200
		for range tries {
			record, err := rec.KafkaRecord(t.Context(), testenv.Fill(rng, reg.GoType).Interface().(outbox.DomainEvent))
			require.NoError(t, err)
			var value any
			require.NoError(t, json.Unmarshal(record.Value, &value))
			require.NoError(t, schema.Validate(value), "%s: %s", reg.EventType, record.Value)
			members, _ := value.(map[string]any)
			for name := range members {
				seen[name]++
			}
		}
		required := map[string]bool{}
		for _, name := range schema.Required {
			required[name] = true
		}
		for name := range schema.Properties {
			require.Equal(t, required[name], seen[name] == tries, "%s: %s is written %d times of %d", reg.EventType, name, seen[name], tries)
			require.NotZero(t, seen[name], "%s: %s is never written", reg.EventType, name)
		}
	}
}
