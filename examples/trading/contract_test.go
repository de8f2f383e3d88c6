package main

import (
	"testing"

	"github.com/outboxgo/outbox/examples/internal/contracttest"
)

// The contract allows what is recorded.
func TestContract(t *testing.T) {
	t.Parallel()
	events, err := registry()
	contracttest.Require(t, events, err)
}
