package outbox

import (
	"maps"

	"github.com/outboxgo/outbox/internal/consumer"

	"github.com/twmb/franz-go/pkg/kgo"
)

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

// DecodeDebezium reads what the outbox event router of Debezium sends: the event's id in
// the header id, its type in a header by the option
// table.fields.additional.placement=type:header:eventType, the aggregate's id in the
// key, and the payload as JSON or, without table.expand.json.payload, as a text that
// holds it, with any converter for JSON or texts. It is [PlainRecords] with Connect.
//
// Without that option the records name no type. Where all of a topic have the same one,
// use PlainRecords{Type: …, Connect: true}; with type:envelope:eventType, set TypeMember
// to eventType and DataMember to payload.
//
// With the connector of docs/migrate.md the records are CloudEvents as a relay sends them, but for
// the headers that are in the column headers: these are a JSON object in the header
// outbox-headers, from which DecodeDebezium takes correlationid, traceparent and all other extension attributes. So an event has the same
// id, source and extensions, whether Debezium or a relay has sent it.
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
