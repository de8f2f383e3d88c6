package envelope

import (
	"cmp"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/jsonb"
)

// DecodeRecord reads the value and the headers of a Kafka record in either mode of the
// CloudEvents 1.0 Kafka protocol binding. It is the inverse of [Event.Record]. A record
// in binary mode that has no ce_id goes by the header event-id or id, as other outboxes and
// Debezium send it. Its error is a [*FieldError].
func DecodeRecord(value []byte, headers iter.Seq2[string, []byte]) (*Message, error) {
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
	switch media := MediaType(contentType); {
	case media == "application/cloudevents+json":
		var err error
		if attributes, value, err = decodeStructured(value); err != nil {
			return nil, err
		}
	case isWhole(media):
		return nil, Unreadable("", "content-type", fmt.Errorf("%q %w: not a format that is known here", contentType, check.ErrMalformed))
	case contentType != "":
		attributes["datacontenttype"] = contentType
	}
	return NewMessage(attributes, value)
}

// SameEvent returns an error if another value makes a record one of another event. It returns nil if one of the values
// cannot be decoded.
func SameEvent(was, is []byte, headers iter.Seq2[string, []byte]) error {
	old, oldErr := DecodeRecord(was, headers)
	now, nowErr := DecodeRecord(is, headers)
	if oldErr != nil || nowErr != nil {
		return nil //nolint:nilerr // what cannot be decoded is no event
	}
	if now.ID == old.ID && now.Source == old.Source && now.Type == old.Type {
		return nil
	}
	return fmt.Errorf("%w: it is the event %.100q of %.100q, want %.100q of %.100q and the same type", check.ErrMalformed, now.ID, now.Source, old.ID, old.Source)
}

// Unreadable returns an error about a field of a received record. An attribute whose name is empty goes by attributes.
func Unreadable(eventType, field string, err error) error {
	return &FieldError{EventType: eventType, Index: -1, Field: cmp.Or(field, "attributes"), Err: err}
}

// NewMessage checks attributes and makes a message of them. It keeps the map.
func NewMessage(attributes map[string]string, data []byte) (*Message, error) {
	eventType := attributes["type"]
	for _, name := range []string{"specversion", "id", "source", "type"} {
		if attributes[name] == "" {
			return nil, Unreadable(eventType, name, check.ErrEmpty)
		}
	}
	for name, value := range attributes {
		if deadletter.IsOwn(name) { // which no event recorded from this one is to have
			delete(attributes, name)
			continue
		}
		for _, text := range []string{name, value} {
			if err := check.Text(text, math.MaxInt); err != nil && text != "" {
				return nil, Unreadable(eventType, name, err)
			}
		}
	}
	take := func(name string) string { defer delete(attributes, name); return attributes[name] }
	if v := take("specversion"); v != string(SpecVersion) {
		return nil, Unreadable(eventType, "specversion", fmt.Errorf("%q %w: want %s", v, check.ErrMalformed, SpecVersion))
	}
	m := &Message{
		ID: take("id"), Source: take("source"), Type: take("type"),
		Subject: take("subject"), ContentType: take("datacontenttype"), Data: data,
	}
	if at := take("time"); at != "" {
		var err error
		if m.Time, err = time.Parse(time.RFC3339, strings.ToUpper(at)); err != nil {
			return nil, Unreadable(eventType, "time", fmt.Errorf("%w: %w", check.ErrTime, err))
		}
	}
	m.Extensions = attributes
	return m, nil
}

// decodeStructured reads an event in the CloudEvents JSON format.
func decodeStructured(value []byte) (attributes map[string]string, data []byte, err error) {
	if !utf8.Valid(value) {
		return nil, nil, Unreadable("", "value", check.ErrUTF8)
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(value, &members); err != nil {
		return nil, nil, Unreadable("", "value", fmt.Errorf("%w: %w", check.ErrMalformed, err))
	}
	attributes = make(map[string]string, len(members))
	for name, member := range members {
		if name == "data" || name == "data_base64" || string(member) == "null" {
			continue
		}
		text, err := AttributeText(member)
		if err != nil {
			return nil, nil, Unreadable("", name, err)
		}
		attributes[name] = text
	}
	data, err = structuredData(members["data"], members["data_base64"], attributes["datacontenttype"])
	if err != nil {
		return nil, nil, Unreadable(attributes["type"], "data", err)
	}
	return attributes, data, nil
}

// AttributeText returns the canonical text of an attribute's value. For numbers and
// booleans it is their JSON.
func AttributeText(member json.RawMessage) (text string, err error) {
	switch member[0] {
	case '{', '[':
		return "", fmt.Errorf("%w: want a text, an integer or a boolean", check.ErrMalformed)
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
		if data == nil || IsJSONType(contentType) {
			return data, nil
		}
		var text string
		if err := json.Unmarshal(data, &text); err != nil {
			return nil, fmt.Errorf("%w: %w", check.ErrMalformed, err)
		}
		return []byte(text), nil
	}
	if data != nil {
		return nil, fmt.Errorf("%w: both data and data_base64", check.ErrMalformed)
	}
	decoded := []byte{} // not nil, because empty data is not the same as no data
	if err := json.Unmarshal(dataBase64, &decoded); err != nil {
		return nil, fmt.Errorf("%w: %w", check.ErrMalformed, err)
	}
	return decoded, nil
}

// SaysWhole reports whether a content type says that the payload is a whole CloudEvent, or several. In binary mode
// readers would take the payload for the event.
func SaysWhole(contentType string) bool { return isWhole(MediaType(contentType)) }

func isWhole(media string) bool { return strings.HasPrefix(media, "application/cloudevents") }

// IsJSONType reports whether a content type is JSON's, as CloudEvents decides it.
func IsJSONType(contentType string) bool {
	media := MediaType(contentType)
	return media == "" || strings.HasSuffix(media, "/json") || strings.HasSuffix(media, "+json")
}

// MediaType returns a content type in lower case and without its parameters.
func MediaType(contentType string) string {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(media))
}
