package outbox

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

// stored is an event as it is stored. It owns its slices.
type stored struct {
	id            int64 // outbox.id
	eventID       []byte
	eventType     []byte
	source        []byte
	aggregateType []byte
	aggregateID   []byte
	payload       []byte
	isJSON        bool // payload comes from the jsonb column
	contentType   []byte
	topic         []byte    // nil: derived from eventType
	partitionKey  []byte    // nil: aggregateID
	headers       []byte    // JSON object of strings, or nil
	occurredAt    []byte    // RFC 3339, see appendTime; nil: it cannot be written so
	createdAt     time.Time // start of its transaction; only for hooks
	unreadable    error     // why PostgreSQL cannot print the row; then payload and headers are missing
}

// unreadableError is the error of an event whose row PostgreSQL cannot print.
type unreadableError struct {
	id      int64 // outbox.id
	eventID string
	column  string
	err     error // of PostgreSQL
}

func (e *unreadableError) Error() string {
	return fmt.Sprintf("row %d of outbox, event %s: column %s cannot be read: %v", e.id, e.eventID, e.column, e.err)
}

func (e *unreadableError) Unwrap() error { return e.err }

// destination returns the topic. A row that was not written by a [Recorder] may have a
// type from which no topic can be derived.
func (e *stored) destination() (string, error) {
	if e.topic != nil {
		return string(e.topic), nil
	}
	name := string(e.eventType)
	if !check.HasTopic(name) {
		return "", &fieldError{EventType: name, Index: -1, Field: "event_type", Err: check.ErrMalformed}
	}
	return check.TopicOf(name), nil
}

// key returns the partition key.
func (e *stored) key() []byte {
	if e.partitionKey != nil {
		return e.partitionKey
	}
	return e.aggregateID
}

var (
	specVersion    = []byte("1.0")
	structuredType = []byte("application/cloudevents+json; charset=UTF-8")
)

// recordHeaders is the number of headers of a record, without the event's own ones.
const recordHeaders = 8

// recordForm is how events become records.
type recordForm struct {
	inJSON  bool // the CloudEvents JSON format, not the binary one
	further eventheader.Further
}

// record returns the value of the event's Kafka record and passes its headers to add,
// in the form of the CloudEvents 1.0 Kafka protocol binding.
func (e *stored) record(form recordForm, add func(name string, value []byte)) ([]byte, error) {
	if e.unreadable != nil {
		return nil, e.unreadable
	}
	if err := e.check(); err != nil {
		return nil, err
	}
	own, err := e.ownHeaders()
	if err != nil {
		return nil, err
	}
	if form.inJSON {
		add("content-type", structuredType)
		addOwn(own, false, add)
		form.further.Add(own, e.eventID, add)
		return e.structured(own), nil
	}
	add("ce_specversion", specVersion)
	add("ce_id", e.eventID)
	add("ce_source", e.source)
	add("ce_type", e.eventType)
	add("ce_subject", e.aggregateID)
	add("ce_time", e.occurredAt)
	add("ce_aggregatetype", e.aggregateType)
	add("content-type", e.contentType)
	addOwn(own, true, add)
	form.further.Add(own, e.eventID, add)
	return e.payload, nil
}

// check rejects what no CloudEvent has. A [Recorder] records no such event; other writers may.
func (e *stored) check() error {
	var field string
	err := check.ErrEmpty
	switch {
	case len(e.eventType) == 0:
		field = "event_type"
	case len(e.source) == 0:
		field = "source"
	case len(e.aggregateID) == 0:
		field = "aggregate_id"
	case e.occurredAt == nil:
		field, err = "occurred_at", fmt.Errorf("%w: not in the years 1 to 9999", check.ErrTime)
	default:
		return nil
	}
	return &fieldError{EventType: string(e.eventType), Index: -1, Field: field, Err: err}
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

// ownHeaders decodes the stored headers. A row that was not written by a [Recorder] may
// have an attribute among them that must not be there.
func (e *stored) ownHeaders() (map[string]string, error) {
	if e.headers == nil {
		return nil, nil
	}
	bad := func(err error) error {
		return &fieldError{EventType: string(e.eventType), Index: -1, Field: "headers", Err: err}
	}
	var own map[string]string
	if err := json.Unmarshal(e.headers, &own); err != nil {
		return nil, bad(fmt.Errorf("%w: %w", check.ErrMalformed, err))
	}
	for name := range own {
		attribute, is := strings.CutPrefix(name, eventheader.Prefix)
		if !is || attribute == eventheader.TraceID {
			continue
		}
		if err := eventheader.CheckAttribute(attribute); err != nil {
			return nil, bad(fmt.Errorf("%.100q: attribute %w", name, err))
		}
	}
	return own, nil
}

// traceParent returns the traceparent among the stored headers, or "". It is called for
// every event of a batch, and decoding a JSON object takes microseconds. So it first
// looks for the quoted name in the text, where the quotes of the same name in a value
// would be escaped, and cuts out the value if it is printed as jsonb prints it.
func (e *stored) traceParent() string {
	const name, length = `"` + eventheader.TraceParent + `"`, 55
	at := bytes.Index(e.headers, []byte(name))
	if at < 0 {
		return ""
	}
	value, ok := bytes.CutPrefix(e.headers[at+len(name):], []byte(`: "`))
	if ok && len(value) > length && value[length] == '"' && bytes.IndexByte(value[:length], '\\') < 0 && bytes.IndexByte(value[:length], '"') < 0 {
		return string(value[:length])
	}
	own, _ := e.ownHeaders() // an event with bad headers was rejected before
	return own[eventheader.TraceParent]
}

// context adds the event's correlation id and trace id to ctx, for log lines about the event.
func (e *stored) context(ctx context.Context) context.Context {
	own, _ := e.ownHeaders() // without one if the headers are bad
	if id := own[eventheader.Correlation]; id != "" {
		ctx = withCarried(ctx, correlationKey, id)
	}
	if id := own[eventheader.Stored(eventheader.TraceID)]; id != "" {
		ctx = withCarried(ctx, traceIDKey, id)
	}
	return ctx
}

// structured returns the event in the CloudEvents JSON format.
func (e *stored) structured(own map[string]string) []byte {
	b := make([]byte, 0, 512+len(e.payload)*4/3)
	b = append(b, `{"specversion":"1.0"`...)
	b = appendAttribute(b, "id", e.eventID)
	b = appendAttribute(b, "source", e.source)
	b = appendAttribute(b, "type", e.eventType)
	b = appendAttribute(b, "subject", e.aggregateID)
	b = appendAttribute(b, "time", e.occurredAt)
	b = appendAttribute(b, "aggregatetype", e.aggregateType)
	if len(own) > 0 {
		for _, name := range slices.Sorted(maps.Keys(own)) {
			if attribute := eventheader.Attribute(name); attribute != "" {
				b = appendAttribute(b, attribute, []byte(own[name]))
			}
		}
	}
	b = appendAttribute(b, "datacontenttype", e.contentType)
	if e.isJSON {
		b = append(append(b, `,"data":`...), e.payload...)
	} else {
		b = append(b, `,"data_base64":"`...)
		b = base64.StdEncoding.AppendEncode(b, e.payload)
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

// appendTime appends a time in RFC 3339, UTC, to the microsecond.
func appendTime(b []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(b, "2006-01-02T15:04:05.999999Z07:00")
}

// Limits of what an error repeats of its input, in bytes.
const (
	maxNameText   = 300
	maxReasonText = 1_000
)

// fieldError says which field of an event was rejected. The package outbox shows it as its own FieldError.
type fieldError struct {
	EventType string
	Index     int
	Field     string
	Err       error
}

// Error implements error.
func (e *fieldError) Error() string {
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
func (e *fieldError) Unwrap() error { return e.Err }

// carriedKey is the key of what an event carries from the context under which it is recorded.
type carriedKey int

const (
	correlationKey carriedKey = iota
	traceKey
	traceIDKey
)

// withCarried returns a context with a value that events carry.
func withCarried(ctx context.Context, key carriedKey, value string) context.Context {
	return context.WithValue(ctx, key, value)
}

// carried returns what [withCarried] put into the context, or "".
func carried(ctx context.Context, key carriedKey) string {
	value, _ := ctx.Value(key).(string)
	return value
}
