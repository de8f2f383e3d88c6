package outbox

import (
	"encoding"
	"reflect"
	"unicode/utf8"
)

// hasBadText reports whether a value that encoding/json has encoded holds text
// that is not valid UTF-8. Only a value whose encoding looks suspicious comes
// here, so it may take its time.
func hasBadText(v any) bool {
	return badText{}.in(reflect.ValueOf(v))
}

// badText looks through values. It remembers what it has been in, because
// values may point back at each other where JSON does not follow.
type badText map[visit]bool

type visit struct {
	at  uintptr
	typ reflect.Type
}

var textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()

func (b badText) in(v reflect.Value) bool {
	if !v.IsValid() || b.badMarshalText(v) {
		return v.IsValid()
	}
	switch v.Kind() {
	case reflect.String:
		return !utf8.ValidString(v.String())
	case reflect.Interface:
		return b.in(v.Elem())
	case reflect.Pointer:
		return b.enter(v) && b.in(v.Elem())
	case reflect.Struct:
		return b.inFields(v)
	case reflect.Map:
		if !b.enter(v) {
			return false
		}
		for it := v.MapRange(); it.Next(); {
			if b.in(it.Key()) || b.in(it.Value()) {
				return true
			}
		}
	case reflect.Slice:
		return v.Type().Elem().Kind() != reflect.Uint8 && b.enter(v) && b.inElements(v)
	case reflect.Array:
		return b.inElements(v)
	default: // no text in it
	}
	return false
}

// enter reports whether what v points to exists and was not looked at before.
func (b badText) enter(v reflect.Value) bool {
	at := visit{v.Pointer(), v.Type()}
	if v.IsNil() || b[at] {
		return false
	}
	b[at] = true
	return true
}

func (b badText) inElements(v reflect.Value) bool {
	for i := range v.Len() {
		if b.in(v.Index(i)) {
			return true
		}
	}
	return false
}

// inFields looks at unexported fields as well: a MarshalJSON may write them.
func (b badText) inFields(v reflect.Value) bool {
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("json") != "-" && b.in(v.Field(i)) {
			return true
		}
	}
	return false
}

// badMarshalText reports whether v writes itself as text that is not UTF-8.
func (b badText) badMarshalText(v reflect.Value) bool {
	if v.CanAddr() && !v.Type().Implements(textMarshaler) {
		v = v.Addr()
	}
	if !v.Type().Implements(textMarshaler) || !v.CanInterface() || v.Kind() == reflect.Pointer && v.IsNil() {
		return false
	}
	text, err := v.Interface().(encoding.TextMarshaler).MarshalText()
	return err == nil && !utf8.Valid(text) // with an error json.Marshal had failed
}
