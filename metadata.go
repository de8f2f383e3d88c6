package outbox

import (
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
)

// Message is an event as it was received in a record, from any producer, with the
// attributes of CloudEvents.
type Message struct {
	// ID is unique together with Source.
	ID, Source, Type string
	// ByPosition is set if the record named no id, and ID is its position in Kafka. A topic
	// that is deleted and created again has the same positions: the event is another one
	// then.
	ByPosition bool
	// Subject and ContentType may be empty.
	Subject, ContentType string
	// Time may be zero.
	Time time.Time
	// Extensions are the other attributes, dataschema among them, in their
	// canonical form as text.
	Extensions map[string]string
	// Data is the payload, nil for none. JSON is as the producer wrote it.
	Data []byte
}

// Metadata is what a handler gets beside the event itself.
type Metadata struct {
	// ID, Source, Type and Subject are attributes of CloudEvents. Events of a
	// [Recorder] carry the aggregate's id as Subject. Type is the one that was sent,
	// also where the handler gets a newer one by [Upcast].
	ID, Source, Type, Subject string
	// Time is when it happened; it may be zero in events of other producers.
	Time time.Time
	// ContentType is that of the payload.
	ContentType string
	// Extensions are the other attributes, such as aggregatetype, correlationid, traceid,
	// traceparent, and those of [EventType.Attribute] and [With]. A correlationid or traceid
	// that could not be recorded again, because it has more than 255 characters or a line
	// break for example, is left out. Where other producers have a trace id in the header
	// x-trace-id or traceid, in any case, it is traceid here.
	Extensions map[string]string
	// Headers are the headers of the record that are neither attributes of CloudEvents nor
	// those of a dead letter or of a replay, by their names as they were sent; the values of
	// a name are in their order, and hold whatever bytes were sent. See [Metadata.Header].
	// Where a [Worker] has the event from PostgreSQL, they are those that its record would
	// have. They are not to be changed. Nil means none.
	Headers map[string][]string

	// Kafka says which record brought the event. It is nil where no record did.
	Kafka *KafkaMetadata

	// Attempt counts the tries of this action on this event, from 1. A batch that
	// failed, and is handled again in parts, has used up none.
	Attempt int

	origin *envelope.Origin // set for the handlers of a consumer or a worker
}

// Header returns the last value of a header, or "" if there is none. Names are not
// case-sensitive.
func (m Metadata) Header(name string) string { return envelope.HeaderOf(m.Headers, name) }

// Topic returns the topic of the record that brought the event, or, where a [Worker] has it from
// PostgreSQL, the one that its record would have. It is empty outside of handlers, middleware and
// hooks.
func (m Metadata) Topic() string {
	switch {
	case m.Kafka != nil:
		return m.Kafka.Topic
	case m.origin != nil:
		return m.origin.Stream
	}
	return ""
}

// Key returns the key of the record that brought the event, or, where a [Worker] has it from
// PostgreSQL, the one that its record would have. It is empty where [Metadata.Topic] is, and
// where a hook is called for an event that no handler got.
func (m Metadata) Key() string {
	switch {
	case m.Kafka != nil:
		return string(m.Kafka.Key)
	case m.origin != nil:
		return string(m.origin.Key)
	}
	return ""
}

// KafkaMetadata is where a Kafka record is, and its key. It is not to be changed.
type KafkaMetadata struct {
	// Topic of the record.
	Topic string
	// Partition of the record.
	Partition int32
	// Offset of the record.
	Offset int64
	// Key of the record.
	Key []byte
}

// metadataOf returns what a function of the host is told of an event.
func metadataOf(r *envelope.Received) Metadata {
	return Metadata{
		ID: r.ID, Source: r.Source, Type: r.Type, Subject: r.Subject, Time: r.Time, ContentType: r.ContentType,
		Extensions: r.Extensions, Headers: r.Headers, Kafka: (*KafkaMetadata)(r.Kafka), Attempt: r.Attempt, origin: r.Origin,
	}
}
