package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/worker"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/check"
)

// WorkerConfig tunes a [Worker]. The zero value is ready for production.
type WorkerConfig struct {
	// HandlerConfig is what a [Consumer] has, too. An event whose process ends while it is handled has
	// used up an attempt. HandlerTimeout is not bounded, because what a handler has is renewed while it
	// runs. Zero means 150 s.
	HandlerConfig

	// From is where a new group begins: with the events that are in outbox, or with what is
	// committed after its first start. Zero means FromEnd.
	From Start

	// Unordered handles events of a key side by side, in any order. Without it, of the events of a
	// stream and record key one is handled after the other by each action; one that waits for a
	// retry holds up those behind it.
	Unordered bool

	// Concurrency is how many handlers with a transaction may run at the same time, and how many
	// without one. Those with a transaction have three quarters of the connections of the pool in
	// any case, all workers and consumers that use it together. Zero means 4.
	Concurrency int

	// MaxPoll is the most events that are handled together in a transaction, at most 10,000; fewer
	// where handlers are slow, so that a transaction takes about a second. Zero means 100.
	MaxPoll int

	// PollInterval is how long it takes until a worker sees an event that no [Waker] has
	// announced. Zero means 1 s.
	PollInterval time.Duration

	// Lease is for how long an event is with a worker that does not renew it, because its process
	// is gone: then another one takes it. A worker renews what it has after each third of it. At
	// least 1 s. Zero means 30 s.
	Lease time.Duration

	// Streams is how the events of a topic are tried again, where that is not as for all. [WithRetry] goes before it.
	Streams map[string]RetryPolicy

	// StopTimeout is how long [Worker.Run] may outlive its context. Handlers have three fifths of
	// it to finish the events that they are at. Zero means 5 s.
	StopTimeout time.Duration

	// Alerts says when an alert is sent that deliveries are dead or wait for too long, and to whom.
	// Where a relay leads, its process sends these instead. Else it is for one worker: that of the first
	// group by name that has any. It alerts to all groups, and to relays that no process leads.
	Alerts AlertConfig

	// Retention says how long rows are kept. Workers remove them, of each group one process at a
	// time. What a relay or another group has still to get stays in any case.
	Retention RetentionConfig
}

const (
	defaultConcurrency    = 4
	defaultWorkerPoll     = time.Second
	defaultWorkerLease    = 30 * time.Second
	minWorkerLease        = time.Second
	defaultHandlerTimeout = 150 * time.Second
)

func (c WorkerConfig) withDefaults() WorkerConfig {
	c.HandlerConfig = c.HandlerConfig.withDefaults()
	c.HandlerTimeout = cmp.Or(c.HandlerTimeout, defaultHandlerTimeout)
	c.SlowHandler = cmp.Or(c.SlowHandler, defaultSlowHandler)
	c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
	c.MaxPoll = cmp.Or(c.MaxPoll, defaultMaxPoll)
	c.PollInterval = cmp.Or(c.PollInterval, defaultWorkerPoll)
	c.Lease = cmp.Or(c.Lease, defaultWorkerLease)
	c.StopTimeout = cmp.Or(c.StopTimeout, defaultStopTimeout)
	c.Retention = c.Retention.withDefaults()
	if c.Alerts.Alerter == nil {
		c.Alerts.Alerter = LogAlerter{Logger: c.Logger, without: []AlertKind{AlertDeadDeliveries}}
	}
	return c
}

func (c WorkerConfig) validate() error {
	errs := []error{
		c.HandlerConfig.validate(),
		c.From.validate(),
		check.NotNegative("HandlerTimeout", c.HandlerTimeout),
		check.NotNegative("SlowHandler", c.SlowHandler),
		check.NotNegative("Concurrency", c.Concurrency),
		check.NotAbove("Concurrency", c.Concurrency, maxConcurrency),
		check.NotNegative("MaxPoll", c.MaxPoll),
		check.NotAbove("MaxPoll", c.MaxPoll, maxMaxPoll),
		check.NotNegative("PollInterval", c.PollInterval),
		check.NotNegative("StopTimeout", c.StopTimeout),
		c.Retention.validate(),
		c.Alerts.settings().Validate(),
	}
	if c.Lease < minWorkerLease {
		errs = append(errs, fmt.Errorf("field Lease is %v: must be at least %v", c.Lease, minWorkerLease))
	}
	for topic, s := range c.Streams {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("field Streams: topic %.300q %w", topic, err))
		}
		errs = append(errs, check.NotNegative("Streams."+topic+".RetryWait", s.RetryWait),
			check.NotNegative("Streams."+topic+".MaxRetryWait", s.MaxRetryWait))
	}
	return errors.Join(errs...)
}

const maxConcurrency = 1000

// rules returns the configuration as the engine takes it.
func (c WorkerConfig) rules(group string) worker.Rules {
	streams := map[string]handling.RetryPolicy{}
	for topic, policy := range c.Streams {
		streams[topic] = handling.RetryPolicy(policy)
	}
	return worker.Rules{
		Handling: c.HandlerConfig.rules(group, c.StopTimeout), Streams: streams, FromStart: c.From == FromStart, Unordered: c.Unordered,
		Concurrency: c.Concurrency, MaxPoll: c.MaxPoll, PollInterval: c.PollInterval, Lease: c.Lease,
		Retention: c.Retention.rules(), RowsRemoved: removedHook(c.Hooks.RowsRemoved),
	}
}
