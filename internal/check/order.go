package check

import (
	"fmt"
	"time"
)

// Field is a field of a configuration that is compared with another one.
type Field[N int | time.Duration] struct {
	Name string
	// Value is what holds, and Given what the caller has set: zero for the default.
	Value, Given N
}

// Shorter checks that a is shorter than b. The error is about a field that was given: a caller who
// has set b alone does not know a.
func Shorter(a, b Field[time.Duration]) error {
	if a.Value < b.Value {
		return nil
	}
	return outOfOrder(a, b, "be shorter than", "be longer than")
}

// InOrder checks that a is at most b. The error is about a field that was given.
func InOrder[N int | time.Duration](a, b Field[N]) error {
	if a.Value <= b.Value {
		return nil
	}
	return outOfOrder(a, b, "not be above", "not be below")
}

func outOfOrder[N int | time.Duration](a, b Field[N], must, reversed string) error {
	if a.Given == 0 {
		a, b, must = b, a, reversed
	}
	byDefault := ""
	if b.Given == 0 {
		byDefault = " by default"
	}
	return fmt.Errorf("field %s is %v: must %s %s, %v%s", a.Name, a.Value, must, b.Name, b.Value, byDefault)
}
