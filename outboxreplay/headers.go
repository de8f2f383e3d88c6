package outboxreplay

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
)

// checkHeader refuses what a relay would refuse.
func checkHeader(field, name string) error {
	lower := strings.ToLower(name)
	switch {
	case name == "":
		return nil
	case strings.HasPrefix(lower, "ce_"), lower == "content-type", lower == "correlationid", lower == "traceparent", deadletter.IsOwn(name):
		return fmt.Errorf("field %s is %.100q: %w: the name is reserved", field, name, outbox.ErrMalformed)
	}
	if err := check.Text(name, maxHeader); err != nil {
		return fmt.Errorf("field %s %w", field, err)
	}
	return nil
}

const maxHeader = 255

// addFurther adds the headers that a relay with these fields adds behind the others, unless the event has headers of these
// names.
func (c Config) addFurther(e *outbox.ArchivedEvent, r *kgo.Record) {
	if c.IDHeader == "" && c.TraceHeader == "" {
		return
	}
	var own map[string]string
	if e.Headers != nil {
		_ = json.Unmarshal(e.Headers, &own) // the record was made of them
	}
	has := func(name string) bool {
		for other := range own {
			if strings.EqualFold(other, name) {
				return true
			}
		}
		return false
	}
	if c.IDHeader != "" && !has(c.IDHeader) {
		r.Headers = append(r.Headers, header(c.IDHeader, e.EventID))
	}
	if id := own["ce_traceid"]; c.TraceHeader != "" && id != "" && !has(c.TraceHeader) {
		r.Headers = append(r.Headers, header(c.TraceHeader, id))
	}
}
