package contract

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// view is a schema without references and without the choice of null.
type view struct {
	ref  string         // the last reference; "" for none
	keys map[string]any // keywords
	null bool           // null is allowed besides
}

// never is the schema false as an object.
var never = map[string]any{"not": map[string]any{}}

// look follows the references of a schema. A schema that is no object is true or false.
func (doc *Document) look(schema any) (v view) {
	for range 100 { // references may lead in a circle
		v.keys, _ = schema.(map[string]any)
		if schema == false {
			v.keys = never
		}
		if ref, is := v.keys["$ref"].(string); is {
			v.ref, schema = ref, doc.schemas[ref]
			continue
		}
		if choice, is := v.keys["anyOf"].([]any); is && v.hasOnly("anyOf") && len(choice) == 2 && reflect.DeepEqual(choice[1], map[string]any{"type": "null"}) {
			v.null, schema = true, choice[0]
			continue
		}
		break
	}
	return v
}

// hasOnly reports whether no other keyword says anything about values.
func (v view) hasOnly(key string) bool {
	for other := range v.keys {
		if other != key && !slices.Contains(annotations, other) {
			return false
		}
	}
	return true
}

// types returns the JSON types that a schema allows, sorted, or nil for all.
func (v view) types() (types []string) {
	switch t := v.keys["type"].(type) {
	case string:
		types = []string{t}
	case []any:
		for _, one := range t {
			types = append(types, fmt.Sprint(one))
		}
	}
	if types != nil && v.null && !slices.Contains(types, "null") {
		types = append(types, "null")
	}
	slices.Sort(types)
	return types
}

// fits reports whether all values of some types are of other types.
func fits(types, in []string) bool {
	if in == nil || types == nil {
		return in == nil
	}
	for _, t := range types {
		if !slices.Contains(in, t) && (t != "integer" || !slices.Contains(in, "number")) {
			return false
		}
	}
	return true
}

// allows reports whether a schema allows values of a type.
func (v view) allows(name string) bool { return v.types() == nil || slices.Contains(v.types(), name) }

// hidesNull reports whether a schema without types and values may still forbid null.
func (v view) hidesNull() bool {
	forbids := func(key string) bool { return v.keys[key] != nil }
	return v.types() == nil && v.allowed() == nil && slices.ContainsFunc([]string{"oneOf", "anyOf", "allOf", "not", "if"}, forbids)
}

// pair are two schemas that are compared, and whether null is allowed besides.
type pair struct {
	was, is         uintptr // addresses of the keywords
	wasNull, isNull bool
}

// schema compares the schemas of a place in the payload. Old readers take a member that must be there for granted, and
// ignore members that they do not know.
func (d *differ) schema(path string, was, is any) {
	a, b := d.before.look(was), d.after.look(is)
	both := pair{reflect.ValueOf(a.keys).Pointer(), reflect.ValueOf(b.keys).Pointer(), a.null, b.null}
	if d.compared[both] {
		return
	}
	d.compared[both] = true
	if a.ref == "" || b.ref == "" {
		defer delete(d.compared, both) // compared at each of its places: until here it only ends circles
	}
	forward, backward := fits(b.types(), a.types()), fits(a.types(), b.types())
	d.narrows(path, "type", shown(a.types()), shown(b.types()), forward, backward)
	if !forward && !backward {
		return
	}
	if a.null != b.null && a.hidesNull() && b.hidesNull() {
		d.narrows(path, "null", givenNull(a.null), givenNull(b.null), a.null, b.null)
	}
	d.values(path, a, b)
	d.members(path, a, b)
	d.part(path+"[]", "items", "array", a, b)
	if reflect.DeepEqual(a.keys["contentMediaType"], b.keys["contentMediaType"]) {
		d.part(path+" as JSON", "contentSchema", "string", a, b)
	}
	d.others(path, a.keys["additionalProperties"], b.keys["additionalProperties"])
}

// part compares the schemas of a part that values of a type have. A missing schema allows anything. If only one of the
// schemas has types, the change of the type says so already.
func (d *differ) part(path, key, of string, a, b view) {
	was, is := a.keys[key], b.keys[key]
	_, wasList := was.([]any) // of schemas, one for each item
	_, isList := is.([]any)
	switch {
	case was == nil && is == nil || !a.allows(of) || !b.allows(of):
	case wasList || isList:
		if !reflect.DeepEqual(was, is) {
			d.narrows(path, key, text(was), text(is), was == nil, is == nil)
		}
	case was != nil && is != nil:
		d.schema(path, was, is)
	case (a.types() == nil) == (b.types() == nil):
		d.schema(path, cmp.Or[any](was, true), cmp.Or[any](is, true))
	}
}

// others compares the schemas of the members without names, which the objects of Go maps have. Objects without such a
// schema are taken for open.
func (d *differ) others(path string, was, is any) {
	_, had := was.(map[string]any)
	_, has := is.(map[string]any)
	switch {
	case had && has:
		d.schema(path+"{}", was, is)
	case had || has:
		d.narrows(path, "members", given(had), given(has), !had, !has)
	}
}

func givenNull(null bool) string {
	if null {
		return "allowed"
	}
	return "not allowed"
}

func given(schema bool) string {
	if schema {
		return "of a map"
	}
	return "of an object"
}

func shown(types []string) string {
	return cmp.Or(strings.Join(types, " or "), "anything")
}

// narrows adds a change after which new values fit the old schema, or old values the new one.
func (d *differ) narrows(path, what, was, is string, forward, backward bool) {
	var breaks []string
	var why []string
	if !forward {
		breaks, why = append(breaks, Readers), append(why, "old readers get values that they do not expect")
	}
	if !backward {
		breaks, why = append(breaks, Writers), append(why, "old events have values that new readers do not expect")
	}
	if was != is || breaks != nil {
		d.add(fmt.Sprintf("%s%s was %s, is %s", before(path), what, was, is), strings.Join(why, "; "), breaks...)
	}
}

// before returns the beginning of a text about a place in the payload.
func before(path string) string {
	if path == "" {
		return "payload: "
	}
	return strings.TrimPrefix(path, ".") + ": "
}

// bounds are the keywords with a number, and whether a higher number allows more.
var bounds = map[string]bool{
	"minimum": false, "exclusiveMinimum": false, "minLength": false, "minItems": false, "minProperties": false,
	"maximum": true, "exclusiveMaximum": true, "maxLength": true, "maxItems": true, "maxProperties": true,
}

// elsewhere are the keywords that are compared elsewhere.
var elsewhere = []string{"$ref", "type", "properties", "required", "items", "additionalProperties", "enum", "const", "contentSchema"}

// annotations are the keywords that say nothing about values.
var annotations = []string{
	"title", "description", "examples", "default", "deprecated", "$comment", "$id", "$schema", "readOnly", "writeOnly",
}

// values compares which values of its types a schema allows.
func (d *differ) values(path string, a, b view) {
	was, is := a.allowed(), b.allowed()
	if !slices.Equal(was, is) {
		among := func(values, in []string) bool {
			return in == nil || values != nil && !slices.ContainsFunc(values, func(v string) bool { return !slices.Contains(in, v) })
		}
		d.narrows(path, "value", shownValues(was), shownValues(is), among(is, was), among(was, is))
	}
	all := map[string]any{}
	maps.Copy(all, a.keys)
	maps.Copy(all, b.keys)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		was, is := a.keys[key], b.keys[key]
		if slices.Contains(elsewhere, key) || slices.Contains(annotations, key) || reflect.DeepEqual(was, is) {
			continue
		}
		forward, backward := was == nil, is == nil
		if higher, bounded := bounds[key]; bounded && was != nil && is != nil {
			forward, backward = (number(is) < number(was)) == higher, (number(is) > number(was)) == higher
		}
		if strings.HasPrefix(key, "content") && slices.Contains(a.types(), "string") && slices.Contains(b.types(), "string") {
			forward, backward = false, false // the same text is another value
		}
		d.narrows(path, key, text(was), text(is), forward, backward)
	}
}

// allowed returns the values of enum or const as sorted JSON, nil for all.
func (v view) allowed() (values []string) {
	all, is := v.keys["enum"].([]any)
	if one, has := v.keys["const"]; has {
		all, is = []any{one}, true
	}
	if !is {
		return nil
	}
	for _, value := range all {
		values = append(values, text(value))
	}
	if v.null {
		values = append(values, "null")
	}
	slices.Sort(values)
	return slices.Compact(values)
}

func shownValues(values []string) string { return cmp.Or(strings.Join(values, ", "), "any") }

func number(value any) float64 {
	n, _ := value.(float64)
	return n
}

// text returns the JSON of a value, "none" for nil.
func text(value any) string {
	if value == nil {
		return "none"
	}
	b, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(b)
}
