package outbox

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/record"
)

// RawEvent is an event whose type is not a Go type, with a payload that is encoded already. It is for
// gateways, webhooks and forwarders. [Recorder.Record] and whatever else takes events takes it, a value or
// a pointer, if the registry has [AllowRaw]; [With] gives it options. It is checked as other events are,
// when it is recorded.
//
// Where the registry knows EventType, handlers expect events like those of the registered type. So a raw
// event of that type has the same AggregateType and ContentType, which may be empty here, and the same
// topic, and needs EventOptions.Key if the type has [EventType.Key]. The payload is not decoded, and the
// attributes of [EventType.Attribute] are not added.
type RawEvent struct {
	// EventType is the CloudEvents type. It has the form {company}.{domain}.{action}.v{n}, unless
	// EventOptions.Topic or [ResolveTopics] names a topic.
	EventType string
	// AggregateType is the type of the aggregate, at most 100 characters.
	AggregateType string
	// AggregateID is the id of the aggregate, at most 255 characters. It is the partition key, unless
	// EventOptions.Key is.
	AggregateID string
	// Payload is stored and sent byte for byte, or stored as jsonb if ContentType is exactly
	// application/json.
	Payload []byte
	// ContentType is the media type of Payload. The payload of a JSON type must be valid JSON. Empty means
	// that of a registered type, or else application/json.
	ContentType string
	// DataSchema is the CloudEvents attribute dataschema: a URI of the schema of Payload. Empty means no
	// attribute.
	DataSchema string
	// Time is when it happened, to the microsecond.
	Time time.Time
}

// OccurredAt implements [DomainEvent].
func (e RawEvent) OccurredAt() time.Time { return e.Time }

// AllowRaw is an argument of [NewRegistry] that has recorders take a [RawEvent].
func AllowRaw() Definition { return rawAllowed{} }

// rawAllowed is the result of [AllowRaw].
type rawAllowed struct{}

// define implements [Definition]. It defines no type.
func (rawAllowed) define() *definition { return nil }

// rawDefinition returns the definition of a raw event with its own options.
func (r *Registry) rawDefinition(e *RawEvent, own *EventOptions) (*definition, error) {
	reject := func(field string, err error) (*definition, error) {
		return nil, &FieldError{EventType: e.EventType, Field: field, Err: err}
	}
	if !r.allowRaw {
		return reject("event", fmt.Errorf("RawEvent %w: the registry has no AllowRaw", ErrUnregistered))
	}
	def := definition{
		goType: reflect.TypeFor[RawEvent](), eventType: e.EventType, aggregateType: e.AggregateType,
		aggregateID: func(DomainEvent) string { return e.AggregateID }, topic: own.Topic,
	}
	contentType := e.ContentType
	if own.Tombstone && len(e.Payload) > 0 {
		return reject("payload", fmt.Errorf("%w: a tombstone has none", ErrMalformed))
	}
	if known := r.byName[e.EventType]; known != nil {
		def.topic, def.aggregateType = known.topic, cmp.Or(e.AggregateType, known.aggregateType)
		contentType = cmp.Or(contentType, known.codec.ContentType)
		switch {
		case def.aggregateType != known.aggregateType:
			return reject("aggregate_type", otherThanRegistered(def.aggregateType, known.aggregateType))
		case contentType != known.codec.ContentType:
			return reject("content_type", otherThanRegistered(contentType, known.codec.ContentType))
		case known.key != nil && own.Key == "":
			return reject("partition_key", fmt.Errorf("%w: the event type has a Key, so a raw event needs EventOptions.Key", ErrEmpty))
		}
	} else if own.Topic == "" && r.resolve != nil {
		topic, err := r.resolve(e.EventType)
		if err != nil {
			return reject("topic", fmt.Errorf("cannot be resolved: %w", err))
		}
		def.topic = topic
	}
	def.codec = rawCodec(e, cmp.Or(contentType, record.JSONType))
	if err := def.check(); err != nil {
		return reject(err.Field, err.Err)
	}
	return &def, nil
}

func otherThanRegistered(value, registered string) error {
	return fmt.Errorf("%.300q %w: the event type is registered with %q", value, ErrMalformed, registered)
}

// rawCodec returns the codec of a single raw event.
func rawCodec(e *RawEvent, contentType string) Codec {
	return Codec{
		ContentType: contentType,
		Encode: func(context.Context, any) ([]byte, error) {
			if contentType != record.JSONType && envelope.IsJSONType(contentType) && !json.Valid(e.Payload) {
				return nil, fmt.Errorf("%w: not JSON, as %s is", check.ErrMalformed, contentType)
			}
			return e.Payload, nil
		},
		Decode:     func(context.Context, []byte, any) error { return ErrUnregistered }, // is not called: no handler takes a RawEvent
		DataSchema: func(context.Context) string { return e.DataSchema },
	}
}
