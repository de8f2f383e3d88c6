// Package outboxotel adds metrics and traces to outbox with the OpenTelemetry API. It is
// a module of its own, so that a service without OpenTelemetry does not link it.
//
// A [Telemetry] adds itself to the configuration of a recorder, a relay, a consumer and a
// worker, and still calls the hooks that are set there. [Telemetry.WatchDatabase] and
// [Telemetry.WatchConsumers] add the metrics that are read from the database and from Kafka.
//
// # Metrics
//
// Names and attributes are those of OpenTelemetry's semantic conventions for messaging,
// or begin with outbox if the conventions define none. Durations are in seconds. The
// number of series is bounded: attributes are the names of relays, groups, topics,
// partitions, event types, actions and kinds of errors, never an id or a key. Writers
// choose topics and types. So at most 1,000 topics that Kafka has taken events for, 100
// others and 200 types are named, and all further ones are _other.
//
//	outbox.recorder.events               counter of events that were passed to Record, by error.type
//	messaging.client.sent.messages       counter of events that Kafka accepted; with error.type: did not
//	                                     accept
//	messaging.client.operation.duration  histogram of sends of a batch; with error.type: Kafka accepted none
//	                                     of the events
//	outbox.relay.batch.size              histogram of events per batch
//	outbox.relay.publish.latency         histogram from the start of the recording transaction to Kafka's
//	                                     answer
//	outbox.relay.rejected                counter of rejections, including those of retries
//	outbox.relay.dead                    counter of events that became dead
//	outbox.relay.expired                 counter of events that were not sent because they had expired
//	outbox.relay.leader                  1 if this process leads
//	outbox.relay.removed                 counter of rows that retention removed, by table
//	messaging.client.consumed.messages   counter of events that were passed to handlers, with every try
//	messaging.process.duration           histogram of calls of a handler
//	outbox.consumer.processed            counter of events and actions with a final result, by
//	                                     outbox.result: handled, repeated (a repeat was skipped), unknown
//	                                     (skipped), dead_lettered, expired (no handler got it)
//	outbox.consumer.failed               counter of failed tries that count against the limit
//	outbox.consumer.conflicts            counter of tries that PostgreSQL rolled back and that are repeated
//	                                     without being counted
//	outbox.consumer.breaker.state        1 for the current state of the breaker of an action, by group, once
//	                                     a handler was called for it
//	outbox.worker.processed              counter of events and actions, by outbox.result: done, repeated (a
//	                                     repeat was skipped), unknown (skipped), retried (a try failed,
//	                                     another one follows), dead, expired (no handler got it)
//	outbox.worker.failed                 counter of failed tries that count against the limit
//	outbox.worker.conflicts              counter of tries that PostgreSQL rolled back and that are repeated
//	                                     without being counted
//	outbox.worker.breaker.state          1 for the current state of the breaker of an action, by group, once
//	                                     a handler was called for it
//	outbox.worker.removed                counter of rows that retention removed where no relay does, by
//	                                     table
//	outbox.consumer.lost                 counter of records that Kafka had removed before the group read
//	                                     them, or has lost
//
// From Kafka, by WatchConsumers:
//
//	outbox.consumer.lag                  records of a partition of this process that are not handled yet
//
// From the database, by WatchDatabase:
//
//	outbox.relay.pending                 committed events that were not sent yet, counted up to 100,000
//	outbox.relay.pending.age             how long ago the oldest of them was recorded
//	outbox.relay.led                     1 if a process holds the lease, else 0
//	outbox.relay.transaction             number of the newest transaction in Kafka that was confirmed when the
//	                                     cursor moved last, of a relay that sends exactly once
//	outbox.relay.state                   1 for what the leader says of itself, by outbox.state: works,
//	                                     not_working, or unknown, if no process leads or the leader has said
//	                                     nothing yet
//	outbox.relay.breaker.state           1 for the state of the leader's breaker, by outbox.state: closed,
//	                                     half-open, open, or unknown
//	outbox.relay.stored                  rows of outbox_failed, by outbox.status: waiting, failed, parked,
//	                                     dead; each up to 10,000
//	outbox.relay.keys                    keys whose events wait, by outbox.state: parked, held; each up to
//	                                     10,000
//	outbox.stale                         events that have waited for longer than Config.StaleAfter, wherever
//	                                     they wait, by relay or consumer group: in outbox, in outbox_failed,
//	                                     as deliveries; of each kind up to 10,000 are read
//	outbox.stale.age                     how long ago the oldest of them was recorded
//	outbox.delayed                       events in outbox_delayed, by outbox.status: waiting until they are due,
//	                                     or rejected by the table outbox; each up to 10,000
//	outbox.delayed.age                   for how long the oldest of them has been due that was not moved to
//	                                     outbox; more than some seconds means that nothing moves them
//	outbox.outage.age                    how long an outage has lasted that a leader or a member of a group has
//	                                     reported, by relay or consumer group, outbox.outage (what does not
//	                                     work, as in the log) and error.type (the class of the last error); of
//	                                     several members the longest
//	outbox.group.members                 processes of a consumer group, by outbox.state: works, not_working, or
//	                                     unknown, for those that have not renewed their row in time
//	outbox.group.breakers                processes of a group whose breaker of an action is not closed, by
//	                                     action and outbox.state: half-open, open
//	outbox.worker.pending                rows of event_delivery, those that consumers have parked too, that
//	                                     are due or wait, by group, stream and action; each status up to
//	                                     10,000
//	outbox.worker.pending.age            how long ago the oldest of them was made
//	outbox.worker.processing             rows that workers have, by group, stream and action; up to 100,000
//	                                     together
//	outbox.worker.dead                   dead rows that are not resolved, by group, stream
//	                                     and action; up to 10,000
//	outbox.worker.backlog                committed events of all streams that no worker of a group has
//	                                     looked at, up to 100,000
//	outbox.worker.backlog.age            how long ago the oldest of them was recorded
//	outbox.group.waiting                 events that a group of consumers or workers still has to handle, by
//	                                     action, stream and outbox.status: pending (the backlog), waiting,
//	                                     failed, parked, dead, and missed, which are offsets that an action
//	                                     lacks because members without it have read them
//	outbox.group.waiting.age             how long ago the oldest of them was recorded, or since when an
//	                                     action has missed events
//	outbox.watch.up                      1 if the last query worked, or 0, and then the others are missing
//
// Leaders and members write what they say of themselves when they renew their lease or row, and within about a second
// after a change. So these metrics say the same in every process, and have the age of the last query besides. An outage
// has a series while it lasts. At most 1,000 kinds of outages are named; further ones are _other.
//
// The stream of a worker is in messaging.destination.name, as a topic is, and messaging.system says
// postgresql. A worker takes events from the backlog only as fast as its handlers are, so the backlog
// grows where they fall behind, and pending where they fail or are paused.
//
// Histograms, and counters of failures, are recorded in the context of a span. So they have exemplars of sampled traces
// with the SDK's default filter, trace_based. A batch has the exemplar of its first send span.
//
// # Traces
//
// Each Record has a span, whose context is sent with the events as traceparent. A send
// has a child span for the events of one Record and topic in a batch, made after the
// send, and only if the parent is sampled. Events that Kafka does not accept have a span
// with error.type for each send. A call of a handler for one event is a child span too.
// A call for several events starts a trace. Spans of sends and handlers also link to the
// spans of Records, at most 128 by default of the SDK. Events that a handler records
// continue the trace of the handler's span.
//
// The tracestate of a vendor is not sent: outbox stores the traceparent only.
//
// # Semantic conventions
//
// Names, kinds, links and attributes of spans, and the metrics that begin with messaging, follow the conventions for
// messaging and Kafka of version 1.44.0. Differences:
//
//   - The span of a Record has the type create for several events too, because they have one creation context. Its name
//     is record, without a destination: events of one Record may have several topics.
//   - server.address, messaging.client.id and messaging.kafka.cluster.id are missing, and on metrics
//     messaging.destination.partition.id. [Config].Attributes can add the first three.
//   - The names outbox.*, and cloudevents.event_type and db.collection.name on metrics, are additions.
//     messaging.system of a worker is postgresql, which the conventions do not list.
package outboxotel

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Config tunes a [Telemetry]. The zero value is ready for production.
type Config struct {
	// MeterProvider provides the instruments. Nil means OpenTelemetry's global one.
	MeterProvider metric.MeterProvider
	// TracerProvider provides the spans. That of the package trace/noop turns traces off. Nil means OpenTelemetry's
	// global one.
	TracerProvider trace.TracerProvider

	// Attributes are added to every measurement and span, for example to distinguish schemas.
	Attributes []attribute.KeyValue

	// Interval is the shortest time between two queries of the database and of Kafka. Zero means 15 s.
	Interval time.Duration
	// Timeout bounds these queries. Zero means 3 s.
	Timeout time.Duration

	// StaleAfter is how long an event may wait before outbox.stale counts it. Zero means 5 min.
	StaleAfter time.Duration

	// ErrorType returns the kind of an error for error.type, from a small set. Nil means the first that applies of: the
	// result of the error's method ErrorType() string; panic; invalid_event; postgres_ and the SQLSTATE; timeout;
	// canceled; _OTHER.
	ErrorType func(error) string
}

const (
	defaultInterval = 15 * time.Second
	defaultTimeout  = 3 * time.Second

	defaultStaleAfter = 5 * time.Minute
)

func (c Config) withDefaults() Config {
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	if c.TracerProvider == nil {
		c.TracerProvider = otel.GetTracerProvider()
	}
	if c.ErrorType == nil {
		c.ErrorType = errorType
	}
	c.ErrorType = contained(c.ErrorType)
	c.Interval = cmp.Or(c.Interval, defaultInterval)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	c.StaleAfter = cmp.Or(c.StaleAfter, defaultStaleAfter)
	return c
}

func (c Config) validate() error {
	var errs []error
	for name, d := range map[string]time.Duration{"Interval": c.Interval, "Timeout": c.Timeout, "StaleAfter": c.StaleAfter} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("field %s is %v: %w", name, d, ErrNegative))
		}
	}
	return errors.Join(errs...)
}

var (
	// ErrNegative is returned by [New] for a duration below 0.
	ErrNegative = errors.New("must not be negative")
	// ErrClosed is returned by [Telemetry.WatchDatabase] and [Telemetry.WatchConsumers] after Close.
	ErrClosed = errors.New("the Telemetry is closed")
)

// Telemetry makes metrics and traces. It is safe for concurrent use.
type Telemetry struct {
	cfg    Config
	tracer trace.Tracer
	traced bool // whether spans are made
	instruments
	names // of relays

	mu           sync.Mutex
	relays       map[string]*relayState // by name
	handlers     []*handlers
	watched      []*watched
	database     bool                      // WatchDatabase was called
	consumers    map[*outbox.Consumer]bool // of WatchConsumers
	closed       bool
	registration metric.Registration
}

// names are the topics and types that series name. Writers choose them, and the SDK forgets no series.
type names struct {
	topics *short.Topics
	types  short.Types
}

func newNames() names { return names{short.NewTopics(nil), short.NewTypes(nil)} }

// of returns a topic and a type as series name them.
func (n names) of(topic, eventType string, taken bool) (topicName, typeName string) {
	topicName = n.topics.Name(topic, taken)
	return topicName, n.types.Name(topicName, eventType)
}

// scope names what makes the metrics and spans.
const scope = "github.com/outboxgo/outbox/outboxotel"

// New returns a Telemetry. It does no I/O. Its error names every bad field, or is the
// error of the MeterProvider.
func New(cfg Config) (*Telemetry, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("outboxotel: config: %w", err)
	}
	cfg = cfg.withDefaults()
	_, off := cfg.TracerProvider.(noop.TracerProvider)
	t := &Telemetry{
		cfg:    cfg,
		tracer: cfg.TracerProvider.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL)),
		traced: !off,
		names:  newNames(),
		relays: map[string]*relayState{}, consumers: map[*outbox.Consumer]bool{},
	}
	meter := cfg.MeterProvider.Meter(scope, metric.WithSchemaURL(semconv.SchemaURL))
	err := t.make(meter)
	if err == nil {
		t.registration, err = meter.RegisterCallback(t.observe, t.observables()...)
	}
	if err != nil {
		return nil, fmt.Errorf("outboxotel: make instruments: %w", err)
	}
	return t, nil
}

// Close stops the metrics that are observed at each collection: leader, breakers of actions, and those of WatchDatabase
// and WatchConsumers. Counters and spans work as long as their recorders, relays and consumers.
func (t *Telemetry) Close() error {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock() // a collection that goes on meanwhile needs it
	return t.registration.Unregister()
}

// open returns [ErrClosed] if the Telemetry is closed. The caller holds mu.
func (t *Telemetry) open() error {
	if t.closed {
		return ErrClosed
	}
	return nil
}

// attributes returns those of the configuration and others.
func (t *Telemetry) attributes(others ...attribute.KeyValue) []attribute.KeyValue {
	return append(t.cfg.Attributes[:len(t.cfg.Attributes):len(t.cfg.Attributes)], others...)
}

// set returns the option for a measurement with attributes.
func (t *Telemetry) set(others ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(t.attributes(others...)...))
}

// contained returns f with [semconv.ErrorTypeOther] for a panic: it is called around handlers,
// and what they have done is not to be rolled back because of a metric.
func contained(f func(error) string) func(error) string {
	return func(err error) (kind string) {
		defer func() {
			if recover() != nil {
				kind = semconv.ErrorTypeOther.Value.AsString()
			}
		}()
		return f(err)
	}
}

// errorType is the default of Config.ErrorType.
func errorType(err error) string {
	var named interface{ ErrorType() string }
	var postgres interface{ SQLState() string }
	var panicked *outbox.PanicError
	var field *outbox.FieldError
	switch {
	case errors.As(err, &named):
		return named.ErrorType()
	case errors.As(err, &panicked):
		return "panic"
	case errors.As(err, &field):
		return "invalid_event"
	case errors.As(err, &postgres):
		return "postgres_" + postgres.SQLState()
	case isTimeout(err):
		return "timeout"
	case isCanceled(err):
		return "canceled"
	}
	return semconv.ErrorTypeOther.Value.AsString()
}
