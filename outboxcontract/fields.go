package outboxcontract

import (
	"cmp"
	"reflect"
	"slices"
	"strings"
	"unicode"
)

// field is a member of the object that encoding/json writes for a struct.
type field struct {
	name     string
	tagged   bool // the name comes from the tag
	depth    int  // of the embedded struct that has the field
	typ      reflect.Type
	optional bool // the member may be missing
	present  bool // a value that is written is not nil: omitempty or omitzero leaves nil out
	quoted   bool // the option string
}

// fieldsOf returns the fields of a struct that encoding/json writes, in their order. As there, a field hides the fields
// of the same name that are embedded deeper. Of several at one depth, the one with a tag counts, and else none.
func fieldsOf(t reflect.Type) []field {
	all := appendFields(nil, t, field{}, nil)
	var visible []field
	for i, f := range all {
		hides := func(other field) bool {
			return other.name == f.name && (other.depth < f.depth || other.depth == f.depth && (other.tagged || !f.tagged))
		}
		others := slices.Concat(all[:i], all[i+1:])
		if !slices.ContainsFunc(others, hides) {
			visible = append(visible, f)
		}
	}
	return visible
}

// appendFields appends the fields of a struct and of those that it embeds. The struct itself is in the field of.
func appendFields(all []field, t reflect.Type, of field, within []reflect.Type) []field {
	if slices.Contains(within, t) {
		return all // a struct that embeds a pointer to itself hides all of that
	}
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !validName(name) {
			name = ""
		}
		elem := f.Type
		if elem.Name() == "" && elem.Kind() == reflect.Pointer {
			elem = elem.Elem()
		}
		embeds := f.Anonymous && elem.Kind() == reflect.Struct
		if f.Tag.Get("json") == "-" || !f.IsExported() && !embeds {
			continue
		}
		if embeds && name == "" {
			deeper := field{depth: of.depth + 1, optional: of.optional || f.Type.Kind() == reflect.Pointer}
			all = appendFields(all, elem, deeper, append(slices.Clone(within), t))
			continue
		}
		has := func(option string) bool { return slices.Contains(strings.Split(options, ","), option) }
		omits := has("omitzero") || has("omitempty") && canBeEmpty(f.Type)
		all = append(all, field{
			name: cmp.Or(name, f.Name), tagged: name != "", depth: of.depth, typ: f.Type,
			optional: of.optional || omits, present: omits, quoted: has("string") && canBeQuoted(elem),
		})
	}
	return all
}

// validName reports whether encoding/json takes a name of a tag.
func validName(name string) bool {
	for _, c := range name {
		if !strings.ContainsRune("!#$%&()*+-./:;<=>?@[]^_{|}~ ", c) && !unicode.IsLetter(c) && !unicode.IsDigit(c) {
			return false
		}
	}
	return name != ""
}

// canBeEmpty reports whether omitempty can omit a value of a type. It omits no struct and no time.
func canBeEmpty(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Struct, reflect.Func, reflect.Chan, reflect.Complex64, reflect.Complex128:
		return false
	case reflect.Array:
		return t.Len() == 0
	default:
		return true
	}
}

// canBeQuoted reports whether the option string has an effect on a type. It has none on what methods write.
func canBeQuoted(t reflect.Type) bool {
	if pointer := reflect.PointerTo(t); pointer.Implements(marshalerType) || pointer.Implements(textMarshalerType) {
		return false
	}
	return t.Kind() == reflect.String || t.Kind() >= reflect.Bool && t.Kind() <= reflect.Float64
}
