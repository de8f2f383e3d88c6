package outbox

import (
	"math"
	"time"
)

// deliveryRules are the configuration of what handles deliveries.
type deliveryRules struct {
	*handlerRules // of the processor: their hooks are guarded

	Streams      map[string]retryPolicy // by topic, where it is not as for all
	Concurrency  int                    // lanes of each kind
	MaxPoll      int                    // events of a transaction
	PollInterval time.Duration
	Lease        time.Duration
}

// of returns how the events of a topic are tried again.
func (c *deliveryRules) of(topic string) retryPolicy { return c.Streams[topic].over(c.Retry) }

// attempts returns how many attempts an event has with so many retries, as event_delivery can hold them.
func attempts(retries int) int { return min(max(0, retries), math.MaxInt32-1) + 1 }
