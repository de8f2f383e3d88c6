package outboxtest

import (
	"bytes"
	"encoding/json"
	"reflect"
	"time"
)

// equalButTimes reports whether two JSON documents are equal, but for times: where want has the zero time, got may have
// any time, and where want has nothing, got may have the time at.
func equalButTimes(want, got []byte, at time.Time) bool {
	w, werr := decodeJSON(want)
	g, gerr := decodeJSON(got)
	return werr == nil && gerr == nil && sameButTimes(w, g, at)
}

func decodeJSON(document []byte) (value any, err error) {
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber()
	err = decoder.Decode(&value)
	return value, err
}

func sameButTimes(want, got any, at time.Time) bool {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		return ok && sameMembers(w, g, at)
	case []any:
		g, ok := got.([]any)
		if !ok || len(w) != len(g) {
			return false
		}
		for i := range w {
			if !sameButTimes(w[i], g[i], at) {
				return false
			}
		}
		return true
	}
	if t, ok := timeOf(want); ok && t.IsZero() {
		_, ok = timeOf(got)
		return ok
	}
	return want == got
}

func sameMembers(want, got map[string]any, at time.Time) bool {
	for name, w := range want {
		if g, ok := got[name]; !ok || !sameButTimes(w, g, at) {
			return false
		}
	}
	for name, g := range got {
		if _, ok := want[name]; ok {
			continue
		}
		if t, ok := timeOf(g); !ok || !t.Truncate(time.Microsecond).Equal(at) { // omitzero leaves it out of want
			return false
		}
	}
	return true
}

// timeOf returns a value of JSON as a time.
func timeOf(value any) (time.Time, bool) {
	text, ok := value.(string)
	if !ok {
		return time.Time{}, false
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	return t, err == nil
}

// equalButZeroTimes is [equalButTimes] for events of a Go type, as a codec has decoded them: where want has the zero
// time in an exported field, got may have any.
func equalButZeroTimes(want, got any) bool {
	filled := reflect.New(reflect.TypeOf(want))
	filled.Elem().Set(reflect.ValueOf(want))
	if reflect.TypeOf(want) == reflect.TypeOf(got) {
		fillTimes(filled.Elem(), reflect.ValueOf(got))
	}
	return reflect.DeepEqual(filled.Elem().Interface(), got)
}

// fillTimes copies times of got into want where these are zero. Want is settable.
func fillTimes(want, got reflect.Value) {
	if !want.CanSet() {
		return
	}
	if t, ok := want.Interface().(time.Time); ok {
		if t.IsZero() {
			want.Set(got)
		}
		return
	}
	switch want.Kind() {
	case reflect.Struct:
		for i := range want.NumField() {
			fillTimes(want.Field(i), got.Field(i))
		}
	case reflect.Pointer:
		if !want.IsNil() && !got.IsNil() {
			fillTimes(want.Elem(), got.Elem())
		}
	case reflect.Slice, reflect.Array:
		for i := range min(want.Len(), got.Len()) {
			fillTimes(want.Index(i), got.Index(i))
		}
	default: // of maps and interfaces, times count
	}
}
