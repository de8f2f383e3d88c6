package relay

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
)

// A start removes rows of events that were sent. What a retrier has read before the start has ended is out of date: it
// was read while the transactional ids were fenced already, and such an event was sent again.
func TestRowsReadBeforeAStartAreNotSent(t *testing.T) {
	t.Parallel()
	x := NewExactly(ExactlyParts{}) // it would need Kafka to send
	before := x.generation.Load()
	x.Ready()
	outcomes, err := x.retry(context.Background(), context.Background(), before, []cursor.FailedRow{{Row: 1}, {Row: 2}})
	require.NoError(t, err)
	require.Equal(t, []Outcome{{}, {}}, outcomes)
}

// Without a start nothing is retried either.
func TestRetryWaitsForStart(t *testing.T) {
	t.Parallel()
	x := NewExactly(ExactlyParts{})
	outcomes, err := x.retry(context.Background(), context.Background(), 0, []cursor.FailedRow{{Row: 1}})
	require.NoError(t, err)
	require.Equal(t, []Outcome{{}}, outcomes)
}
