package record

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
)

// maxHeaders bounds the headers of an event as JSON, in bytes.
const maxHeaders = 8 << 10

// isTraceParent checks a value against the W3C Trace Context, which allows neither the
// version ff nor ids of zeros.
func isTraceParent(s string) bool {
	return traceParentForm.MatchString(s) && s[:2] != "ff" &&
		strings.Trim(s[3:35], "0") != "" && strings.Trim(s[36:52], "0") != ""
}

var traceParentForm = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// Extras are the headers and extension attributes of an event.
type Extras struct {
	CorrelationID, TraceID, TraceParent string            // of the context
	Headers                             map[string]string // of the recorder
	Attributes                          map[string]string // of the type
	OwnHeaders, OwnAttributes           map[string]string // of this event; they replace the others
}

// encode returns the stored form: a JSON object of strings, or nil if there are no values. A malformed
// traceparent is omitted, as the W3C demands, and so is an attribute without a value.
func (x *Extras) encode(dataSchema string) (encoded []byte, rejected *envelope.FieldError) {
	reject := func(field string, err error) ([]byte, *envelope.FieldError) {
		return nil, &envelope.FieldError{Field: field, Err: err}
	}
	if dataSchema == "" && x.isEmpty() {
		return nil, nil
	}
	all := make(map[string]string, len(x.Headers)+len(x.Attributes)+len(x.OwnHeaders)+len(x.OwnAttributes)+3)
	if err := addHeaders(all, x.Headers, x.OwnHeaders); err != nil {
		return reject("headers", err)
	}
	if err := addAttributes(all, x.Attributes, x.OwnAttributes); err != nil {
		return reject("attributes", err)
	}
	for _, id := range []struct {
		field, attribute, value string
		most                    int
	}{{"correlation_id", eventheader.Correlation, x.CorrelationID, envelope.MaxCorrelationID}, {"trace_id", eventheader.TraceID, x.TraceID, envelope.MaxTraceID}, {"attributes", eventheader.DataSchema, dataSchema, math.MaxInt}} {
		if id.value == "" {
			continue
		}
		if err := check.Attribute(id.value, id.most); err != nil {
			return reject(id.field, err)
		}
		all[eventheader.Stored(id.attribute)] = id.value
	}
	if isTraceParent(x.TraceParent) {
		all[eventheader.TraceParent] = x.TraceParent
	}
	if len(all) == 0 {
		return nil, nil
	}
	b, err := json.Marshal(all)
	if err != nil {
		return reject("headers", fmt.Errorf("%w: %w", ErrEncode, err))
	}
	if len(b) > maxHeaders {
		return reject("headers", fmt.Errorf("%w: %d bytes as JSON with all attributes, at most %d", ErrTooLarge, len(b), maxHeaders))
	}
	return b, nil
}

// isEmpty reports whether there is nothing to encode. Most events have nothing.
func (x *Extras) isEmpty() bool {
	return x.CorrelationID == "" && x.TraceID == "" && x.TraceParent == "" &&
		len(x.Headers) == 0 && len(x.Attributes) == 0 && len(x.OwnHeaders) == 0 && len(x.OwnAttributes) == 0
}

// addHeaders adds headers. If a name occurs twice, the last value counts.
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

// addAttributes adds attributes. If a name occurs twice, the last value counts. An empty last value removes
// the attribute.
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
