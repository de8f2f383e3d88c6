package delivery

import (
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// Rules are the configuration of what handles deliveries.
type Rules struct {
	*handling.Rules // of the processor: their hooks are guarded

	Streams      map[string]handling.RetryPolicy // by topic, where it is not as for all
	Concurrency  int                             // lanes of each kind
	MaxPoll      int                             // events of a transaction
	PollInterval time.Duration
	Lease        time.Duration
}

// Of returns how the events of a topic are tried again.
func (c *Rules) Of(topic string) handling.RetryPolicy { return c.Streams[topic].Over(c.Retry) }

// Attempts returns how many attempts an event has with so many retries, as event_delivery can hold them.
func Attempts(retries int) int { return min(max(0, retries), math.MaxInt32-1) + 1 }
