package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
	"github.com/outboxgo/outbox/internal/worker"
)

// Worker passes the events of a database to handlers, without Kafka: the handlers of a
// [Consumer]. Any number of processes may run workers of the same group; they share its
// work. Each group gets every event of the topics in which the registry has the events of its
// handlers.
//
// What is owed to a handler is a row of event_delivery. A handler with a transaction commits its
// effect, its note in event_handled and the end of the row together. One that fails is tried
// again later, and is DEAD after MaxRetries, until an operator requeues it. Of the events of a key,
// which are those of a topic and a partition key, each action gets one after the other, in the order in
// which they were recorded.
type Worker struct {
	engine *worker.Worker
	waker  *Waker
}

// NewWorker returns a worker of the handlers. The events are those that are recorded in db; closing
// it stays with the caller.
//
// A new group skips what was committed before its first start, unless From says otherwise. It
// keeps its position in outbox_cursor, as relays do: rows of outbox stay until it has them. So
// a group that is not needed any more has to be removed by an operator.
//
// NewWorker does no I/O. A running worker uses up to Concurrency connections of db for
// transactions, and five more, and one beside them, which all relays and workers on db share: it hears when other
// processes have recorded events, see [Waker]. The error names every bad field and handler.
func NewWorker(db *pgxpool.Pool, events *Registry, group string, cfg WorkerConfig, handlers ...Handler) (*Worker, error) {
	cfg = cfg.withDefaults()
	errs := []error{checkGroup(group), cfg.validate()}
	if db == nil {
		errs = append(errs, fmt.Errorf("db %w", ErrNilArgument))
	}
	if events == nil {
		errs = append(errs, fmt.Errorf("registry %w", ErrNilArgument))
	}
	var routes handling.Routes
	if events != nil {
		var err error
		routes, err = cfg.routes(events, handlers)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: worker config: %w", err)
	}
	rules := cfg.rules(group)
	waker := newWaker(db, cfg.Schema, rules.Handling.Log)
	alerts := cfg.Alerts.groupAlerts(watch.NewWorkerStore(db, cfg.Schema), group, false, cfg.Lease, rules.Handling.Log)
	return &Worker{engine: worker.New(db, rules, routes, waker.hub, alerts), waker: waker}, nil
}

// Group returns the consumer group.
func (w *Worker) Group() string { return w.engine.Group() }

// Topics returns the topics whose events the worker handles, sorted.
func (w *Worker) Topics() []string { return w.engine.Topics() }

// Waker returns the waker of this process, for transactions that record events. It works while Run does.
func (w *Worker) Waker() *Waker { return w.waker }

// Run handles events until ctx is cancelled; then it returns nil, within StopTimeout. In this
// time handlers finish the events that they are at, which has three fifths of it, and the rest goes
// back to others. Run may be called again afterwards; a second call at the same time returns
// [ErrRunning].
//
// A handler that ignores the end of its context cannot be ended. Run does not wait for it, and
// logs it with its event as an error. The connection of its transaction is closed, so that PostgreSQL
// rolls it back.
//
// Outages of PostgreSQL are waited out, not returned. The errors that Run returns need an operator:
// [ErrNotMigrated] and [ErrSequenceBehind].
func (w *Worker) Run(ctx context.Context) error { return runError("worker", w.engine.Run(ctx)) }

// Actions returns the actions of the handlers that get events of a type, sorted: each of
// them is a delivery of its own. There is none for a type without a handler.
func (w *Worker) Actions(eventType string) (actions []string) { return w.engine.Actions(eventType) }

// Deliver makes an attempt of an action on the event with this id in outbox, within tx: it is for
// tests, and sees what tx has recorded and not committed. Handlers with a transaction get a part
// of tx, which is rolled back if they fail. Nothing is written to event_delivery. Ahead is added to the
// time of the database, by which events expire: the waits before the attempt that the test has left out. Repeated is
// reported if the action was done before, or the event had expired. The error is that of the handler, of its codec, or
// PostgreSQL's.
//
// The module outboxtest makes plays of it, with retries.
func (w *Worker) Deliver(
	ctx context.Context, tx pgx.Tx, outboxID int64, action string, attempt int, ahead time.Duration,
) (repeated bool, err error) {
	repeated, err = w.engine.Deliver(ctx, tx, outboxID, action, attempt, ahead)
	return repeated, public(err)
}

// RetryWait returns how long a worker waits after an attempt, from 1, of an action on an event of a
// type that has failed with err, without the random part of a wait. Again is false if there is no other attempt:
// the delivery is DEAD, or the group has no such action. Blocks is true if later events of the key wait for the
// delivery: for its next attempt, or with HoldDead for an operator.
func (w *Worker) RetryWait(eventType, action string, attempt int, err error) (wait time.Duration, again, blocks bool) {
	return w.engine.RetryWait(eventType, action, attempt, err)
}

// WorkerHealth reports the state of a worker in this process.
type WorkerHealth struct {
	// Group is the consumer group.
	Group string
	// Live is false if only a restart of the process can help: Run has returned an
	// error, or a handler does not return.
	Live bool
	// Ready is false if this process should get no traffic, see Health.
	Ready bool
	// Works is false if this process does not handle events: see Reasons.
	Works bool
	// Answered is set once PostgreSQL has answered since Run began.
	Answered bool
	// Deliveries is how many deliveries this worker has.
	Deliveries int
	// Waiting counts what the group still has to handle, in all its processes, as this process has last seen it: by
	// action, topic and status. Pending are the events without a delivery. Of each kind 1,000 rows are read.
	Waiting []EventCount
	// Outages are those that have not ended.
	Outages []Outage
	// Reasons say why the worker is not live, not ready or does not work. What is paused, breakers of actions that are
	// not closed, and what of Waiting has failed, is dead or has waited for 5 min are among them, although they make it
	// none of these.
	Reasons []string
}

// Health reports the state of the worker without I/O. It is live, but not ready, before Run is
// called, during a stop and after a clean one; and before PostgreSQL has answered. It does not work
// in these cases, while PostgreSQL is unavailable or leases cannot be renewed, and while a handler runs on
// after its HandlerTimeout, or a transaction takes longer than SlowHandler to begin or to commit. Once a handler has
// run for twice as long, the worker is not live.
//
// It is not ready either before the group knows its handlers: until then, other processes of the group make
// no deliveries for new ones.
//
// The package outboxhttp serves this to probes.
func (w *Worker) Health() WorkerHealth {
	h := w.engine.Health()
	return WorkerHealth{h.Group, h.Live, h.Ready, h.Works, h.Answered, h.Deliveries, waitingOf(h.Waiting), outagesOf(h.Outages), h.Reasons}
}

// waitingOf returns counts of the engine.
func waitingOf(counts []tables.EventCount) (all []EventCount) {
	for _, c := range counts {
		all = append(all, EventCount(c))
	}
	return all
}

// Pause has this process handle nothing of some topics, or without topics nothing at all, until
// Resume is called. Handlers finish what they are at; the rest goes back. Other processes of the
// group go on. Pause may be called at any time, also before Run, and returns at once.
//
// Operators pause a group in all its processes, and over restarts, as they do with a consumer
// group. A topic is handled once no pause of it is left.
//
// The error names topics that the worker does not handle. Nothing is paused then.
func (w *Worker) Pause(topics ...string) error { return w.engine.Pause(topics) }

// Resume ends the pause that Pause has begun with the same topics, or without topics. It does not
// end those of operators. The error is that of Pause.
func (w *Worker) Resume(topics ...string) error { return w.engine.Resume(topics) }

// WorkerConfig tunes a [Worker]. The zero value is ready for production.
type WorkerConfig struct {
	// HandlerConfig has the settings that consumers and workers share.
	HandlerConfig

	// Unordered handles the events of a key concurrently, in any order. False means that each action handles the events
	// of a topic and key in order.
	Unordered bool

	// PollInterval is the time between polls for events that no [Waker] has announced. Zero means 1 s.
	PollInterval time.Duration

	// Lease is how long after a crash another process waits before it takes the events of the crashed process, at least
	// 1 s. It handles each of them alone. Zero means 30 s.
	Lease time.Duration

	// Streams has retry policies by topic, which replace Retry. [WithRetry] precedes both.
	Streams map[string]RetryPolicy

	// Retention says how long rows are kept, if the schema has no relay. Rows that another group needs stay longer. One
	// process of each group removes rows.
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
	c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
	c.PollInterval = cmp.Or(c.PollInterval, defaultWorkerPoll)
	c.Lease = cmp.Or(c.Lease, defaultWorkerLease)
	c.Retention = c.Retention.withDefaults()
	if c.Alerts.Alerter == nil {
		c.Alerts.Alerter = LogAlerter{Logger: c.Logger, without: []AlertKind{AlertDeadDeliveries}}
	}
	return c
}

func (c WorkerConfig) validate() error {
	errs := []error{
		c.HandlerConfig.validate(),
		check.NotAbove("Concurrency", c.Concurrency, maxConcurrency),
		check.NotNegative("PollInterval", c.PollInterval),
		c.Retention.validate(),
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
		Handling: c.HandlerConfig.rules(group), Streams: streams, FromStart: c.From == FromStart, Unordered: c.Unordered,
		Concurrency: c.Concurrency, MaxPoll: c.MaxPoll, PollInterval: c.PollInterval, Lease: c.Lease,
		Retention: c.Retention.rules(), RowsRemoved: removedHook(c.Hooks.RowsRemoved),
	}
}
