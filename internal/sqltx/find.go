package sqltx

import (
	"database/sql"
	"reflect"
)

// Find returns the [sql.Tx] that a value is, or that is embedded in it: in a struct, behind a pointer or an
// interface, at any depth. It is nil if the field is. Found is false if there is none.
//
// Some libraries put methods of their own in front of it that do not pass arguments on: bun.Tx formats
// statements by itself, with question marks for placeholders.
func Find(v any) (tx *sql.Tx, found bool) {
	if tx, ok := v.(*sql.Tx); ok {
		return tx, true
	}
	const deepest = 5 // a struct may embed a pointer to its own type
	return find(reflect.ValueOf(v), deepest)
}

func find(v reflect.Value, depth int) (tx *sql.Tx, found bool) {
	for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
		if v.Type() == reflect.TypeFor[*sql.Tx]() && v.CanInterface() {
			return v.Interface().(*sql.Tx), true
		}
		v = v.Elem() // of nil, the zero Value
	}
	if v.Kind() != reflect.Struct || depth == 0 {
		return nil, false
	}
	for i := range v.NumField() {
		if field := v.Type().Field(i); !field.Anonymous {
			continue
		}
		if tx, found := find(v.Field(i), depth-1); found {
			return tx, true
		}
	}
	return nil, false
}
