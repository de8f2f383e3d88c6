package relay

import (
	"math/rand/v2"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/wait"
)

// Rules say how a relay works, with all defaults filled in. RelayConfig of the package outbox describes them.
type Rules struct {
	Schema, Name   string
	Form           envelope.RecordForm // of the records
	BatchSize      int
	PollInterval   time.Duration
	SendTimeout    time.Duration
	Lease          time.Duration
	RetryInterval  time.Duration
	MaxRetries     int
	RetryWait      time.Duration
	MaxRetryWait   time.Duration
	PassFailedKeys bool
	HoldDead       bool
	RetryDeadAfter map[string]time.Duration
	KeepSent       bool
	ExactlyOnce    string // cursor topic; empty for the mode at least once
	Breaker        breaker.Rules
	Retention      retention.Rules
}

// WaitBefore returns the wait before the n-th retry of a rejected event, from 1.
func (r Rules) WaitBefore(n int) time.Duration {
	d := wait.Exponential(r.RetryWait, r.MaxRetryWait, n-1)
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

// relayHealth is told about the progress of the session.
type relayHealth interface {
	Progressed()
	CursorMoved()
	BeginLongTask(what string)
	EndLongTask()
}
