package shop

import (
	"testing"

	"github.com/outboxgo/outbox/examples/internal/contracttest"
	"github.com/outboxgo/outbox/outboxcontract"
	"github.com/stretchr/testify/require"
)

// The contract is up to date, and allows what is recorded.
func TestContract(t *testing.T) {
	events, err := Events()
	require.NoError(t, err)
	outboxcontract.Check(t, "contract.json", events)
	contracttest.Require(t, events, err)
}
