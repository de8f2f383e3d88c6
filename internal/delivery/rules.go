package delivery

import (
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// Rules are the configuration of a [Run].
type Rules struct {
	*handling.Rules // of the processor, whose hooks are guarded

	Streams      map[string]handling.RetryPolicy // by topic, for those that differ from Retry
	Concurrency  int                             // lanes for handlers with a transaction, and as many for those without
	Spare        [2]int                          // more lanes, for handlers with a transaction and for those without
	SpareAfter   time.Duration                   // a lane whose call takes longer has a spare lane as its replacement; zero means never
	MaxPoll      int                             // deliveries in a transaction, at most
	PollInterval time.Duration
	Lease        time.Duration
}

// Of returns the retry policy for the events of a topic.
func (c *Rules) Of(topic string) handling.RetryPolicy { return c.Streams[topic].Over(c.Retry) }

// StopGrace is how long a stop waits for the answer to a claim that is under way. If the answer is lost, the process
// does not know which rows it has claimed.
func (c *Rules) StopGrace() time.Duration {
	const share = 10
	return c.StopTimeout / share
}

// Attempts returns the number of attempts for a number of retries. It fits into event_delivery.
func Attempts(retries int) int { return min(max(0, retries), math.MaxInt32-1) + 1 }
