package shop

import (
	"testing"

	"github.com/outboxgo/outbox/examples/internal/contracttest"
)

// The contract allows what is recorded.
func TestContract(t *testing.T) {
	t.Parallel()
	events, err := Events()
	contracttest.Require(t, events, err)
}
