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
	"github.com/outboxgo/outbox/internal/eventheader"
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
	maxTraceID       = 255
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

type contextKey int

const (
	correlationKey contextKey = iota
	traceKey
	traceIDKey
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

// WithTraceID returns a context under which recorded events carry id, at most 255
// characters, as the CloudEvents extension traceid: in Kafka the header ce_traceid. It is
// for ids in a form of one's own, such as X-Trace-Id of a request; those of the W3C are
// part of [WithTraceParent].
func WithTraceID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, traceIDKey, id)
}

// TraceID returns what [WithTraceID] put into the context, or "".
func TraceID(ctx context.Context) string {
	id, _ := ctx.Value(traceIDKey).(string)
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

// extras are what an event carries beside its payload and its columns.
type extras struct {
	correlationID, traceID, traceParent string // of the context
	headers                             map[string]string
	attributes                          map[string]string
	own                                 *EventOptions // whose headers and attributes go before these
}

// encode returns the stored form of extras: a JSON object of strings, or nil when there
// are none. printed is at least the size that jsonb prints: it puts a space behind each
// colon and each comma. A traceparent of another form is omitted, as the W3C demands, and
// so is an attribute without a value.
func (x *extras) encode() (encoded []byte, printed int, rejected *FieldError) {
	reject := func(field string, err error) ([]byte, int, *FieldError) {
		return nil, 0, &FieldError{Field: field, Err: err}
	}
	if x.isEmpty() {
		return nil, 0, nil
	}
	all := make(map[string]string, len(x.headers)+len(x.attributes)+len(x.own.Headers)+len(x.own.Attributes)+3)
	if err := addHeaders(all, x.headers, x.own.Headers); err != nil {
		return reject("headers", err)
	}
	if err := addAttributes(all, x.attributes, x.own.Attributes); err != nil {
		return reject("attributes", err)
	}
	for _, id := range []struct {
		field, attribute, value string
		most                    int
	}{{"correlation_id", eventheader.Correlation, x.correlationID, maxCorrelationID}, {"trace_id", eventheader.TraceID, x.traceID, maxTraceID}} {
		if id.value == "" {
			continue
		}
		if err := check.Attribute(id.value, id.most); err != nil {
			return reject(id.field, err)
		}
		all[eventheader.Stored(id.attribute)] = id.value
	}
	if isTraceParent(x.traceParent) {
		all[eventheader.TraceParent] = x.traceParent
	}
	if len(all) == 0 {
		return nil, 0, nil
	}
	b, err := json.Marshal(all)
	if err != nil {
		return reject("headers", fmt.Errorf("%w: %w", ErrEncode, err))
	}
	if len(b) > maxHeaders {
		return reject("headers", fmt.Errorf("%w: %d bytes as JSON with all attributes, at most %d", ErrTooLarge, len(b), maxHeaders))
	}
	return b, len(b) + 2*len(all) - 1, nil
}

// isEmpty reports whether there is nothing to encode. Most events have nothing.
func (x *extras) isEmpty() bool {
	return x.correlationID == "" && x.traceID == "" && x.traceParent == "" &&
		len(x.headers) == 0 && len(x.attributes) == 0 && len(x.own.Headers) == 0 && len(x.own.Attributes) == 0
}

// addHeaders adds headers; of a name the last counts.
func addHeaders(all map[string]string, sets ...map[string]string) error {
	for _, set := range sets {
		for name, value := range set {
			if err := eventheader.Check(name, value); err != nil {
				return err
			}
			all[name] = value
		}
	}
	return nil
}

// addAttributes adds attributes; of a name the last counts, and takes it out if it is empty.
func addAttributes(all map[string]string, sets ...map[string]string) error {
	for _, set := range sets {
		for name, value := range set {
			if err := eventheader.CheckAttribute(name); err != nil {
				return err
			}
			if value == "" {
				delete(all, eventheader.Stored(name))
				continue
			}
			if err := check.Attribute(value, math.MaxInt); err != nil { // encode limits the size of all
				return fmt.Errorf("%.100q %w", name, err)
			}
			all[eventheader.Stored(name)] = value
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

// recordForm is how events become records.
type recordForm struct {
	mode    Mode
	further eventheader.Further
}

// record returns the value of the event's Kafka record and passes its headers to add,
// in the form of the CloudEvents 1.0 Kafka protocol binding.
func (e *envelope) record(form recordForm, add func(name string, value []byte)) ([]byte, error) {
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
	if form.mode == Structured {
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
func (e *envelope) check() error {
	var field string
	err := ErrEmpty
	switch {
	case len(e.eventType) == 0:
		field = "event_type"
	case len(e.source) == 0:
		field = "source"
	case len(e.aggregateID) == 0:
		field = "aggregate_id"
	case e.occurredAt == nil:
		field, err = "occurred_at", fmt.Errorf("%w: not in the years 1 to 9999", ErrTime)
	default:
		return nil
	}
	return &FieldError{EventType: string(e.eventType), Index: -1, Field: field, Err: err}
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
func (e *envelope) ownHeaders() (map[string]string, error) {
	if e.headers == nil {
		return nil, nil
	}
	bad := func(err error) error {
		return &FieldError{EventType: string(e.eventType), Index: -1, Field: "headers", Err: err}
	}
	var own map[string]string
	if err := json.Unmarshal(e.headers, &own); err != nil {
		return nil, bad(fmt.Errorf("%w: %w", ErrMalformed, err))
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
func (e *envelope) traceParent() string {
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
func (e *envelope) context(ctx context.Context) context.Context {
	own, _ := e.ownHeaders() // without one if the headers are bad
	if id := own[eventheader.Correlation]; id != "" {
		ctx = WithCorrelationID(ctx, id)
	}
	if id := own[eventheader.Stored(eventheader.TraceID)]; id != "" {
		ctx = WithTraceID(ctx, id)
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
