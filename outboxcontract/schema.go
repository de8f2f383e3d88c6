package outboxcontract

import (
	"encoding"
	"encoding/json"
	"fmt"
	"math"
	"path"
	"reflect"
	"regexp"
	"strconv"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/google/uuid"
)

// schemas makes the JSON Schemas of Go types, which say what encoding/json writes for them. The library infers those of
// basic types. It has no recursive types, no marshalers and no option string, so the rest is here.
type schemas struct {
	all   map[string]*jsonschema.Schema // by the name in the document
	names map[reflect.Type]string
}

// refPrefix precedes the name of a schema in a reference.
const refPrefix = "#/components/schemas/"

var (
	marshalerType     = reflect.TypeFor[json.Marshaler]()
	textMarshalerType = reflect.TypeFor[encoding.TextMarshaler]()
)

// known are the schemas of types whose methods do not say what they write.
var known = map[reflect.Type]jsonschema.Schema{
	reflect.TypeFor[time.Time]():       {Type: "string", Format: "date-time"},
	reflect.TypeFor[uuid.UUID]():       {Type: "string", Format: "uuid"},
	reflect.TypeFor[json.Number]():     {Type: "number"},
	reflect.TypeFor[json.RawMessage](): {},
}

// limits are the lowest and the highest values of kinds for which the library infers none. encoding/json writes the
// highest float32 in the short form of a float32, which is a little above math.MaxFloat32.
var limits = map[reflect.Kind][2]float64{
	reflect.Int: {math.MinInt64, math.MaxInt64}, reflect.Int64: {math.MinInt64, math.MaxInt64},
	reflect.Uint: {0, math.MaxUint64}, reflect.Uint64: {0, math.MaxUint64}, reflect.Uintptr: {0, math.MaxUint64},
	reflect.Float32: {-3.4028235e38, 3.4028235e38},
}

// of returns the schema of a value that is encoded as a part of another one.
func (s *schemas) of(t reflect.Type) (*jsonschema.Schema, error) {
	if own, err := leaf(t); own != nil || err != nil {
		return own, err
	}
	if t.Kind() == reflect.Pointer {
		elem, err := s.of(t.Elem())
		if err != nil {
			return nil, err
		}
		return nullable(elem), nil
	}
	if t.Name() == "" {
		return s.composite(t)
	}
	name, has := s.names[t]
	if !has {
		name = s.newName(t)
		s.names[t], s.all[name] = name, &jsonschema.Schema{} // a recursive type finds its name
		own, err := s.composite(t)
		if err != nil {
			return nil, err
		}
		*s.all[name] = *present(own)
	}
	ref := &jsonschema.Schema{Ref: refPrefix + name}
	if t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		return nullable(ref), nil
	}
	return ref, nil
}

var notInNames = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// newName returns the name of a Go type in the document, such as shop.Line.
func (s *schemas) newName(t reflect.Type) string {
	name := notInNames.ReplaceAllString(path.Base(t.PkgPath())+"."+t.Name(), "_")
	for n := 2; ; n++ {
		if _, taken := s.all[name]; !taken {
			return name
		}
		name = notInNames.ReplaceAllString(path.Base(t.PkgPath())+"."+t.Name(), "_") + "-" + strconv.Itoa(n)
	}
}

// leaf returns the schema of a type that has no parts of its own, or nil.
func leaf(t reflect.Type) (*jsonschema.Schema, error) {
	if t.Kind() == reflect.Interface {
		return &jsonschema.Schema{}, nil
	}
	if t.Kind() == reflect.Pointer {
		if !isOpaque(t.Elem()) {
			return nil, nil
		}
		if t.Implements(textMarshalerType) && !t.Implements(marshalerType) {
			return nullable(&jsonschema.Schema{Type: "string"}), nil
		}
		return opaque(t.Elem()), nil
	}
	if m, has := schemaMethod(t); has {
		return ownSchema(t, m)
	}
	if schema, has := known[t]; has {
		return &schema, nil
	}
	switch {
	case isOpaque(t):
		return opaque(t), nil
	case t.Implements(textMarshalerType):
		return &jsonschema.Schema{Type: "string"}, nil
	case isBytes(t):
		return &jsonschema.Schema{Types: []string{"string", "null"}, ContentEncoding: "base64"}, nil
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map, reflect.Slice, reflect.Array:
		return nil, nil
	default:
		schema, err := jsonschema.ForType(t, nil)
		if limit, has := limits[t.Kind()]; has && err == nil {
			schema.Minimum, schema.Maximum = &limit[0], &limit[1]
		}
		return schema, err
	}
}

// isOpaque reports whether only the methods of a type know the JSON that they write.
func isOpaque(t reflect.Type) bool {
	_, isKnown := known[t]
	_, hasOwn := schemaMethod(t)
	pointer := reflect.PointerTo(t) // its methods count only where the value is addressable
	return !isKnown && !hasOwn &&
		(pointer.Implements(marshalerType) || pointer.Implements(textMarshalerType) && !t.Implements(textMarshalerType))
}

// opaque is the schema of a type whose MarshalJSON writes what only the type knows.
func opaque(t reflect.Type) *jsonschema.Schema {
	return &jsonschema.Schema{Extra: map[string]any{"x-go-type": t.String()}}
}

// schemaMethod returns the method JSONSchema of a type.
func schemaMethod(t reflect.Type) (m reflect.Method, has bool) {
	m, has = t.MethodByName("JSONSchema")
	return m, has && t.Kind() != reflect.Interface && m.Type.NumIn() == 1 && m.Type.NumOut() == 1
}

// ownSchema returns what the method JSONSchema of a type returns.
func ownSchema(t reflect.Type, m reflect.Method) (*jsonschema.Schema, error) {
	schema := &jsonschema.Schema{}
	text, err := json.Marshal(m.Func.Call([]reflect.Value{reflect.Zero(t)})[0].Interface())
	if err == nil {
		err = json.Unmarshal(text, schema)
	}
	if err == nil {
		_, err = schema.CloneSchemas().Resolve(nil)
	}
	if err != nil {
		return nil, fmt.Errorf("%v: JSONSchema: %w", t, err)
	}
	return schema, nil
}

// composite returns the schema of a type with parts.
func (s *schemas) composite(t reflect.Type) (schema *jsonschema.Schema, err error) {
	switch t.Kind() {
	case reflect.Struct:
		return s.object(t)
	case reflect.Slice:
		schema = &jsonschema.Schema{Types: []string{"array", "null"}}
		schema.Items, err = s.of(t.Elem())
	case reflect.Array:
		schema = &jsonschema.Schema{Type: "array", MinItems: jsonschema.Ptr(t.Len()), MaxItems: jsonschema.Ptr(t.Len())}
		schema.Items, err = s.of(t.Elem())
	case reflect.Map:
		schema = &jsonschema.Schema{Types: []string{"object", "null"}}
		switch k := t.Key().Kind(); {
		case k == reflect.String, t.Key().Implements(textMarshalerType):
		case k >= reflect.Int && k <= reflect.Uintptr:
			schema.PropertyNames = &jsonschema.Schema{Pattern: "^-?[0-9]+$"}
		default:
			return nil, fmt.Errorf("encoding/json encodes no %v", t)
		}
		schema.AdditionalProperties, err = s.of(t.Elem())
	default:
		return nil, fmt.Errorf("encoding/json encodes no %v", t)
	}
	return schema, err
}

// object returns the schema of a struct. It is open: readers ignore members that they do not know.
func (s *schemas) object(t reflect.Type) (*jsonschema.Schema, error) {
	schema := &jsonschema.Schema{Type: "object"}
	for _, f := range fieldsOf(t) {
		member, err := s.of(f.typ)
		if err != nil {
			return nil, fmt.Errorf("%v.%s: %w", t, f.name, err)
		}
		if f.quoted {
			member = quoted(f.typ, member)
		}
		if f.present {
			member = present(member)
		}
		if schema.Properties == nil {
			schema.Properties = map[string]*jsonschema.Schema{}
		}
		schema.Properties[f.name] = member
		schema.PropertyOrder = append(schema.PropertyOrder, f.name)
		if !f.optional {
			schema.Required = append(schema.Required, f.name)
		}
	}
	return schema, nil
}

// quoted returns the schema of the option string: of a string with the JSON of the value. A nil pointer stays null.
func quoted(t reflect.Type, schema *jsonschema.Schema) *jsonschema.Schema {
	text := &jsonschema.Schema{Type: "string", ContentMediaType: "application/json", ContentSchema: schema}
	if t.Kind() != reflect.Pointer {
		return text
	}
	text.ContentSchema = present(schema)
	return nullable(text)
}

// nullable returns a schema that allows null as well.
func nullable(schema *jsonschema.Schema) *jsonschema.Schema {
	if allowsNull(schema) {
		return schema
	}
	if schema.Type != "" {
		wider := *schema
		wider.Types, wider.Type = []string{schema.Type, "null"}, ""
		if allowsNull(&wider) {
			return &wider
		}
	}
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{schema, {Type: "null"}}}
}

// allowsNull reports whether null is valid by a schema.
func allowsNull(schema *jsonschema.Schema) bool {
	own := *schema
	own.Items, own.Properties, own.AdditionalProperties = nil, nil, nil // null has no parts
	resolved, err := own.CloneSchemas().Resolve(nil)
	if err != nil {
		return isChoiceOfNull(schema) // it has a reference to a schema of the document
	}
	return resolved.Validate(nil) == nil
}

// isChoiceOfNull reports whether a schema has the form that [nullable] gives to schemas that cannot be widened.
func isChoiceOfNull(schema *jsonschema.Schema) bool {
	return len(schema.AnyOf) == 2 && schema.AnyOf[1].Type == "null"
}

// present returns a schema that does not allow the null of [nullable].
func present(schema *jsonschema.Schema) *jsonschema.Schema {
	if isChoiceOfNull(schema) {
		return schema.AnyOf[0]
	}
	if len(schema.Types) == 2 && schema.Types[1] == "null" {
		schema.Type, schema.Types = schema.Types[0], nil
	}
	return schema
}

// isBytes reports whether encoding/json writes a slice in base64.
func isBytes(t reflect.Type) bool {
	if t.Kind() != reflect.Slice || t.Elem().Kind() != reflect.Uint8 {
		return false
	}
	elem := reflect.PointerTo(t.Elem())
	return !elem.Implements(marshalerType) && !elem.Implements(textMarshalerType)
}
