package outboxotel

import (
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/messagingconv"
)

// Attributes without a semantic convention.
const (
	relayKey   = attribute.Key("outbox.relay.name")
	retryKey   = attribute.Key("outbox.retry") // true for events from outbox_failed
	stateKey   = attribute.Key("outbox.state")
	statusKey  = attribute.Key("outbox.status")
	actionKey  = attribute.Key("outbox.action")
	resultKey  = attribute.Key("outbox.result")
	watchedKey = attribute.Key("outbox.watched")
	outageKey  = attribute.Key("outbox.outage")
)

// Names of operations, for messaging.operation.name.
const (
	recordOperation  = "record"
	sendOperation    = "send"
	processOperation = "process"
)

// Bounds of histograms. Those of durations are the ones that the conventions advise, and
// minutes and hours for events that wait for the end of an outage.
var (
	durationBounds = []float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	latencyBounds  = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200}
	batchBounds    = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000}
)

type instruments struct {
	recorded, sent, rejected, dead, expired, removed metric.Int64Counter
	sendTook, latency                                metric.Float64Histogram
	batchSize                                        metric.Int64Histogram

	consumed, lost, removedByWorkers metric.Int64Counter
	handlerTook                      metric.Float64Histogram
	consumerOutcomes, workerOutcomes outcomes

	leader, breaker, state                metric.Int64ObservableGauge
	members, groupBreakers                metric.Int64ObservableGauge
	outageAge                             metric.Float64ObservableGauge
	pending, led, stored, keys, lag, isUp metric.Int64ObservableGauge
	transaction                           metric.Int64ObservableGauge
	age                                   metric.Float64ObservableGauge
	stale                                 metric.Int64ObservableGauge
	staleAge                              metric.Float64ObservableGauge
	delayed                               metric.Int64ObservableGauge
	delayedAge                            metric.Float64ObservableGauge

	owed, atWork, givenUp, backlog metric.Int64ObservableGauge
	owedAge, backlogAge            metric.Float64ObservableGauge
	waiting                        metric.Int64ObservableGauge
	waitingAge                     metric.Float64ObservableGauge
}

// outcomes count what becomes of events in handlers. The breakers are those of their actions.
type outcomes struct {
	processed, failed, conflicts metric.Int64Counter
	breaker                      metric.Int64ObservableGauge
}

// maker makes instruments and collects errors.
type maker struct {
	metric.Meter
	errs []error
}

func (m *maker) counter(name, unit, what string) metric.Int64Counter {
	c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(what))
	m.errs = append(m.errs, err)
	return c
}

func (m *maker) seconds(name, what string) metric.Float64ObservableGauge {
	g, err := m.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(what))
	m.errs = append(m.errs, err)
	return g
}

// outcomes makes those of a consumer or a worker.
func (m *maker) outcomes(who string) outcomes {
	return outcomes{
		processed: m.counter("outbox."+who+".processed", "{event}", "Events and actions that a "+who+" is done with, or has tried."),
		failed:    m.counter("outbox."+who+".failed", "{event}", "Tries of actions on events that failed."),
		conflicts: m.counter("outbox."+who+".conflicts", "{event}", "Tries that PostgreSQL rolled back and that are repeated."),
		breaker:   m.gauge("outbox."+who+".breaker.state", "{state}", "1 for the state that the breaker of an action is in."),
	}
}

func (m *maker) gauge(name, unit, what string) metric.Int64ObservableGauge {
	g, err := m.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(what))
	m.errs = append(m.errs, err)
	return g
}

// make makes all instruments.
func (i *instruments) make(meter metric.Meter) error {
	m := &maker{Meter: meter}
	i.recorded = m.counter("outbox.recorder.events", "{event}", "Events that were given to a recorder.")
	i.rejected = m.counter("outbox.relay.rejected", "{event}", "Events that Kafka rejected and that are tried again.")
	i.dead = m.counter("outbox.relay.dead", "{event}", "Events that Kafka rejected until their retries were used up.")
	i.expired = m.counter("outbox.relay.expired", "{event}", "Events that were not sent because they had expired.")
	i.removed = m.counter("outbox.relay.removed", "{row}", "Rows that retention removed.")
	i.consumerOutcomes, i.workerOutcomes = m.outcomes("consumer"), m.outcomes("worker")
	i.removedByWorkers = m.counter("outbox.worker.removed", "{row}", "Rows that retention removed.")
	i.lost = m.counter("outbox.consumer.lost", "{message}", "Records that Kafka had removed before the group read them, or has lost.")
	i.leader = m.gauge("outbox.relay.leader", "{relay}", "1 where this process leads.")
	i.state = m.gauge("outbox.relay.state", "{state}", "1 for what the leader says of itself: works, not_working, or unknown.")
	i.breaker = m.gauge("outbox.relay.breaker.state", "{state}", "1 for the state of the leader's breaker, or for unknown.")
	i.outageAge = m.seconds("outbox.outage.age", "How long an outage has lasted that a leader or a member of a group has reported.")
	i.members = m.gauge("outbox.group.members", "{member}", "Processes of a consumer group, by whether they say that they work.")
	i.groupBreakers = m.gauge("outbox.group.breakers", "{member}", "Processes of a consumer group whose breaker of an action is not closed.")
	i.pending = m.gauge("outbox.relay.pending", "{event}", "Committed events that were not attempted, counted up to 100,000.")
	i.led = m.gauge("outbox.relay.led", "{relay}", "1 if somebody holds the lease, 0 if nobody.")
	i.transaction = m.gauge("outbox.relay.transaction", "{transaction}", "Number of the newest transaction in Kafka that was confirmed when the cursor moved last, of a relay that sends exactly once.")
	i.stored = m.gauge("outbox.relay.stored", "{event}", "Failed events, and those behind them, in outbox_failed, each status counted up to 10,000.")
	i.keys = m.gauge("outbox.relay.keys", "{key}", "Keys whose events wait, counted up to 10,000.")
	i.lag = m.gauge("outbox.consumer.lag", "{message}", "Records of a partition that are left to handle.")
	i.isUp = m.gauge("outbox.watch.up", "{query}", "1 if the last query of the database or Kafka worked, 0 if not.")
	i.age = m.seconds("outbox.relay.pending.age", "How long ago the oldest pending event was recorded; 0 without one.")
	i.stale = m.gauge("outbox.stale", "{event}", "Events that have waited for longer than they should, wherever they wait; of each kind up to 10,000 rows are read.")
	i.staleAge = m.seconds("outbox.stale.age", "How long ago the oldest of them was recorded; 0 without one.")
	i.delayed = m.gauge("outbox.delayed", "{event}", "Events in outbox_delayed, by whether outbox has rejected them; each counted up to 10,000.")
	i.delayedAge = m.seconds("outbox.delayed.age", "For how long the oldest of them has been due that was not moved to outbox; 0 without one.")
	i.owed = m.gauge("outbox.worker.pending", "{event}", "Deliveries that are due or wait, each status counted up to 10,000.")
	i.atWork = m.gauge("outbox.worker.processing", "{event}", "Deliveries that workers have, counted up to 100,000.")
	i.givenUp = m.gauge("outbox.worker.dead", "{event}", "Deliveries that were given up and nobody has resolved, counted up to 10,000.")
	i.backlog = m.gauge("outbox.worker.backlog", "{event}", "Committed events of all streams that no worker has looked at, counted up to 100,000.")
	i.owedAge = m.seconds("outbox.worker.pending.age", "How long ago the oldest pending delivery was made; 0 without one.")
	i.backlogAge = m.seconds("outbox.worker.backlog.age", "How long ago the oldest event of the backlog was recorded; 0 without one.")
	i.waiting = m.gauge("outbox.group.waiting", "{event}", "Events that consumer groups still have to handle, by where they wait; of each kind up to 10,000 rows are read.")
	i.waitingAge = m.seconds("outbox.group.waiting.age", "How long ago the oldest of them was recorded, or for how long an action has missed events; 0 without one.")
	var err error
	i.latency, err = m.Float64Histogram("outbox.relay.publish.latency", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(latencyBounds...),
		metric.WithDescription("Time from the start of the transaction that recorded an event, by the clock of PostgreSQL, until Kafka had it, by that of the relay."))
	m.errs = append(m.errs, err)
	i.batchSize, err = m.Int64Histogram("outbox.relay.batch.size", metric.WithUnit("{event}"), metric.WithExplicitBucketBoundaries(batchBounds...),
		metric.WithDescription("Events that were sent together."))
	m.errs = append(m.errs, err, i.makeConventional(meter))
	return errors.Join(m.errs...)
}

// makeConventional makes the instruments that the semantic conventions define.
func (i *instruments) makeConventional(meter metric.Meter) error {
	sent, err1 := messagingconv.NewClientSentMessages(meter)
	consumed, err2 := messagingconv.NewClientConsumedMessages(meter)
	send, err3 := messagingconv.NewClientOperationDuration(meter, metric.WithExplicitBucketBoundaries(durationBounds...))
	process, err4 := messagingconv.NewProcessDuration(meter, metric.WithExplicitBucketBoundaries(durationBounds...))
	i.sent, i.consumed, i.sendTook, i.handlerTook = sent.Inst(), consumed.Inst(), send.Inst(), process.Inst()
	return errors.Join(err1, err2, err3, err4)
}

// observables are the instruments that the callback observes.
func (i *instruments) observables() []metric.Observable {
	return []metric.Observable{i.leader, i.breaker, i.state, i.outageAge, i.members, i.groupBreakers, i.pending, i.led, i.transaction, i.stored, i.keys, i.lag, i.isUp, i.age, i.stale, i.staleAge,
		i.delayed, i.delayedAge, i.owed, i.atWork, i.givenUp, i.backlog, i.owedAge, i.backlogAge, i.waiting, i.waitingAge, i.consumerOutcomes.breaker, i.workerOutcomes.breaker}
}

// operation returns the attributes of an operation with Kafka, for conventional metrics and spans.
func operation(name string) []attribute.KeyValue {
	return []attribute.KeyValue{semconv.MessagingSystemKafka, semconv.MessagingOperationName(name)}
}

// postgres is what brings events to workers.
var postgres = semconv.MessagingSystemKey.String("postgresql")
