package outbox

import (
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// deliveryRules are the configuration of what handles deliveries.
type deliveryRules struct {
	*handling.Rules // of the processor: their hooks are guarded

	Streams      map[string]handling.RetryPolicy // by topic, where it is not as for all
	Concurrency  int                             // lanes of each kind
	MaxPoll      int                             // events of a transaction
	PollInterval time.Duration
	Lease        time.Duration
}

// of returns how the events of a topic are tried again.
func (c *deliveryRules) of(topic string) handling.RetryPolicy { return c.Streams[topic].Over(c.Retry) }

// attempts returns how many attempts an event has with so many retries, as event_delivery can hold them.
func attempts(retries int) int { return min(max(0, retries), math.MaxInt32-1) + 1 }
