package contract

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// TestMain fails if a goroutine is left when all tests have ended.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// contractOf returns a contract of messages and schemas. Messages are in the channel orders, unless they say another.
func contractOf(t *testing.T, messages, schemas string) *Document {
	t.Helper()
	var all map[string]map[string]any
	require.NoError(t, json.Unmarshal([]byte(messages), &all), messages)
	channels := map[string]any{}
	for name, m := range all {
		topic, own := m["topic"].(string)
		if !own {
			topic = "orders"
		}
		c, has := channels[topic].(map[string]any)
		if !has {
			c = map[string]any{"address": topic, "messages": map[string]any{}}
			channels[topic] = c
		}
		c["messages"].(map[string]any)[name] = map[string]any{}
	}
	text, err := json.Marshal(map[string]any{"asyncapi": "3.0.0", "info": map[string]any{"title": "shop"}, "channels": channels,
		"components": map[string]any{"messages": all, "schemas": json.RawMessage(schemas)}})
	require.NoError(t, err)
	doc, err := Read(text)
	require.NoError(t, err)
	return doc
}

// lines returns changes as text.
func lines(changes []Change) string {
	var all []string
	for _, c := range changes {
		all = append(all, strings.Join(c.Breaks, "+")+" "+c.Event+" "+c.Change)
	}
	return strings.Join(all, "\n")
}

var schemaTests = []struct{ was, is, want string }{
	{`{"type": "integer"}`, `{"type": "integer", "description": "d", "title": "t"}`, ""},
	{`{"type": "integer"}`, `{"type": "string"}`, "readers+writers a: type was integer, is string"},
	{`{"type": "integer"}`, `{"type": "number"}`, "readers a: type was integer, is number"},
	{`{"type": "number"}`, `{"type": "integer"}`, "writers a: type was number, is integer"},
	{`{"type": "integer"}`, `{"type": ["integer", "null"]}`, "readers a: type was integer, is integer or null"},
	{`{"anyOf": [{"type": "integer"}, {"type": "null"}]}`, `{"type": ["null", "integer"]}`, ""},
	{`{"anyOf": [{"$ref": "#/components/schemas/s"}, {"type": "null"}]}`, `{"$ref": "#/components/schemas/s"}`, "writers a: type was null or string, is string"},
	{`{}`, `{"type": "integer"}`, "writers a: type was anything, is integer"},
	{`true`, `{"type": "integer"}`, "writers a: type was anything, is integer"},
	{`{"type": "integer"}`, `{}`, "readers a: type was integer, is anything"},
	{`{}`, `false`, "writers a: not was none, is {}"},
	{`{"enum": ["a", "b"]}`, `{"enum": ["b", "a"]}`, ""},
	{`{"enum": ["a"]}`, `{"enum": ["b", "a"]}`, `readers a: value was "a", is "a", "b"`},
	{`{"enum": ["a", "b"]}`, `{"const": "a"}`, `writers a: value was "a", "b", is "a"`},
	{`{"enum": ["a"]}`, `{"enum": ["b"]}`, `readers+writers a: value was "a", is "b"`},
	{`{"enum": ["a"]}`, `{}`, `readers a: value was "a", is any`},
	{`{"anyOf": [{"enum": ["a"]}, {"type": "null"}]}`, `{"enum": ["a"]}`, `writers a: value was "a", null, is "a"`},
	{`{"type": "integer", "minimum": 0}`, `{"type": "integer", "minimum": -5}`, "readers a: minimum was 0, is -5"},
	{`{"type": "integer", "minimum": 0}`, `{"type": "integer", "minimum": 5}`, "writers a: minimum was 0, is 5"},
	{`{"type": "integer", "maximum": 5}`, `{"type": "integer", "maximum": 6}`, "readers a: maximum was 5, is 6"},
	{`{"type": "integer", "maximum": 5}`, `{"type": "integer", "maximum": 4}`, "writers a: maximum was 5, is 4"},
	{`{"type": "integer", "maximum": 5}`, `{"type": "integer"}`, "readers a: maximum was 5, is none"},
	{`{"type": "string"}`, `{"type": "string", "format": "uuid"}`, `writers a: format was none, is "uuid"`},
	{`{"type": "string", "format": "uuid"}`, `{"type": "string"}`, `readers a: format was "uuid", is none`},
	{`{"x-go-type": "a.A"}`, `{"x-go-type": "b.B"}`, `readers+writers a: x-go-type was "a.A", is "b.B"`},
	{`{"items": {"type": "string"}}`, `{"items": {"type": "integer"}}`, "readers+writers a[]: type was string, is integer"},
	{`{"additionalProperties": {"type": "string"}}`, `{"additionalProperties": {"type": "integer"}}`, "readers+writers a{}: type was string, is integer"},
	{`{"additionalProperties": {"type": "string"}}`, `{"properties": {}}`, "readers a: members was of a map, is of an object"},
	{`{"properties": {}}`, `{"additionalProperties": {"type": "string"}}`, "writers a: members was of an object, is of a map"},
	{`{"additionalProperties": false}`, `{}`, ""},
	{`{"properties": {"x": {}}}`, `{"properties": {"x": {}, "y": {}}}`, " a.y: added, optional"},
	{`{"properties": {"x": {}}}`, `{"properties": {"x": {}, "y": {}}, "required": ["y"]}`, "writers a.y: added"},
	{`{"properties": {"x": {}}}`, `{"properties": {}}`, " a.x: removed, was optional"},
	{`{"properties": {"x": {}}, "required": ["x"]}`, `{"properties": {}}`, "readers a.x: removed"},
	{`{"properties": {"x": {}}, "required": ["x"]}`, `{"properties": {"x": {}}}`, "readers a.x: optional, was always there"},
	{`{"properties": {"x": {}}}`, `{"properties": {"x": {}}, "required": ["x"]}`, "writers a.x: always there, was optional"},
	{`{"properties": {"x": {}, "y": {}}}`, `{"properties": {"z": {}, "u": {}}}`, "readers+writers a.x: renamed to u\nreaders+writers a.y: renamed to z"},
	{`{"properties": {"x": {"type": "string"}}}`, `{"properties": {"z": {"type": "integer"}}}`, " a.x: removed, was optional\n a.z: added, optional"},
	{`{"$ref": "#/components/schemas/tree"}`, `{"$ref": "#/components/schemas/tree"}`, "readers+writers a.children[].name: type was string, is integer"},
	{`{"$ref": "#/components/schemas/circle"}`, `{"$ref": "#/components/schemas/circle"}`, ""},
	{two(one, one), two(one, oneOrNull), "readers a.y: type was string, is null or string"},
	{two(one, oneOrNull), two(one, one), "writers a.y: type was null or string, is string"},
	{two(oneOrNull, one), two(one, oneOrNull), "writers a.x: type was null or string, is string\nreaders a.y: type was string, is null or string"},
	{two(one, `{"items": `+one+`}`), two(one, `{"items": `+oneOrNull+`}`), "readers a.y[]: type was string, is null or string"},
	{two(one, `{"additionalProperties": `+one+`}`), two(one, `{"additionalProperties": `+oneOrNull+`}`), "readers a.y{}: type was string, is null or string"},
	{two(kind, kind), two(kind, kindOrNull), `readers a.y: value was "k", is "k", null`},
	{`{"oneOf": [{"type": "string"}]}`, `{"anyOf": [{"oneOf": [{"type": "string"}]}, {"type": "null"}]}`, "readers a: null was not allowed, is allowed"},
	{`{"anyOf": [{"not": {"type": "null"}}, {"type": "null"}]}`, `{"not": {"type": "null"}}`, "writers a: null was allowed, is not allowed"},
	{`{"anyOf": [{"const": 1}]}`, `{"anyOf": [{"anyOf": [{"const": 1}]}, {"type": "null"}]}`, "readers a: null was not allowed, is allowed"},
	{`{}`, `{"anyOf": [{}, {"type": "null"}]}`, ""},
	{`{"minLength": 1}`, `{"anyOf": [{"minLength": 1}, {"type": "null"}]}`, ""},
	{`{"type": "integer", "anyOf": [{"minimum": 1}, {"type": "null"}]}`, `{"type": "string", "anyOf": [{"minimum": 1}, {"type": "null"}]}`,
		"readers+writers a: type was integer, is string"},
	{`{"anyOf": [{"type": "string"}, {"type": "null"}], "description": "d"}`, `{"type": ["string", "null"]}`, ""},
	{`{"type": "array"}`, `{"type": "array", "items": {"type": "string"}}`, "writers a[]: type was anything, is string"},
	{`{"type": "array", "items": {"type": "string"}}`, `{"type": "array"}`, "readers a[]: type was string, is anything"},
	{`{"type": "array"}`, `{"type": "array", "items": true}`, ""},
	{`{}`, `{"items": {"type": "string"}}`, "writers a[]: type was anything, is string"},
	{`{}`, `{"type": "array", "items": {"type": "string"}}`, "writers a: type was anything, is array"},
	{`{"type": "string"}`, `{"type": ["array", "string"], "items": {"type": "string"}}`, "readers a: type was string, is array or string"},
	{`{"items": [{"type": "string"}]}`, `{"items": [{"type": "integer"}]}`, `readers+writers a[]: items was [{"type":"string"}], is [{"type":"integer"}]`},
	{`{"items": [true]}`, `{"items": [true]}`, ""},
	{`{"type": "string"}`, `{"type": "string", "contentEncoding": "base64"}`, `readers+writers a: contentEncoding was none, is "base64"`},
	{`{}`, `{"type": "string", "contentEncoding": "base64"}`, "writers a: type was anything, is string\nwriters a: contentEncoding was none, is \"base64\""},
	{`{"type": "string"}`, asJSON(`{"type": "integer"}`), `readers+writers a: contentMediaType was none, is "application/json"`},
	{asJSON(`{"type": "integer", "maximum": 5}`), asJSON(`{"type": "integer", "maximum": 6}`), "readers a as JSON: maximum was 5, is 6"},
	{asJSON(`{"type": "integer"}`), asJSON(`{"type": "string"}`), "readers+writers a as JSON: type was integer, is string"},
	{`{"properties": {"x": {"type": "integer"}}}`, `{"additionalProperties": {"type": "string"}}`,
		" a.x: removed, was optional\nreaders+writers a.x: type was integer, is string\nwriters a: members was of an object, is of a map"},
	{`{"additionalProperties": {"type": "string"}}`, `{"properties": {"x": {"type": "integer"}}}`,
		" a.x: added, optional\nreaders+writers a.x: type was string, is integer\nreaders a: members was of a map, is of an object"},
	{`{"properties": {"x": {"type": "integer"}}}`, `{"additionalProperties": true}`, " a.x: removed, was optional\nreaders a.x: type was integer, is anything"},
	{`{"properties": {"x": {}, "y": {}}, "additionalProperties": true}`, `{"properties": {"x": {}}, "additionalProperties": true}`, " a.y: removed, was optional"},
	{`{"additionalProperties": {"type": "string"}}`, `{"additionalProperties": {"type": "string"}, "properties": {"x": {"type": "string"}}}`, " a.x: added, optional"},
	{`{"type": "object"}`, `{"type": "object", "required": ["x"]}`, "writers a.x: added"},
	{`{"additionalProperties": {"type": "string"}, "required": ["x"]}`, `{"additionalProperties": {"type": "string"}}`, "readers a.x: removed"},
	{`{"$ref": "#/components/schemas/twice"}`, `{"properties": {"p": {"$ref": "#/components/schemas/twice"}}}`, ""},
	{`{"$ref": "#/components/schemas/endless"}`, `{}`, ""},
}

// two returns the schema of an object with two members.
func two(x, y string) string { return `{"properties": {"x": ` + x + `, "y": ` + y + `}}` }

// asJSON returns the schema of a string of JSON.
func asJSON(schema string) string {
	return `{"type": "string", "contentMediaType": "application/json", "contentSchema": ` + schema + `}`
}

const (
	one        = `{"$ref": "#/components/schemas/s"}`
	oneOrNull  = `{"anyOf": [{"$ref": "#/components/schemas/s"}, {"type": "null"}]}`
	kind       = `{"$ref": "#/components/schemas/kind"}`
	kindOrNull = `{"anyOf": [{"$ref": "#/components/schemas/kind"}, {"type": "null"}]}`

	schemasBefore = `"s": {"type": "string"}, "kind": {"enum": ["k"]}, "circle": {"$ref": "#/components/schemas/circle"}, "tree": {"properties": {"children": {"items": {"$ref": "#/components/schemas/node"}}}},
		"node": {"properties": {"name": {"type": "string"}, "children": {"items": {"$ref": "#/components/schemas/node"}}}},
		"twice": {"properties": {"p": {"properties": {"p": {"$ref": "#/components/schemas/twice"}}}}},
		"endless": {"items": {"$ref": "#/components/schemas/endless"}}`
)

func TestSchemaDiff(t *testing.T) {
	t.Parallel()
	schemasAfter := strings.Replace(schemasBefore, `"name": {"type": "string"}`, `"name": {"type": "integer"}`, 1)
	for _, tt := range schemaTests {
		const form = `{"placed": {"contentType": "application/json", "x-outbox": {}, "payload": {"$ref": "#/components/schemas/placed"}}}`
		object := func(schemas, a string) *Document {
			return contractOf(t, form, fmt.Sprintf(`{%s, "placed": {"properties": {"a": %s}}}`, schemas, a))
		}
		var want []string
		for line := range strings.Lines(tt.want) {
			who, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			want = append(want, who+" placed "+text)
		}
		require.Equal(t, strings.Join(want, "\n"), lines(Diff(object(schemasBefore, tt.was), object(schemasAfter, tt.is))), "%s, %s", tt.was, tt.is)
	}
}

var eventTests = []struct{ name, was, is, want string }{
	{"nothing", `{"a": {"x-outbox": {}}}`, `{"a": {"x-outbox": {}}}`, ""},
	{"added", `{}`, `{"a": {"x-outbox": {}}}`, " a event type added"},
	{"removed", `{"a": {"x-outbox": {}}}`, `{}`, "readers+writers a event type removed"},
	{"topic", `{"a": {"x-outbox": {}}}`, `{"a": {"topic": "t", "x-outbox": {}}}`, "readers+writers a topic was orders, is t"},
	{"key", `{"a": {"x-outbox": {"key": "aggregate id"}}}`, `{"a": {"x-outbox": {"key": "own"}}}`, "readers a partition key was aggregate id, is own"},
	{"aggregate", `{"a": {"x-outbox": {"aggregateType": "A"}}}`, `{"a": {"x-outbox": {"aggregateType": "B"}}}`, "readers a aggregate type was A, is B"},
	{"from JSON", `{"a": {"contentType": "application/json", "payload": {}, "x-outbox": {}}}`, `{"a": {"contentType": "application/protobuf", "x-outbox": {}}}`,
		"readers a content type was application/json, is application/protobuf"},
	{"to JSON", `{"a": {"contentType": "application/protobuf", "x-outbox": {}}}`, `{"a": {"contentType": "application/json", "payload": {}, "x-outbox": {}}}`,
		"readers+writers a content type was application/protobuf, is application/json"},
	{"no JSON", `{"a": {"contentType": "application/protobuf", "x-outbox": {}}}`, `{"a": {"contentType": "application/protobuf", "x-outbox": {}}}`, ""},
	{"headers", `{"a": {"headers": {"allOf": [{"properties": {"ce_a": {}, "ce_b": {}}}]}, "x-outbox": {}}}`,
		`{"a": {"headers": {"allOf": [{"properties": {"ce_b": {}, "ce_c": {}}}]}, "x-outbox": {}}}`, "readers a header ce_a removed\n a header ce_c added"},
	{"a version", `{"a.v1": {"x-outbox": {"version": 1}}}`, `{"a.v1": {"x-outbox": {"version": 1}}, "a.v2": {"x-outbox": {"version": 2}}}`,
		"writers a.v2 new version, without an upcaster from a.v1"},
	{"a version with an upcaster", `{"a.v1": {"x-outbox": {"version": 1}}}`, `{"a.v1": {"x-outbox": {"version": 1}}, "a.v2": {"x-outbox": {"version": 2, "upcasts": ["a.v1"]}}}`,
		" a.v2 new version, with upcasters from a.v1"},
	{"a version with a chain", `{"a.v1": {"x-outbox": {"version": 1}}}`,
		`{"a.v1": {"x-outbox": {"version": 1}}, "b.v7": {"x-outbox": {"version": 7, "upcasts": ["a.v1"]}}, "a.v10": {"x-outbox": {"version": 10, "upcasts": ["b.v7"]}}}`,
		" a.v10 new version, with upcasters from a.v1\n b.v7 event type added"},
	{"a version of another type", `{"a.v1": {"x-outbox": {"version": 1}}}`, `{"a.v1": {"x-outbox": {"version": 1}}, "b.v2": {"x-outbox": {"version": 2}}}`,
		" b.v2 event type added"},
	{"an upcaster removed", `{"a": {"x-outbox": {}}, "b": {"x-outbox": {"upcasts": ["a"]}}}`, `{"a": {"x-outbox": {}}, "b": {"x-outbox": {}}}`,
		"writers b upcaster from a removed"},
	{"an upcaster added", `{"a": {"x-outbox": {}}, "b": {"x-outbox": {}}}`, `{"a": {"x-outbox": {}}, "b": {"x-outbox": {"upcasts": ["a"]}}}`,
		" b upcaster from a added"},
	{"upcasters in a circle", `{"a": {"x-outbox": {"upcasts": ["c"]}}, "c": {"x-outbox": {}}}`, `{"a": {"x-outbox": {"upcasts": ["b"]}}, "b": {"x-outbox": {"upcasts": ["a"]}}, "c": {"x-outbox": {}}}`,
		"writers a upcaster from c removed\n a upcaster from b added\n b event type added"},
}

func TestEventDiff(t *testing.T) {
	t.Parallel()
	for _, tt := range eventTests {
		was, is := contractOf(t, tt.was, `{}`), contractOf(t, tt.is, `{}`)
		require.Equal(t, tt.want, lines(Diff(was, is)), tt.name)
	}
	was, is := contractOf(t, `{}`, `{}`), contractOf(t, `{}`, `{}`)
	is.source = "store"
	require.Equal(t, "breaks readers: source was shop, is store (events are named by source, id and type, and readers may choose by source)", Diff(was, is)[0].String())
}

func TestCompatibility(t *testing.T) {
	t.Parallel()
	readers, writers := Change{Breaks: []string{Readers}}, Change{Breaks: []string{Writers}}
	require.Equal(t, "FULL", Compatibility([]Change{{}}))
	require.Equal(t, "BACKWARD", Compatibility([]Change{{}, readers}))
	require.Equal(t, "FORWARD", Compatibility([]Change{writers, {}}))
	require.Equal(t, "NONE", Compatibility([]Change{readers, writers}))
}

// What is no contract is refused.
func TestRead(t *testing.T) {
	t.Parallel()
	for _, text := range []string{``, `[]`, `{}`, `{"asyncapi": "2.6.0"}`, `{"asyncapi": "3.0.0", "components": {"messages": {"a": {}}}}`,
		`{"asyncapi": "3.0.0", "channels": {"c": {"messages": {"a": {}}}}}`} {
		_, err := Read([]byte(text))
		require.ErrorIs(t, err, errNoContract, text)
	}
}
