package outbox

import (
	"cmp"
	"context"
	"maps"
	"time"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
)

// Mode is how a CloudEvent is written into a Kafka record.
type Mode int

const (
	// Binary puts the payload into the record's value as it is, and the
	// attributes into headers named ce_…. It is the default.
	Binary Mode = iota
	// Structured puts payload and attributes into the value, as one JSON object
	// of content type application/cloudevents+json. Payloads that are not JSON are
	// encoded as base64 in it, which is a third larger: RecorderConfig.MaxPayload
	// must leave room for that.
	Structured
)

// WithCorrelationID returns a context under which recorded events carry id, at
// most 255 characters, as the CloudEvents extension correlationid: in Kafka the
// header ce_correlationid.
func WithCorrelationID(ctx context.Context, id string) context.Context {
	return envelope.WithCarried(ctx, envelope.CorrelationKey, id)
}

// CorrelationID returns what [WithCorrelationID] put into the context, or "".
func CorrelationID(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.CorrelationKey)
}

// WithTraceID returns a context under which recorded events carry id, at most 255
// characters, as the CloudEvents extension traceid: in Kafka the header ce_traceid. It is
// for ids in a form of one's own, such as X-Trace-ID of a request; those of the W3C are
// part of [WithTraceParent].
func WithTraceID(ctx context.Context, id string) context.Context {
	return envelope.WithCarried(ctx, envelope.TraceIDKey, id)
}

// TraceID returns what [WithTraceID] put into the context, or "".
func TraceID(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.TraceIDKey)
}

// WithTraceParent returns a context under which recorded events carry a W3C
// traceparent, unless RecorderConfig.TraceParent reads it from elsewhere. In
// Kafka it is the header ce_traceparent, and traceparent for tracing libraries.
func WithTraceParent(ctx context.Context, traceparent string) context.Context {
	return envelope.WithCarried(ctx, envelope.TraceKey, traceparent)
}

// TraceParent returns what [WithTraceParent] put into the context, or "".
func TraceParent(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.TraceKey)
}

// EventOptions are options of a single event. They replace what its type, the configuration or the
// context says. A zero field is as for all events of the type.
type EventOptions struct {
	// ID is the event's id. Consumers take events of one source, id and type for the same event;
	// MigrateConfig.UniqueEventIDs has the second one refused. Zero means one of
	// RecorderConfig.NewID.
	ID uuid.UUID
	// Topic is where the event is sent. A [Consumer] and a [Worker] get it if their Topics
	// have it, see [HandlerConfig]. Empty means the topic of the type.
	Topic string
	// Key is the partition key. Empty means the key of the type.
	Key string
	// Attributes are extension attributes of CloudEvents, under names of lower-case letters
	// and digits; at the handler they are in Metadata.Extensions. They replace those of the
	// same names that all events of the type have, see [EventType.Attribute]; an empty value
	// omits such an attribute. Names that CloudEvents or outbox sets itself are refused.
	Attributes map[string]string
	// Headers are extra Kafka headers, under the rules of RecorderConfig.Headers. They replace
	// headers of the same names that RecorderConfig.Headers returns.
	Headers map[string]string
	// NotBefore is when the event is due, by the clock of the database and to the microsecond: no
	// relay and no worker gets it earlier. The table outbox_delayed keeps it until a leading relay or
	// worker, or outbox events move, moves it to outbox. Delayed events of a key are moved in the order of
	// their due times, and then in that in which they were recorded. They have no order with events
	// of the key without NotBefore. A time that has passed is due at once. [Recorder.Cancel] deletes
	// the event before. In the years 1 to 9999; zero means no delay.
	NotBefore time.Time
	// Expires is when the event becomes worthless, by the clock of the database and to the microsecond:
	// from then on no relay sends it and no handler gets it. It holds up nothing, and is counted as
	// expired. An event that is dead does not expire, nor does one that a handler of [HandleNoTx] has
	// begun to handle. Later than NotBefore, in the years 1 to 9999; zero means never.
	Expires time.Time
	// Tombstone records the event without a payload: the value of its record is null in every mode, and the attributes
	// are headers. A compacted topic then forgets the earlier events of its key, and later the tombstone itself. The
	// codec is not called. Handlers get the event with [Metadata].Tombstone.
	Tombstone bool
}

// With returns an event with options of its own, for [Recorder.Record] and whatever else takes
// events. The options are checked when the event is recorded: the error of a refused option is a
// [*FieldError] that names the field. If the event has options already, each option that is set
// here replaces the earlier one, and the others stay.
//
// The codec, the functions of the type and those of RecorderConfig get the event itself.
// RecorderHooks.Recording gets the argument of Record; [Unwrap] separates event and options.
func With(event DomainEvent, options EventOptions) DomainEvent {
	inner, before := unwrap(event)
	options.ID, options.Topic, options.Key = cmp.Or(options.ID, before.ID), cmp.Or(options.Topic, before.Topic), cmp.Or(options.Key, before.Key)
	options.Tombstone = options.Tombstone || before.Tombstone
	options.Attributes, options.Headers = merged(before.Attributes, options.Attributes), merged(before.Headers, options.Headers)
	if options.NotBefore.IsZero() {
		options.NotBefore = before.NotBefore
	}
	if options.Expires.IsZero() {
		options.Expires = before.Expires
	}
	return &eventWith{inner, options}
}

// Unwrap returns an event and the options that it has by [With].
func Unwrap(event DomainEvent) (inner DomainEvent, options EventOptions) {
	inner, own := unwrap(event)
	options = *own
	options.Attributes, options.Headers = maps.Clone(own.Attributes), maps.Clone(own.Headers)
	return inner, options
}

// eventWith is an event with options.
type eventWith struct {
	event   DomainEvent // without options
	options EventOptions
}

// OccurredAt implements [DomainEvent].
func (e *eventWith) OccurredAt() time.Time {
	if e == nil || check.IsNil(e.event) {
		return time.Time{} // Record refuses it
	}
	return e.event.OccurredAt()
}

var noOptions EventOptions

// unwrap is [Unwrap] without copies. Options are never nil.
func unwrap(event DomainEvent) (inner DomainEvent, options *EventOptions) {
	if e, is := event.(*eventWith); is && e != nil {
		return e.event, &e.options
	}
	return event, &noOptions
}

// merged returns a copy of two maps, of which the second goes before the first.
func merged(first, second map[string]string) map[string]string {
	if len(first) == 0 {
		return maps.Clone(second)
	}
	all := maps.Clone(first)
	maps.Copy(all, second)
	return all
}
