package main

import (
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/contracttest"
)

// The contract allows what is recorded.
func TestContract(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("hello", outbox.Event("acme.greeting.sent.v1", "Greeting", GreetingSent.Recipient))
	contracttest.Require(t, events, err)
}
