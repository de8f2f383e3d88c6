package outbox

import (
	"maps"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/consumer"
	"github.com/outboxgo/outbox/internal/deadletter"
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

// Metadata is what a handler gets in addition to the event itself.
type Metadata struct {
	// ID, Source, Type and Subject are attributes of CloudEvents. Events of a
	// [Recorder] carry the aggregate's id as Subject. Type is the one that was sent,
	// also where the handler gets a newer one by [Upcast].
	ID, Source, Type, Subject string
	// Time is when it happened; it may be zero in events of other producers.
	Time time.Time
	// ContentType is the content type of the payload.
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

	// Tombstone is set for an event without a payload, whose record has a null value and no content type:
	// see EventOptions.Tombstone. No codec and no upcaster is called, and the handler gets a zero event.
	// Subject is the id of the aggregate that is gone. [OncePer] takes no notice of such an event.
	Tombstone bool

	// Attempt counts the tries of this action on this event, from 1. A batch that
	// failed, and is handled again in parts, has used up none.
	Attempt int

	// Expired is set for ConsumerHooks.Repeated if no handler got the event because it had
	// expired, see EventOptions.Expires. The time is the extension expirytime.
	Expired bool

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
		Extensions: r.Extensions, Headers: r.Headers, Kafka: (*KafkaMetadata)(r.Kafka), Attempt: r.Attempt, Expired: r.Expired,
		Tombstone: r.Tombstone, origin: r.Origin,
	}
}

// DecodeCloudEvent reads a record as the CloudEvents 1.0 Kafka protocol binding has
// them, in either mode: what a [Relay] sends. Its error is a [*FieldError]. Where
// topics hold records of other producers as well, see [PlainRecords].
func DecodeCloudEvent(r *kgo.Record) (*Message, error) {
	m, err := consumer.DecodeCloudEvent(r)
	return (*Message)(m), public(err)
}

// PlainRecords reads external records, of producers that do not write CloudEvents: a
// payload, and perhaps headers. Its method Decode is a [ConsumerConfig.Decode]. Records
// that are CloudEvents are read as such, so that a topic may have both.
//
// What no header says may be in a member of the JSON in the value, if that is named
// here. Names of headers are not case-sensitive. If one of the headers below is not
// valid text, that is an error. All other headers that are text, and are not named like
// an attribute of CloudEvents, become extensions under their names in lower case. The
// key becomes the subject.
//
// If the payload is a JSON string that itself holds an object or an array, the payload
// is what the string holds. If a header content-type says that the value is not JSON,
// the value is not read as JSON.
type PlainRecords struct {
	// Type is the event type of records that do not name one.
	Type string
	// Source is where the events come from. Empty means the name of the topic.
	Source string

	// IDHeader has the event's id. Empty means event-id, or else id. A record without
	// an id goes by its position, topic-partition-offset: an event that its producer sends
	// twice is then two.
	IDHeader string
	// TypeHeader has the event type. Empty means event-type, eventType or type.
	TypeHeader string
	// TimeHeader has the time in RFC 3339, or in milliseconds since 1970. Empty means
	// event-time. A record without has the time of its timestamp.
	TimeHeader string

	// IDMember, TypeMember and TimeMember are members of the JSON object in the value.
	// Empty means none.
	IDMember, TypeMember, TimeMember string
	// DataMember is the member that is the payload. Empty means the whole value.
	DataMember string

	// Connect takes off what converters of Kafka Connect put around keys, headers and
	// values: an object of schema and payload, or the quotes of JSON.
	Connect bool
}

// Decode reads a record. Its error is a [*FieldError].
func (p PlainRecords) Decode(r *kgo.Record) (*Message, error) {
	m, err := consumer.PlainRecords(p).Decode(r)
	return (*Message)(m), public(err)
}

// DecodeDebezium reads the records of Debezium's outbox event router. The event's id is in the
// header id. Its type is in a header, by the option
// table.fields.additional.placement=type:header:eventType. The aggregate's id is in the key. The
// payload is JSON or, without table.expand.json.payload, a text that holds JSON, with any converter
// for JSON or texts. It is [PlainRecords] with Connect.
//
// Without that option the records name no type. If all records of a topic have the same type, use
// PlainRecords{Type: …, Connect: true}. With type:envelope:eventType, set TypeMember to eventType
// and DataMember to payload.
//
// With the connector of docs/move.md the records are CloudEvents as a relay sends them, with two
// exceptions. The headers in the column headers are a JSON object in the header outbox-headers, from
// which DecodeDebezium takes correlationid, traceparent and all other extension attributes. An event
// that does not expire has the header ce_expirytime without a value. So an event has the same id,
// source and extensions, whether Debezium or a relay has sent it.
func DecodeDebezium(r *kgo.Record) (*Message, error) {
	m, err := consumer.DecodeDebezium(r)
	return (*Message)(m), public(err)
}

// DecodeByTopic returns a [ConsumerConfig.Decode] that has a decoder for each of some
// topics. Records of other topics are read with [DecodeCloudEvent].
func DecodeByTopic(decoders map[string]func(*kgo.Record) (*Message, error)) func(*kgo.Record) (*Message, error) {
	decoders = maps.Clone(decoders)
	return func(r *kgo.Record) (*Message, error) {
		if decode := decoders[r.Topic]; decode != nil {
			return decode(r)
		}
		return DecodeCloudEvent(r)
	}
}

// The headers that a dead letter has in addition to those of its original record. It also has the
// key and the value of the original record.
const (
	// DeadLetterOriginalTopic, …Partition, …Offset and …Timestamp say where the
	// record was: the numbers in decimal, the timestamp in RFC 3339, UTC, to the
	// millisecond.
	DeadLetterOriginalTopic     = deadletter.OriginalTopic
	DeadLetterOriginalPartition = deadletter.OriginalPartition
	DeadLetterOriginalOffset    = deadletter.OriginalOffset
	DeadLetterOriginalTimestamp = deadletter.OriginalTimestamp
	// DeadLetterGroup and DeadLetterAction say who could not handle it. The action is
	// empty where the record was not fit for any.
	DeadLetterGroup  = deadletter.Group
	DeadLetterAction = deadletter.Action
	// DeadLetterError, DeadLetterClass and DeadLetterAttempts say why: the text of
	// the error, at most 2,000 bytes, its kind, and how often it was tried.
	DeadLetterError    = deadletter.Error
	DeadLetterClass    = deadletter.ErrorClass
	DeadLetterAttempts = deadletter.Attempts
	// DeadLetterFailedAt is when the dead letter was made, in RFC 3339, UTC.
	DeadLetterFailedAt = deadletter.FailedAt
	// DeadLetterValueOmitted is there if the dead-letter topic took the record only
	// without its value, which is in the original record still: its size in bytes.
	DeadLetterValueOmitted = deadletter.ValueOmitted
	// DeadLetterKeyOmitted and …HeadersOmitted are there if that was not enough. A key
	// above 1 KiB is omitted then, and of the headers those that do not fit into 8 KiB:
	// the size of the key in bytes, and the number of headers.
	DeadLetterKeyOmitted     = deadletter.KeyOmitted
	DeadLetterHeadersOmitted = deadletter.HeadersOmitted
	// DeadLetterDigest comes with each of them: the SHA-256 of the original's key, value and
	// headers, by which a replay recognizes it.
	DeadLetterDigest = deadletter.OriginalDigest
	// DeadLetterEditedFrom is there if an operator has written the value. It names the dead letter that has the value
	// from before, as topic-partition-offset.
	DeadLetterEditedFrom = deadletter.EditedFrom
)

// The headers of a record that was sent back from a dead-letter topic: only this group handles it,
// and only this action if one is named.
//
// Headers are input: a client that may write to the topic could hide an event with them. So they
// count only in a copy of a dead letter. ReplayFrom names the dead letter, and the consumer reads
// it in the dead-letter topic. Other records are handled as if they had no such headers.
const (
	ReplayGroup  = deadletter.ReplayGroup
	ReplayAction = deadletter.ReplayAction
)

// ReplayOf is a header of such a record too: where it was first, as
// topic-partition-offset. It stands for the id of an event that has none, see
// [PlainRecords].
const ReplayOf = deadletter.ReplayOf

// ReplayFrom is a header of such a record too: where its dead letter is, as
// topic-partition-offset.
const ReplayFrom = deadletter.ReplayFrom

// DeadLetterTopic returns the name of the topic for the dead letters of another:
// {topic}.dlq.
func DeadLetterTopic(topic string) string { return deadletter.Topic(topic) }
