package outbox

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
)

// Limits of the columns of outbox, in characters.
const (
	maxSource        = 100
	maxEventType     = 100
	maxAggregateType = 100
	maxAggregateID   = 255
	maxPartitionKey  = 255
	maxContentType   = 100
	maxCorrelationID = 255
)

// maxHeaders bounds the headers of an event as JSON, in bytes.
const maxHeaders = 8 << 10

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

// Extension attributes of CloudEvents among the stored headers. As headers of a
// record they have the prefix ce_; traceparent is also sent without it, because
// tracing libraries look for it there.
const (
	correlationAttr = "correlationid"
	traceAttr       = "traceparent"
)

type contextKey int

const (
	correlationKey contextKey = iota
	traceKey
)

// WithCorrelationID returns a context under which recorded events carry id, at
// most 255 characters, as the CloudEvents extension correlationid: in Kafka the
// header ce_correlationid.
func WithCorrelationID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, correlationKey, id)
}

// CorrelationID returns what [WithCorrelationID] put into the context, or "".
func CorrelationID(ctx context.Context) string {
	id, _ := ctx.Value(correlationKey).(string)
	return id
}

// WithTraceParent returns a context under which recorded events carry a W3C
// traceparent, unless RecorderConfig.TraceParent reads it from elsewhere. In
// Kafka it is the header ce_traceparent, and traceparent for tracing libraries.
func WithTraceParent(ctx context.Context, traceparent string) context.Context {
	return context.WithValue(ctx, traceKey, traceparent)
}

// TraceParent returns what [WithTraceParent] put into the context, or "".
func TraceParent(ctx context.Context) string {
	tp, _ := ctx.Value(traceKey).(string)
	return tp
}

// isTraceParent checks a value against the W3C Trace Context, which allows neither the
// version ff nor ids of zeros.
func isTraceParent(s string) bool {
	return traceParentForm.MatchString(s) && s[:2] != "ff" &&
		strings.Trim(s[3:35], "0") != "" && strings.Trim(s[36:52], "0") != ""
}

var traceParentForm = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// encodeHeaders returns the stored form of an event's headers: a JSON object of
// strings, or nil when there are none. printed is at least the size that jsonb prints: it
// puts a space behind each colon and each comma. A traceparent of another form is omitted,
// as the W3C demands.
func encodeHeaders(own map[string]string, correlationID, traceParent string) (encoded []byte, printed int, rejected *FieldError) {
	reject := func(field string, err error) ([]byte, int, *FieldError) {
		return nil, 0, &FieldError{Field: field, Err: err}
	}
	all := make(map[string]string, len(own)+2)
	for name, value := range own {
		if err := checkHeader(name, value); err != nil {
			return reject("headers", err)
		}
		all[name] = value
	}
	if correlationID != "" {
		if err := check.Attribute(correlationID, maxCorrelationID); err != nil {
			return reject("correlation_id", err)
		}
		all[correlationAttr] = correlationID
	}
	if isTraceParent(traceParent) {
		all[traceAttr] = traceParent
	}
	if len(all) == 0 {
		return nil, 0, nil
	}
	b, err := json.Marshal(all)
	if err != nil {
		return reject("headers", fmt.Errorf("%w: %w", ErrEncode, err))
	}
	if len(b) > maxHeaders {
		return reject("headers", fmt.Errorf("%w: %d bytes as JSON, at most %d", ErrTooLarge, len(b), maxHeaders))
	}
	return b, len(b) + 2*len(all) - 1, nil
}

// checkHeader rejects texts that cannot be stored, and the names that CloudEvents and
// the recorder use.
func checkHeader(name, value string) error {
	switch lower := strings.ToLower(name); {
	case name == "":
		return fmt.Errorf("with a name that %w", ErrEmpty)
	case strings.HasPrefix(lower, "ce_"), lower == "content-type", lower == correlationAttr, lower == traceAttr, deadletter.IsOwn(name):
		return fmt.Errorf("%.100q %w: the name is reserved", name, ErrMalformed)
	}
	for _, text := range []string{name, value} {
		if text == "" {
			continue
		}
		if err := check.Text(text, math.MaxInt); err != nil { // encodeHeaders limits the size of all headers
			return fmt.Errorf("%.100q %w", name, err)
		}
	}
	return nil
}

// envelope is an event as it is stored. It owns its slices.
type envelope struct {
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
	occurredAt    []byte    // RFC 3339, see appendTime
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
func (e *envelope) destination() (string, error) {
	if e.topic != nil {
		return string(e.topic), nil
	}
	name := string(e.eventType)
	if !check.HasTopic(name) {
		return "", &FieldError{EventType: name, Index: -1, Field: "event_type", Err: ErrMalformed}
	}
	return check.TopicOf(name), nil
}

// key returns the partition key.
func (e *envelope) key() []byte {
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

// record returns the value of the event's Kafka record and passes its headers to add,
// in the form of the CloudEvents 1.0 Kafka protocol binding.
func (e *envelope) record(mode Mode, add func(name string, value []byte)) ([]byte, error) {
	if e.unreadable != nil {
		return nil, e.unreadable
	}
	own, err := e.ownHeaders()
	if err != nil {
		return nil, err
	}
	if mode == Structured {
		add("content-type", structuredType)
		addOwn(own, false, add)
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
	return e.payload, nil
}

// addOwn adds an event's own headers in the order of their names. With attributes, it
// also adds those that are attributes of CloudEvents as such.
func addOwn(own map[string]string, attributes bool, add func(name string, value []byte)) {
	if len(own) == 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		value := []byte(own[name])
		if attributes && isAttribute(name) {
			add("ce_"+name, value)
		}
		if name != correlationAttr {
			add(name, value)
		}
	}
}

// ownHeaders decodes the stored headers.
func (e *envelope) ownHeaders() (map[string]string, error) {
	if e.headers == nil {
		return nil, nil
	}
	var own map[string]string
	if err := json.Unmarshal(e.headers, &own); err != nil {
		return nil, &FieldError{EventType: string(e.eventType), Index: -1, Field: "headers", Err: fmt.Errorf("%w: %w", ErrMalformed, err)}
	}
	return own, nil
}

// traceParent returns the traceparent among the stored headers, or "". It is called for
// every event of a batch, and decoding a JSON object takes microseconds. So it first
// looks for the quoted name in the text, where the quotes of the same name in a value
// would be escaped, and cuts out the value if it is printed as jsonb prints it.
func (e *envelope) traceParent() string {
	const name, length = `"` + traceAttr + `"`, 55
	at := bytes.Index(e.headers, []byte(name))
	if at < 0 {
		return ""
	}
	value, ok := bytes.CutPrefix(e.headers[at+len(name):], []byte(`: "`))
	if ok && len(value) > length && value[length] == '"' && bytes.IndexByte(value[:length], '\\') < 0 && bytes.IndexByte(value[:length], '"') < 0 {
		return string(value[:length])
	}
	own, _ := e.ownHeaders() // an event with bad headers was rejected before
	return own[traceAttr]
}

// context adds the event's correlation id to ctx, for log lines about the event.
func (e *envelope) context(ctx context.Context) context.Context {
	own, _ := e.ownHeaders() // without one if the headers are bad
	if id := own[correlationAttr]; id != "" {
		ctx = WithCorrelationID(ctx, id)
	}
	return ctx
}

// structured returns the event in the CloudEvents JSON format.
func (e *envelope) structured(own map[string]string) []byte {
	b := make([]byte, 0, 512+len(e.payload)*4/3)
	b = append(b, `{"specversion":"1.0"`...)
	b = appendAttribute(b, "id", e.eventID)
	b = appendAttribute(b, "source", e.source)
	b = appendAttribute(b, "type", e.eventType)
	b = appendAttribute(b, "subject", e.aggregateID)
	b = appendAttribute(b, "time", e.occurredAt)
	b = appendAttribute(b, "aggregatetype", e.aggregateType)
	for _, name := range []string{correlationAttr, traceAttr} {
		if value, ok := own[name]; ok {
			b = appendAttribute(b, name, []byte(value))
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

func isAttribute(name string) bool { return name == correlationAttr || name == traceAttr }

// appendTime appends a time in RFC 3339, UTC, to the microsecond.
func appendTime(b []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(b, "2006-01-02T15:04:05.999999Z07:00")
}
