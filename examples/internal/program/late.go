package program

import (
	"testing"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// TestWithoutKafka requires that the program starts while Kafka is unavailable, and records events. Kafka starts when
// there are more than n. Then the program has to end with code 0: its report says whether all of them were published
// and handled. start starts it with more in its environment.
func TestWithoutKafka(t *testing.T, n int, start func(t *testing.T, env ...string) *Process) *Process {
	t.Helper()
	address, startKafka := testenv.LateKafka(t)
	p := start(t, "OUTBOX_KAFKA_BROKERS="+address)
	p.AwaitRows(t, "outbox", n)
	startKafka()
	require.Zero(t, p.Wait(t))
	p.RequireNoSchema(t)
	return p
}
