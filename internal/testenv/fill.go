package testenv

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strconv"
	"time"
)

// Fill returns a random value of a type, zero values among its parts.
func Fill(rng *rand.Rand, t reflect.Type) reflect.Value {
	v := reflect.New(t).Elem()
	fill(rng, v, 6)
	return v
}

func fill(rng *rand.Rand, v reflect.Value, depth int) {
	if rng.IntN(4) == 0 || depth == 0 {
		return
	}
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.UnixMicro(rng.Int64N(4e15)).UTC()))
		return
	case json.Number:
		v.SetString(strconv.Itoa(rng.IntN(1000)))
		return
	case json.RawMessage:
		v.SetBytes([]byte(`[{"a": null}]`))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(rng, v.Elem(), depth-1)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() || v.Type().Field(i).Anonymous && v.Field(i).Kind() == reflect.Struct {
				fillField(rng, v.Field(i), depth-1)
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), rng.IntN(3), 3))
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			fill(rng, v.Index(i), depth-1)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range rng.IntN(3) {
			v.SetMapIndex(Fill(rng, v.Type().Key()), Fill(rng, v.Type().Elem()))
		}
	default:
		fillBasic(rng, v)
	}
}

// fillField fills a field. One of an unexported embedded struct has exported fields that can be set.
func fillField(rng *rand.Rand, v reflect.Value, depth int) {
	if v.CanSet() {
		fill(rng, v, depth)
		return
	}
	for i := range v.NumField() {
		if v.Type().Field(i).IsExported() {
			fillField(rng, v.Field(i), depth)
		}
	}
}

func fillBasic(rng *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString([]string{"", "a", "7", "null", "{}"}[rng.IntN(5)])
	case reflect.Bool:
		v.SetBool(rng.IntN(2) == 0)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(rng.NormFloat64())
	case reflect.Interface:
		if v.NumMethod() == 0 {
			v.Set(reflect.ValueOf([]any{"a", 1.5, true, map[string]any{"a": nil}, []any{1.0}}[rng.IntN(5)]))
		}
	default:
		if v.CanInt() {
			v.SetInt(int64(rng.Uint64()) >> (64 - v.Type().Bits()))
		} else if v.CanUint() {
			v.SetUint(rng.Uint64() >> (64 - v.Type().Bits()))
		}
	}
}
