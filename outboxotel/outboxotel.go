// Package outboxotel makes metrics and traces of what outbox does, by the
// OpenTelemetry API. It is a module of its own, so that a service without
// OpenTelemetry links nothing of it.
//
// A [Telemetry] adds itself to the configuration of a recorder, a relay and a
// consumer, and goes on calling the hooks that are there. [Telemetry.Watch] adds what
// only the database and Kafka know.
//
// # Metrics
//
// Names and attributes are those of OpenTelemetry's semantic conventions for
// messaging where these have some, and outbox.… where not. Durations are seconds.
// [Config] says what bounds them: an attribute is the name of a relay, a group, a
// topic, a partition, an event type, an action, a kind of error; never an id or a key.
//
//	outbox.recorder.events               counter of events that were given to Record, by error.type
//	messaging.client.sent.messages       counter of events that Kafka took; with error.type: did not take
//	messaging.client.operation.duration  histogram of sends of a batch
//	outbox.relay.batch.size              histogram of events that were sent together
//	outbox.relay.publish.latency         histogram from the start of the recording transaction to Kafka's answer
//	outbox.relay.refused                 counter of refusals, retries among them
//	outbox.relay.dead                    counter of events that are dead
//	outbox.relay.leader                  1 where this process leads
//	outbox.relay.breaker.state           1 for the state that the breaker is in
//	outbox.relay.removed                 counter of rows that retention removed, by table
//	messaging.client.consumed.messages   counter of events that were given to handlers, tries and all
//	messaging.process.duration           histogram of calls of a handler
//	outbox.consumer.processed            counter of events and actions that are settled, by outbox.result: handled,
//	                                     repeated (a repeat was skipped), unknown (skipped), dead_lettered
//	outbox.consumer.failed               counter of tries that failed and count
//
// From the database and Kafka, by Watch:
//
//	outbox.relay.pending                 committed events that were not attempted, counted up to 100,000
//	outbox.relay.pending.age             how long ago the oldest of them was recorded
//	outbox.relay.led                     1 if somebody holds the lease, 0 if nobody
//	outbox.relay.stored                  rows of outbox_failed, by outbox.status: waiting, failed, parked, dead
//	outbox.relay.keys                    keys whose events wait, by outbox.state: parked, held
//	outbox.consumer.lag                  records that a partition of this process has left
//	outbox.watch.up                      1 if the last look worked, 0 if not: then the others are missing
//
// # Traces
//
// A span covers each Record, and its context travels with the events, as traceparent.
// The span of a send is its child; it is made afterwards, for the events of one Record
// and topic in a batch, and only if the parent is sampled. The span of a handler is a
// child too; that of several events together links to all of theirs, at most 128
// unless the SDK is told otherwise. What is recorded in a handler goes on from its
// span.
//
// The tracestate of a vendor does not travel: outbox stores a traceparent only.
package outboxotel

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Config tunes a [Telemetry]. The zero value is ready for production.
type Config struct {
	// MeterProvider makes the instruments. Nil means OpenTelemetry's global one.
	MeterProvider metric.MeterProvider
	// TracerProvider makes the spans. With that of the package trace/noop there are
	// none, and nothing is looked up for them. Nil means OpenTelemetry's global one.
	TracerProvider trace.TracerProvider

	// Attributes are added to every measurement and span, for example to tell two
	// schemas in a process apart. Each needs a Telemetry of its own then.
	Attributes []attribute.KeyValue

	// Interval is the least time between two questions to the database and to Kafka,
	// however often metrics are collected. Zero means 15 s.
	Interval time.Duration
	// Timeout bounds these questions, and so what they add to a collection. Zero means
	// 3 s.
	Timeout time.Duration

	// ErrorType names the kind of an error, for error.type, from a small set. Nil means:
	// what a method ErrorType() string returns; postgres_ and the SQLSTATE;
	// invalid_event, panic, timeout, canceled; or _OTHER.
	ErrorType func(error) string
}

const (
	defaultInterval = 15 * time.Second
	defaultTimeout  = 3 * time.Second
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
	c.Interval = cmp.Or(c.Interval, defaultInterval)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	return c
}

func (c Config) validate() error {
	var errs []error
	for name, d := range map[string]time.Duration{"Interval": c.Interval, "Timeout": c.Timeout} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("field %s is %v: %w", name, d, ErrNegative))
		}
	}
	return errors.Join(errs...)
}

// ErrNegative is returned by [New] for a duration below 0.
var ErrNegative = errors.New("must not be negative")

// Telemetry makes metrics and traces. It is safe for concurrent use.
type Telemetry struct {
	cfg    Config
	tracer trace.Tracer
	traced bool // spans may be wanted
	instruments

	mu           sync.Mutex
	relays       map[string]*relayState // by name
	watched      []*watched
	registration metric.Registration
}

// scope names what makes the metrics and spans.
const scope = "github.com/outboxgo/outbox/outboxotel"

// New returns a Telemetry. It does no I/O. Its error names every bad field, or is that
// of the MeterProvider.
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
		relays: map[string]*relayState{},
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

// Close ends what is observed at each collection: leader, breaker, and what Watch
// added. Counters and spans go on as long as their recorders, relays and consumers.
func (t *Telemetry) Close() error { return t.registration.Unregister() }

// attributes are those of the configuration and others.
func (t *Telemetry) attributes(others ...attribute.KeyValue) []attribute.KeyValue {
	return append(t.cfg.Attributes[:len(t.cfg.Attributes):len(t.cfg.Attributes)], others...)
}

// set is what a measurement carries.
func (t *Telemetry) set(others ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(t.attributes(others...)...))
}

// errorType is Config.ErrorType where none is given.
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
