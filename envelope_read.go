package outbox

import (
	"cmp"
	"encoding/json"
	"fmt"
	"github.com/outboxgo/outbox/internal/envelope"
	"iter"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/kafka"
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

	byPosition bool    // Message.ByPosition
	origin     *origin // set for the handlers of a consumer or a worker
}

// Header returns the last value of a header, or "" if there is none. Names are not
// case-sensitive.
func (m Metadata) Header(name string) string {
	values, found := m.Headers[name], ""
	if values == nil {
		for other := range m.Headers {
			if strings.EqualFold(other, name) && other > found { // always the same one of several
				values, found = m.Headers[other], other
			}
		}
	}
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

// plainHeaders returns the headers of a record that handlers get as such, nil for none.
func plainHeaders(headers iter.Seq2[string, []byte]) (all map[string][]string) {
	for name, value := range headers {
		if isAttributeHeader(name) {
			continue
		}
		if all == nil {
			all = map[string][]string{}
		}
		all[name] = append(all[name], string(value))
	}
	return all
}

// isAttributeHeader reports whether a header is an attribute of CloudEvents, or one of a dead
// letter or of a replay.
func isAttributeHeader(name string) bool {
	const contentType = "content-type"
	return len(name) >= len(eventheader.Prefix) && strings.EqualFold(name[:len(eventheader.Prefix)], eventheader.Prefix) ||
		len(name) == len(contentType) && strings.EqualFold(name, contentType) || deadletter.IsOwn(name)
}

// Topic returns the topic of the record that brought the event, or, where a [Worker] has it from
// PostgreSQL, the one that its record would have. It is empty outside of handlers, middleware and
// hooks.
func (m Metadata) Topic() string {
	switch {
	case m.Kafka != nil:
		return m.Kafka.Topic
	case m.origin != nil:
		return m.origin.delivery.stream
	}
	return ""
}

// aggregateType returns the type of the aggregate that events of a [Recorder] have.
func (m Metadata) aggregateType() string { return m.Extensions["aggregatetype"] }

// Key returns the key of the record that brought the event, or, where a [Worker] has it from
// PostgreSQL, the one that its record would have. It is empty where [Metadata.Topic] is, and
// where a hook is called for an event that no handler got.
func (m Metadata) Key() string {
	switch {
	case m.Kafka != nil:
		return string(m.Kafka.Key)
	case m.origin != nil:
		return string(m.origin.key)
	}
	return ""
}

// origin is where an event came from: each record and each delivery has its own, by whose
// address the events of a transaction are told apart.
type origin struct {
	key      []byte         // events of the same key are handled in order; none without one
	kafka    KafkaMetadata  // of a record; Metadata.Kafka points to it
	delivery deliveryOrigin // of a delivery
}

// deliveryOrigin says which delivery brought an event.
type deliveryOrigin struct {
	id     int64
	stream string
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

	topicID kafka.TopicID // zero if it is not known
}

// decodeRecord reads the value and the headers of a Kafka record in either mode of the
// CloudEvents 1.0 Kafka protocol binding. It is the inverse of [stored.record]. A record
// in binary mode that has no ce_id goes by the header event-id or id, as other outboxes and
// Debezium send it. Its error is a [*FieldError].
func decodeRecord(value []byte, headers iter.Seq2[string, []byte]) (*Message, error) {
	attributes, contentType, eventID, id := map[string]string{}, "", "", ""
	for name, v := range headers {
		name = strings.ToLower(name)
		if attribute, ok := strings.CutPrefix(name, eventheader.Prefix); ok {
			attributes[attribute] = string(v)
			continue
		}
		switch name {
		case "content-type":
			contentType = string(v)
		case "event-id":
			eventID = string(v)
		case "id":
			id = string(v)
		}
	}
	if attributes["id"] == "" && cmp.Or(eventID, id) != "" {
		attributes["id"] = cmp.Or(eventID, id)
	}
	switch media := mediaType(contentType); {
	case media == "application/cloudevents+json":
		var err error
		if attributes, value, err = decodeStructured(value); err != nil {
			return nil, err
		}
	case strings.HasPrefix(media, "application/cloudevents"):
		return nil, unreadable("", "content-type", fmt.Errorf("%q %w: not a format that is known here", contentType, ErrMalformed))
	case contentType != "":
		attributes["datacontenttype"] = contentType
	}
	return newMessage(attributes, value)
}

// unreadable returns an error about a field of a received record.
func unreadable(eventType, field string, err error) error {
	return &FieldError{EventType: eventType, Index: -1, Field: field, Err: err}
}

// newMessage checks attributes and makes a message of them. It keeps the map.
func newMessage(attributes map[string]string, data []byte) (*Message, error) {
	eventType := attributes["type"]
	for _, name := range []string{"specversion", "id", "source", "type"} {
		if attributes[name] == "" {
			return nil, unreadable(eventType, name, ErrEmpty)
		}
	}
	for name, value := range attributes {
		if deadletter.IsOwn(name) { // which no event recorded from this one is to have
			delete(attributes, name)
			continue
		}
		for _, text := range []string{name, value} {
			if err := check.Text(text, math.MaxInt); err != nil && text != "" {
				return nil, unreadable(eventType, name, err)
			}
		}
	}
	take := func(name string) string { defer delete(attributes, name); return attributes[name] }
	if v := take("specversion"); v != string(envelope.SpecVersion) {
		return nil, unreadable(eventType, "specversion", fmt.Errorf("%q %w: want %s", v, ErrMalformed, envelope.SpecVersion))
	}
	m := &Message{
		ID: take("id"), Source: take("source"), Type: take("type"),
		Subject: take("subject"), ContentType: take("datacontenttype"), Data: data,
	}
	if at := take("time"); at != "" {
		var err error
		if m.Time, err = time.Parse(time.RFC3339, strings.ToUpper(at)); err != nil {
			return nil, unreadable(eventType, "time", fmt.Errorf("%w: %w", ErrTime, err))
		}
	}
	m.Extensions = attributes
	return m, nil
}

// decodeStructured reads an event in the CloudEvents JSON format.
func decodeStructured(value []byte) (attributes map[string]string, data []byte, err error) {
	if !utf8.Valid(value) {
		return nil, nil, unreadable("", "value", ErrUTF8)
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(value, &members); err != nil {
		return nil, nil, unreadable("", "value", fmt.Errorf("%w: %w", ErrMalformed, err))
	}
	attributes = make(map[string]string, len(members))
	for name, member := range members {
		if name == "data" || name == "data_base64" || string(member) == "null" {
			continue
		}
		text, err := attributeText(member)
		if err != nil {
			return nil, nil, unreadable("", name, err)
		}
		attributes[name] = text
	}
	data, err = structuredData(members["data"], members["data_base64"], attributes["datacontenttype"])
	if err != nil {
		return nil, nil, unreadable(attributes["type"], "data", err)
	}
	return attributes, data, nil
}

// attributeText returns the canonical text of an attribute's value. For numbers and
// booleans it is their JSON.
func attributeText(member json.RawMessage) (text string, err error) {
	switch member[0] {
	case '{', '[':
		return "", fmt.Errorf("%w: want a text, an integer or a boolean", ErrMalformed)
	case '"':
		if err := jsonb.CheckString(member); err != nil {
			return "", err
		}
		err = json.Unmarshal(member, &text)
		return text, err
	}
	return string(member), nil
}

// structuredData returns the bytes of data: the JSON as it is, or, if the content type
// is not JSON's, the text of a JSON string.
func structuredData(data, dataBase64 json.RawMessage, contentType string) ([]byte, error) {
	if dataBase64 == nil || string(dataBase64) == "null" {
		if data == nil || isJSONType(contentType) {
			return data, nil
		}
		var text string
		if err := json.Unmarshal(data, &text); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		return []byte(text), nil
	}
	if data != nil {
		return nil, fmt.Errorf("%w: both data and data_base64", ErrMalformed)
	}
	decoded := []byte{} // not nil, because empty data is not the same as no data
	if err := json.Unmarshal(dataBase64, &decoded); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return decoded, nil
}

// isJSONType reports whether a content type is JSON's, as CloudEvents decides it.
func isJSONType(contentType string) bool {
	media := mediaType(contentType)
	return media == "" || strings.HasSuffix(media, "/json") || strings.HasSuffix(media, "+json")
}

// mediaType returns a content type in lower case and without its parameters.
func mediaType(contentType string) string {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(media))
}
