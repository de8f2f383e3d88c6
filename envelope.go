package outbox

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"

	"github.com/outboxgo/outbox/internal/envelope"

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

// WithCorrelationID returns a context under which recorded events carry id, at
// most 255 characters, as the CloudEvents extension correlationid: in Kafka the
// header ce_correlationid.
func WithCorrelationID(ctx context.Context, id string) context.Context {
	return envelope.WithCarried(ctx, envelope.CorrelationKey, id)
}

// CorrelationID returns what [WithCorrelationID] put into the context, or "".
func CorrelationID(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.CorrelationKey)
}

// WithTraceID returns a context under which recorded events carry id, at most 255
// characters, as the CloudEvents extension traceid: in Kafka the header ce_traceid. It is
// for ids in a form of one's own, such as X-Trace-Id of a request; those of the W3C are
// part of [WithTraceParent].
func WithTraceID(ctx context.Context, id string) context.Context {
	return envelope.WithCarried(ctx, envelope.TraceIDKey, id)
}

// TraceID returns what [WithTraceID] put into the context, or "".
func TraceID(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.TraceIDKey)
}

// WithTraceParent returns a context under which recorded events carry a W3C
// traceparent, unless RecorderConfig.TraceParent reads it from elsewhere. In
// Kafka it is the header ce_traceparent, and traceparent for tracing libraries.
func WithTraceParent(ctx context.Context, traceparent string) context.Context {
	return envelope.WithCarried(ctx, envelope.TraceKey, traceparent)
}

// TraceParent returns what [WithTraceParent] put into the context, or "".
func TraceParent(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.TraceKey)
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
