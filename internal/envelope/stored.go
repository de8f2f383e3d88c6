// Package envelope has events as outbox stores them, and makes CloudEvents 1.0 of them: in binary mode with the
// attributes as headers, in structured mode as one JSON object. It knows neither PostgreSQL nor a Kafka client.
package envelope

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/short"
)

// Event is an event as it is stored. It owns its slices.
type Event struct {
	ID            int64 // outbox.id
	EventID       []byte
	EventType     []byte
	Source        []byte
	AggregateType []byte
	AggregateID   []byte
	Payload       []byte
	IsJSON        bool      // payload comes from the jsonb column
	ContentType   []byte    // empty for a tombstone, which has no payload
	Topic         []byte    // nil: derived from eventType
	PartitionKey  []byte    // nil: aggregateID
	Headers       []byte    // JSON object of strings, or nil
	OccurredAt    []byte    // RFC 3339, see appendTime; nil: it cannot be written so
	CreatedAt     time.Time // start of its transaction; only for hooks
	Expiry        *Expiry   // nil: the event does not expire
	Size          int       // bytes of payload and headers, as PostgreSQL prints them; 0: not asked for
	Unreadable    error     // why the row is not read; then payload and headers are missing
}

// Expiry is when an event becomes worthless.
type Expiry struct {
	At    time.Time // by the clock of the database
	until time.Time // the same by the monotonic clock of this process; zero if it is not known
}

// NewExpiry returns the expiry of an event that was just read, when the clock of the database showed now. From then on
// the monotonic clock counts, so the time of this host does not matter.
func NewExpiry(at, now time.Time) *Expiry { return &Expiry{at, time.Now().Add(at.Sub(now))} }

// HasExpired reports whether the event has expired, as far as that is known.
func (e *Event) HasExpired() bool {
	return e.Expiry != nil && !e.Expiry.until.IsZero() && time.Until(e.Expiry.until) <= 0
}

// UnreadableError is the error of an event whose row PostgreSQL cannot print.
type UnreadableError struct {
	ID      int64 // outbox.id
	EventID string
	Column  string
	Err     error // of PostgreSQL
}

// Error implements error.
func (e *UnreadableError) Error() string {
	return fmt.Sprintf("row %d of outbox, event %s: column %s cannot be read: %v", e.ID, e.EventID, e.Column, e.Err)
}

// Unwrap returns the error of PostgreSQL.
func (e *UnreadableError) Unwrap() error { return e.Err }

// TooLargeError is the error of an event that is larger than any record that the Kafka client would send. Its payload
// and its headers stay in PostgreSQL.
type TooLargeError struct {
	ID         int64 // outbox.id
	EventID    string
	Size, Most int // bytes of payload and headers, as PostgreSQL prints them
}

// Error implements error.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("row %d of outbox, event %s: %d bytes as printed, at most %d are sent", e.ID, e.EventID, e.Size, e.Most)
}

// IsTombstone reports whether the record of the event has a null value.
func (e *Event) IsTombstone() bool { return len(e.ContentType) == 0 && e.Payload == nil }

// Destination returns the topic. A row that was not written by a Recorder may have a type from which no topic can be
// derived.
func (e *Event) Destination() (string, error) {
	if e.Topic != nil {
		return string(e.Topic), nil
	}
	name := string(e.EventType)
	if !check.HasTopic(name) {
		return "", &FieldError{EventType: name, Index: -1, Field: "event_type", Err: check.ErrMalformed}
	}
	return check.TopicOf(name), nil
}

// Key returns the partition key.
func (e *Event) Key() []byte {
	if e.PartitionKey != nil {
		return e.PartitionKey
	}
	return e.AggregateID
}

var (
	// SpecVersion is the version of CloudEvents.
	SpecVersion    = []byte("1.0")
	structuredType = []byte("application/cloudevents+json; charset=UTF-8")
)

// RecordHeaders is the number of headers of a record, without the event's own ones.
const RecordHeaders = 8

// RecordForm is how events become records.
type RecordForm struct {
	InJSON  bool // the CloudEvents JSON format, not the binary one
	Further eventheader.Further
}

// Record returns the value of the event's Kafka record and passes its headers to add,
// in the form of the CloudEvents 1.0 Kafka protocol binding. The value of a tombstone is nil, and the attributes are
// headers in every form; that of any other event is not nil.
func (e *Event) Record(form RecordForm, add func(name string, value []byte)) ([]byte, error) {
	if e.Unreadable != nil {
		return nil, e.Unreadable
	}
	if err := e.check(); err != nil {
		return nil, err
	}
	own, err := e.OwnHeaders()
	if err != nil {
		return nil, err
	}
	if e.Expiry != nil {
		if own == nil {
			own = map[string]string{}
		}
		own[eventheader.Stored(eventheader.ExpiryTime)] = string(AppendTime(nil, e.Expiry.At))
	}
	tombstone := e.IsTombstone()
	if form.InJSON && !tombstone {
		add("content-type", structuredType)
		addOwn(own, false, add)
		form.Further.Add(own, e.EventID, add)
		return e.structured(own), nil
	}
	add("ce_specversion", SpecVersion)
	add("ce_id", e.EventID)
	add("ce_source", e.Source)
	add("ce_type", e.EventType)
	add("ce_subject", e.AggregateID)
	add("ce_time", e.OccurredAt)
	add("ce_aggregatetype", e.AggregateType)
	if !tombstone {
		add("content-type", e.ContentType)
	}
	addOwn(own, true, add)
	form.Further.Add(own, e.EventID, add)
	if e.Payload == nil && !tombstone {
		return []byte{}, nil
	}
	return e.Payload, nil
}

// check rejects what no CloudEvent has. A [Recorder] records no such event; other writers may.
func (e *Event) check() error {
	var field string
	err := check.ErrEmpty
	switch {
	case len(e.EventType) == 0:
		field = "event_type"
	case len(e.Source) == 0:
		field = "source"
	case len(e.AggregateID) == 0:
		field = "aggregate_id"
	case e.OccurredAt == nil:
		field, err = "occurred_at", fmt.Errorf("%w: not in the years 1 to 9999", check.ErrTime)
	case SaysWhole(string(e.ContentType)):
		field, err = "content_type", fmt.Errorf("%.100q %w: it says that the payload is a CloudEvent", e.ContentType, check.ErrMalformed)
	default:
		return nil
	}
	return &FieldError{EventType: string(e.EventType), Index: -1, Field: field, Err: err}
}

// addOwn adds an event's own headers in the order of their names. With attributes, it
// also adds those that are attributes of CloudEvents as such.
func addOwn(own map[string]string, attributes bool, add func(name string, value []byte)) {
	if len(own) == 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		value, attribute := []byte(own[name]), eventheader.Attribute(name)
		if attributes && attribute != "" {
			add(eventheader.Prefix+attribute, value)
		}
		if attribute == "" || attribute == eventheader.TraceParent {
			add(name, value)
		}
	}
}

// OwnHeaders decodes the stored headers. A row that was not written by a [Recorder] may
// have an attribute or a reserved name among them that must not be there.
func (e *Event) OwnHeaders() (map[string]string, error) {
	if e.Headers == nil {
		return nil, nil
	}
	bad := func(err error) error {
		return &FieldError{EventType: string(e.EventType), Index: -1, Field: "headers", Err: err}
	}
	var own map[string]string
	if err := json.Unmarshal(e.Headers, &own); err != nil {
		return nil, bad(fmt.Errorf("%w: %w", check.ErrMalformed, err))
	}
	for name := range own {
		if err := eventheader.CheckStored(name); err != nil {
			return nil, bad(err)
		}
	}
	return own, nil
}

// TraceParent returns the traceparent among the stored headers, or "". It is called for every event
// of a batch, and decoding a JSON object takes microseconds. So it first searches the text for the
// quoted name. In a value, the quotes of the same name would be escaped. It cuts out the value if
// that is printed as jsonb prints it.
func (e *Event) TraceParent() string {
	const name, length = `"` + eventheader.TraceParent + `"`, 55
	at := bytes.Index(e.Headers, []byte(name))
	if at < 0 {
		return ""
	}
	value, ok := bytes.CutPrefix(e.Headers[at+len(name):], []byte(`: "`))
	if ok && len(value) > length && value[length] == '"' && bytes.IndexByte(value[:length], '\\') < 0 && bytes.IndexByte(value[:length], '"') < 0 {
		return string(value[:length])
	}
	own, _ := e.OwnHeaders() // an event with bad headers was rejected before
	return own[eventheader.TraceParent]
}

// Context adds the event's correlation id and trace id to ctx, for log lines about the event.
func (e *Event) Context(ctx context.Context) context.Context {
	own, _ := e.OwnHeaders() // without one if the headers are bad
	if id := own[eventheader.Correlation]; id != "" {
		ctx = WithCarried(ctx, CorrelationKey, id)
	}
	if id := own[eventheader.Stored(eventheader.TraceID)]; id != "" {
		ctx = WithCarried(ctx, TraceIDKey, id)
	}
	return ctx
}

// structured returns the event in the CloudEvents JSON format.
func (e *Event) structured(own map[string]string) []byte {
	b := make([]byte, 0, 512+len(e.Payload)*4/3)
	b = append(b, `{"specversion":"1.0"`...)
	b = appendAttribute(b, "id", e.EventID)
	b = appendAttribute(b, "source", e.Source)
	b = appendAttribute(b, "type", e.EventType)
	b = appendAttribute(b, "subject", e.AggregateID)
	b = appendAttribute(b, "time", e.OccurredAt)
	b = appendAttribute(b, "aggregatetype", e.AggregateType)
	if len(own) > 0 {
		for _, name := range slices.Sorted(maps.Keys(own)) {
			if attribute := eventheader.Attribute(name); attribute != "" {
				b = appendAttribute(b, attribute, []byte(own[name]))
			}
		}
	}
	b = appendAttribute(b, "datacontenttype", e.ContentType)
	if e.IsJSON && IsJSONType(string(e.ContentType)) { // of another type, data would be a text
		b = append(append(b, `,"data":`...), e.Payload...)
	} else {
		b = append(b, `,"data_base64":"`...)
		b = base64.StdEncoding.AppendEncode(b, e.Payload)
		b = append(b, '"')
	}
	return append(b, '}')
}

// appendAttribute appends ,"name":"value".
func appendAttribute(b []byte, name string, value []byte) []byte {
	quoted, _ := json.Marshal(string(value)) // a string always encodes
	b = append(append(append(b, `,"`...), name...), `":`...)
	return append(b, quoted...)
}

// AppendTime appends a time in RFC 3339, UTC, to the microsecond.
func AppendTime(b []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(b, "2006-01-02T15:04:05.999999Z07:00")
}

// Limits of what an error repeats of its input, in bytes.
const (
	maxNameText   = 300
	maxReasonText = 1_000
)

// FieldError says which field of an event was rejected. The package outbox shows it as its own FieldError.
type FieldError struct {
	EventType string
	Index     int
	Field     string
	Err       error
}

// Error implements error.
func (e *FieldError) Error() string {
	var b strings.Builder
	b.WriteString("outbox: ")
	eventType := short.Text(e.EventType, maxNameText)
	switch {
	case e.Index >= 0:
		fmt.Fprintf(&b, "event %d (%s): ", e.Index, eventType)
	case eventType != "":
		b.WriteString(eventType + ": ")
	}
	fmt.Fprintf(&b, "%s %s", short.Text(e.Field, maxNameText), short.Text(fmt.Sprint(e.Err), maxReasonText))
	return b.String()
}

// Unwrap returns Err.
func (e *FieldError) Unwrap() error { return e.Err }

// As has [errors.As] find it as the FieldError of the package outbox.
func (e *FieldError) As(target any) bool { return check.AsSame(e, target) }

// carriedKey is the key of what an event carries from the context under which it is recorded.
type carriedKey int

// Keys of [WithCarried].
const (
	CorrelationKey carriedKey = iota
	TraceKey
	TraceIDKey
)

// WithCarried returns a context with a value that events carry.
func WithCarried(ctx context.Context, key carriedKey, value string) context.Context {
	return context.WithValue(ctx, key, value)
}

// Carried returns what [WithCarried] put into the context, or "".
func Carried(ctx context.Context, key carriedKey) string {
	value, _ := ctx.Value(key).(string)
	return value
}
