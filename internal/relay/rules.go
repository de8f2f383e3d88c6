package relay

import (
	"math/rand/v2"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/wait"
)

// Rules say how the engine relays: see RelayConfig of the package outbox.
type Rules struct {
	Schema         string
	BatchSize      int
	PollInterval   time.Duration
	Lease          time.Duration
	RetryInterval  time.Duration
	MaxRetries     int
	RetryWait      time.Duration
	MaxRetryWait   time.Duration
	PassFailedKeys bool
	HoldDead       bool
	RetryDeadAfter map[string]time.Duration
	KeepSent       bool

	// Rejected and Dead are called for an event that Kafka rejected, and for one that is given up. Nil for none.
	Rejected, Dead func(e *envelope.Event, class string, err error, retries int)
}

// retryWait returns the wait before the n-th retry of a rejected event, from 1.
func (c Rules) WaitBefore(n int) time.Duration {
	d := wait.Exponential(c.RetryWait, c.MaxRetryWait, n-1)
	return d - rand.N(d/5+1)
}

// Values of outbox_failed.status.
const (
	statusWaiting  = "waiting"
	statusFailed   = "failed"
	statusParked   = "parked"
	statusDead     = "dead"
	statusResolved = "resolved"
)

// relayHealth is told how the session gets on.
type relayHealth interface {
	Progressed()
	CursorMoved()
	BeginLongTask(what string)
	EndLongTask()
}

// SentBatch has the outcomes of events that were sent together.
type SentBatch struct {
	Events, Failed, Waiting int
	Retried                 bool
	Began                   time.Time
	Took                    time.Duration

	Sent     []sentEvent
	NotTaken []notTaken
}

// sentEvent is an event with its topic.
type sentEvent struct {
	*envelope.Event
	Topic string
}

// notTaken is an event that Kafka has not accepted, with the class of its error.
type notTaken struct {
	sentEvent
	Class string
}
