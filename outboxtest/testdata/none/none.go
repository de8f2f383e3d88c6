// Package none has no event types.
package none

// T is nothing.
type T struct{}
