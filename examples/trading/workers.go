package main

import (
	"errors"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The consumer groups. Each gets every event of its streams, and its processes share them.
const (
	orderExecutor = "order-executor"
	notifications = "notification"
	backtesting   = "backtest"
	systemGroup   = "system"
)

// group is a consumer group, without what runs it.
type group struct {
	name string
	outbox.HandlerConfig
	handlers []outbox.Handler
}

// groups returns the four groups.
func (a *app) groups() ([]group, error) {
	operators, err := outboxops.NewConsumers(a.db, outboxops.ConsumersConfig{Schema: a.schema})
	if err != nil {
		return nil, err
	}
	config := func(timeout time.Duration) outbox.HandlerConfig {
		return outbox.HandlerConfig{
			Schema:         a.schema,
			From:           outbox.FromStart, // signals do not wait until the groups run
			HandlerTimeout: timeout,
			Logger:         a.log,
		}
	}
	orders := config(10 * time.Second)
	orders.Retry = outbox.RetryPolicy{MaxRetries: commandRetries, RetriesFor: retries}
	return []group{
		{orderExecutor, orders, executor{a.db, a.bus, exchange{a.exchange, newHTTP(exchangeTimeout)}, a.wake}.handlers()},
		{notifications, config(10 * time.Second), notification{a.db, a.exchange, newHTTP(pushTimeout)}.handlers()},
		{backtesting, config(time.Hour), a.backtests().handlers()},
		{systemGroup, config(10 * time.Second), system{operators}.handlers()},
	}, nil
}

func (a *app) backtests() backtests { return backtests{a.db, a.bus, a.wake, a.bar} }

// streams says how failed events are tried again, by stream. A fifth of each wait is left to
// chance. A process that is killed costs each event that it is at a try: a backtest takes so long
// that it needs more of them. Commands have no MaxRetries here, because a stream that has one does
// not use the RetriesFor of its group.
var streams = map[string]outbox.RetryPolicy{
	tradeCommand:    {RetryWait: 500 * time.Millisecond, MaxRetryWait: time.Minute},
	tradeEvent:      {RetryWait: time.Second, MaxRetryWait: time.Minute},
	backtestCommand: {MaxRetries: 30, RetryWait: time.Second, MaxRetryWait: 5 * time.Minute},
	systemEvent:     {RetryWait: 500 * time.Millisecond, MaxRetryWait: time.Minute},
}

// workers runs the groups on PostgreSQL alone.
func (a *app) workers() (workers []*outbox.Worker, err error) {
	groups, err := a.groups()
	for _, g := range groups {
		w, bad := outbox.NewWorker(a.db, a.events, g.name, outbox.WorkerConfig{
			HandlerConfig: g.HandlerConfig,
			PollInterval:  200 * time.Millisecond,
			Lease:         a.lease,
			Streams:       streams,
		}, g.handlers...)
		workers, err = append(workers, w), errors.Join(err, bad)
	}
	return workers, err
}

// consumers runs the same groups with Kafka, where a relay brings the events: the handlers
// stay as they are. Nothing else in this program changes but who calls Run, and whom a
// commit wakes.
func (a *app) consumers(kafka []kgo.Opt) (consumers []*outbox.Consumer, err error) {
	groups, err := a.groups()
	for _, g := range groups {
		c, bad := outbox.NewConsumer(a.db, kafka, a.events, g.name, outbox.ConsumerConfig{
			HandlerConfig:   g.HandlerConfig,
			MaxPollInterval: max(5*time.Minute, 2*g.HandlerTimeout), // a partition waits for its handler
		}, g.handlers...)
		consumers, err = append(consumers, c), errors.Join(err, bad)
	}
	return consumers, err
}
