package outboxarchive

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/outboxgo/outbox"
)

const (
	format  = "outbox-archive"
	version = 1
)

// header is the first line of a file.
type header struct {
	Format  string    `json:"format"`
	Version int       `json:"version"`
	Month   string    `json:"month"`
	Events  int       `json:"events"`
	FirstID int64     `json:"first_id"`
	LastID  int64     `json:"last_id"`
	From    time.Time `json:"created_from"`
	To      time.Time `json:"created_to"`
}

func (h *header) line() ([]byte, error) {
	b, err := json.Marshal(h)
	return append(b, '\n'), err
}

// line is an event. JSON stands in a line as PostgreSQL prints it. Other bytes, and JSON that does not fit
// into a line, are in base64.
type line struct {
	ID            int64           `json:"id"`
	EventID       string          `json:"event_id"`
	Type          string          `json:"event_type"`
	Source        string          `json:"source"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   string          `json:"aggregate_id"`
	ContentType   string          `json:"content_type"`
	Topic         string          `json:"topic,omitempty"`
	PartitionKey  string          `json:"partition_key,omitempty"`
	OccurredAt    time.Time       `json:"occurred_at"`
	CreatedAt     time.Time       `json:"created_at"`
	HeadersBase64 []byte          `json:"headers_base64,omitempty"`
	PayloadBase64 []byte          `json:"payload_base64,omitzero"`
	JSON          bool            `json:"json"`
	Sent          json.RawMessage `json:"sent,omitempty"`
	Headers       json.RawMessage `json:"headers,omitempty"` // at the end of the line; only read
	Payload       json.RawMessage `json:"payload,omitempty"` // at the end of the line; only read
}

// appendEvent appends the line of an event.
func appendEvent(b []byte, e *outbox.ArchivedEvent) ([]byte, error) {
	for _, text := range []struct{ name, value string }{{"event_id", e.EventID}, {"event_type", e.Type}, {"source", e.Source}, {"aggregate_type", e.AggregateType},
		{"aggregate_id", e.AggregateID}, {"content_type", e.ContentType}, {"topic", e.Topic}, {"partition_key", e.PartitionKey}} {
		if !utf8.ValidString(text.value) {
			return nil, fmt.Errorf("column %s %w: it is not valid UTF-8", text.name, outbox.ErrMalformed)
		}
	}
	l := line{ID: e.OutboxID, EventID: e.EventID, Type: e.Type, Source: e.Source, AggregateType: e.AggregateType, AggregateID: e.AggregateID, ContentType: e.ContentType,
		Topic: e.Topic, PartitionKey: e.PartitionKey, OccurredAt: e.OccurredAt.UTC(), CreatedAt: e.CreatedAt.UTC(), JSON: e.JSON, Sent: e.Sent}
	headers, payload := e.Headers, e.Payload
	if headers != nil && !fitsLine(headers) {
		l.HeadersBase64, headers = headers, nil
	}
	if e.ContentType != "" && (!e.JSON || !fitsLine(payload)) {
		l.PayloadBase64, payload = notNil(payload), nil
	}
	encoded, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	b = append(b, encoded[:len(encoded)-1]...)
	for _, raw := range []struct {
		name  string
		value []byte
	}{{"headers", headers}, {"payload", payload}} {
		if raw.value != nil {
			b = append(b, `,"`+raw.name+`":`...)
			b = append(b, raw.value...)
		}
	}
	return append(b, '}', '\n'), nil
}

// mayBeDeep is the length from which on JSON may exceed the depth that encoding/json reads. Each level has
// two brackets.
const mayBeDeep = 2 * 10_000

// fitsLine reports whether a reader of the line gets JSON back unchanged. Spaces around the value would be
// lost. In the line, the value is nested one level deeper.
func fitsLine(text []byte) bool {
	if len(text) == 0 || bytes.IndexByte(text, '\n') >= 0 || len(bytes.TrimSpace(text)) != len(text) || !json.Valid(text) {
		return false
	}
	return len(text) < mayBeDeep || json.Valid(slices.Concat([]byte{'['}, text, []byte{']'}))
}

// hasPayload reports whether exactly one member has the payload, or none that of a tombstone.
func (l *line) hasPayload() bool {
	if l.ContentType == "" {
		return l.Payload == nil && l.PayloadBase64 == nil
	}
	return (l.Payload == nil) != (l.PayloadBase64 == nil)
}

// parseEvent reads the line of an event.
func parseEvent(text []byte) (e outbox.ArchivedEvent, err error) {
	var l line
	if err := json.Unmarshal(text, &l); err != nil {
		return e, err
	}
	if l.EventID == "" || l.Type == "" || l.CreatedAt.IsZero() || !l.hasPayload() {
		return e, errors.New("it is no event: event_id, event_type, created_at, or either payload or payload_base64 is missing")
	}
	e = outbox.ArchivedEvent{OutboxID: l.ID, EventID: l.EventID, Type: l.Type, Source: l.Source, AggregateType: l.AggregateType, AggregateID: l.AggregateID,
		ContentType: l.ContentType, Topic: l.Topic, PartitionKey: l.PartitionKey, OccurredAt: l.OccurredAt, CreatedAt: l.CreatedAt, JSON: l.JSON,
		Payload: l.PayloadBase64, Headers: l.HeadersBase64, Sent: l.Sent}
	if l.Payload != nil {
		e.Payload = l.Payload
	}
	if l.Headers != nil {
		e.Headers = l.Headers
	}
	return e, nil
}
