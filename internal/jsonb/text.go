package jsonb

import (
	"encoding"
	"encoding/json"
	"reflect"
	"unicode/utf8"
)

// HidesBadText reports whether a value holds text that is not valid UTF-8, which
// encoding/json replaces silently. encoded is what json.Marshal returned for it.
//
// json.Marshal writes the escape for U+FFFD only in place of a bad byte; a real
// U+FFFD is written as it is. A json.RawMessage may hold the escape rightly, so the
// value itself decides. Only a value whose encoding looks suspicious is walked.
func HidesBadText(v any, encoded []byte) bool {
	return hasReplacement(encoded) && badText{}.in(reflect.ValueOf(v), false)
}

// hasReplacement reports whether b holds \ufffd.
func hasReplacement(b []byte) bool {
	const escape = `\ufffd`
	for i := 0; i+len(escape) <= len(b); i++ {
		if b[i] == '\\' {
			if string(b[i:i+len(escape)]) == escape {
				return true
			}
			i++ // an escaped backslash does not begin an escape
		}
	}
	return false
}

// badText looks through values. It remembers what it has been in, because
// values may point back at each other where JSON does not follow.
type badText map[visit]bool

type visit struct {
	at  uintptr
	len int // slices of one array begin at the same place
	typ reflect.Type
	all bool
}

var (
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
)

// in examines v: the fields that encoding/json sees, or all fields if a MarshalJSON decides what is
// written.
func (b badText) in(v reflect.Value, all bool) bool {
	for v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	if !v.IsValid() { // a nil interface
		return false
	}
	if badMarshalText(v) {
		return true
	}
	all = all || v.Type().Implements(jsonMarshaler) || reflect.PointerTo(v.Type()).Implements(jsonMarshaler)
	switch v.Kind() {
	case reflect.String:
		return !utf8.ValidString(v.String())
	case reflect.Pointer:
		return b.enter(v, 0, all) && b.in(v.Elem(), all)
	case reflect.Struct:
		return b.inFields(v, all)
	case reflect.Map:
		return b.enter(v, 0, all) && b.inEntries(v, all)
	case reflect.Slice:
		return v.Type().Elem().Kind() != reflect.Uint8 && b.enter(v, v.Len(), all) && b.inElements(v, all)
	case reflect.Array:
		return b.inElements(v, all)
	default: // no text in it
		return false
	}
}

// enter reports whether what v points to exists and was not looked at before.
func (b badText) enter(v reflect.Value, length int, all bool) bool {
	at := visit{v.Pointer(), length, v.Type(), all}
	if v.IsNil() || b[at] {
		return false
	}
	b[at] = true
	return true
}

func (b badText) inFields(v reflect.Value, all bool) bool {
	for i := range v.NumField() {
		field := v.Type().Field(i)
		seen := (field.IsExported() || field.Anonymous) && field.Tag.Get("json") != "-"
		if (all || seen) && b.in(v.Field(i), all) {
			return true
		}
	}
	return false
}

func (b badText) inEntries(v reflect.Value, all bool) bool {
	for it := v.MapRange(); it.Next(); {
		if b.in(it.Key(), all) || b.in(it.Value(), all) {
			return true
		}
	}
	return false
}

func (b badText) inElements(v reflect.Value, all bool) bool {
	for i := range v.Len() {
		if b.in(v.Index(i), all) {
			return true
		}
	}
	return false
}

// badMarshalText reports whether v writes itself as text that is not UTF-8.
func badMarshalText(v reflect.Value) bool {
	if v.CanAddr() && !v.Type().Implements(textMarshaler) {
		v = v.Addr()
	}
	if !v.Type().Implements(textMarshaler) || !v.CanInterface() || v.Kind() == reflect.Pointer && v.IsNil() {
		return false
	}
	text, err := v.Interface().(encoding.TextMarshaler).MarshalText()
	return err == nil && !utf8.Valid(text) // with an error json.Marshal had failed
}

// AppendString appends a text, which is valid UTF-8, as a JSON string. It escapes only what it
// must: json.Marshal writes some characters in six bytes.
func AppendString(b []byte, s string) []byte {
	const digits = "0123456789abcdef"
	b = append(b, '"')
	from := 0 // start of the text that is not appended yet
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[from:i]...)
		if from = i + 1; c >= ' ' {
			b = append(b, '\\', c)
		} else {
			b = append(b, '\\', 'u', '0', '0', digits[c>>4], digits[c&0xF])
		}
	}
	return append(append(b, s[from:]...), '"')
}
