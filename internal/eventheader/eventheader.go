// Package eventheader has the rules for the headers that are stored with an event: which names are
// reserved, and which headers are attributes of CloudEvents.
package eventheader

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
)

// Extension attributes of CloudEvents among the stored headers. As headers of a
// record they have the prefix ce_; traceparent is also sent without it, because
// tracing libraries look for it there. correlationid and traceparent are stored under
// these names, all others with the prefix, as [Stored] says.
const (
	Correlation = "correlationid"
	TraceParent = "traceparent"
	TraceID     = "traceid"
	DataSchema  = "dataschema"
	ExpiryTime  = "expirytime"
	Prefix      = "ce_"
)

// Check rejects texts that cannot be stored, and the names that CloudEvents and
// the recorder use. It does not limit their length.
func Check(name, value string) error {
	switch lower := strings.ToLower(name); {
	case name == "":
		return fmt.Errorf("with a name that %w", check.ErrEmpty)
	case isReserved(name), lower == Correlation, lower == TraceParent, deadletter.IsOwn(name):
		return reservedError(name)
	}
	for _, text := range []string{name, value} {
		if text == "" {
			continue
		}
		if err := check.Text(text, math.MaxInt); err != nil {
			return fmt.Errorf("%.100q %w", name, err)
		}
	}
	return nil
}

// CheckStored accepts the names of the headers of a row. With others, which only a row of another writer has, the
// record would say something else than the row.
func CheckStored(name string) error {
	attribute, is := strings.CutPrefix(name, Prefix)
	switch {
	case is && (attribute == TraceID || attribute == DataSchema || attribute == ExpiryTime):
		return nil
	case is:
		if err := CheckAttribute(attribute); err != nil {
			return fmt.Errorf("%.100q: attribute %w", name, err)
		}
	case isReserved(name):
		return reservedError(name)
	}
	return nil
}

// isReserved reports whether readers of a record take a header for an attribute of CloudEvents.
func isReserved(name string) bool {
	lower := strings.ToLower(name)
	return strings.HasPrefix(lower, Prefix) || lower == "content-type"
}

func reservedError(name string) error {
	return fmt.Errorf("%.100q %w: the name is reserved", name, check.ErrMalformed)
}

// reserved are the attributes that CloudEvents defines, or that events have anyway, and what sets them.
var reserved = map[string]string{
	"specversion": "CloudEvents", "id": "EventOptions.ID or RecorderConfig.NewID", "source": "NewRegistry", "type": "Event", "subject": "the id of the aggregate",
	"time": "OccurredAt", "datacontenttype": "EventType.Codec", DataSchema: "Codec.DataSchema", ExpiryTime: "EventOptions.Expires", "data": "EventType.Codec",
	"aggregatetype": "Event", Correlation: "WithCorrelationID", TraceParent: "WithTraceParent", TraceID: "WithTraceID",
}

// CheckAttribute accepts the names of extra attributes.
func CheckAttribute(name string) error {
	if name == "" {
		return fmt.Errorf("with a name that %w", check.ErrEmpty)
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return fmt.Errorf("%.100q %w: want lower-case letters and digits only", name, check.ErrMalformed)
		}
	}
	if by := reserved[name]; by != "" {
		return fmt.Errorf("%.100q %w: the name is reserved, it is set by %s", name, check.ErrMalformed, by)
	}
	return nil
}

// Stored returns the name of an attribute among the stored headers.
func Stored(attribute string) string {
	if attribute == Correlation || attribute == TraceParent {
		return attribute
	}
	return Prefix + attribute
}

// Attribute returns the attribute that a stored header is, or "" if it is none.
func Attribute(name string) string {
	if name == Correlation || name == TraceParent {
		return name
	}
	attribute, is := strings.CutPrefix(name, Prefix)
	if !is {
		return ""
	}
	return attribute
}

// Further names the headers with the id of the event and with its trace id, for consumers that read
// records of other producers. An empty name means none.
type Further struct{ ID, Trace string }

// Check returns an error that names each bad field of a configuration: IDHeader and TraceHeader.
func (f Further) Check() error {
	var errs []error
	for _, h := range [][2]string{{"IDHeader", f.ID}, {"TraceHeader", f.Trace}} {
		if h[1] == "" {
			continue
		}
		if err := Check(h[1], ""); err != nil {
			errs = append(errs, fmt.Errorf("field %s is %w", h[0], err))
		}
	}
	if f.ID != "" && strings.EqualFold(f.ID, f.Trace) {
		errs = append(errs, fmt.Errorf("fields IDHeader and TraceHeader: both are %.100q", f.ID))
	}
	return errors.Join(errs...)
}

// Add adds the headers, unless the event has stored headers of these names.
func (f Further) Add(stored map[string]string, eventID []byte, add func(name string, value []byte)) {
	if f.ID != "" && !has(stored, f.ID) {
		add(f.ID, eventID)
	}
	if id := stored[Stored(TraceID)]; f.Trace != "" && id != "" && !has(stored, f.Trace) {
		add(f.Trace, []byte(id))
	}
}

func has(stored map[string]string, name string) bool {
	for other := range stored {
		if strings.EqualFold(other, name) {
			return true
		}
	}
	return false
}
