package outboxreplay

import (
	"encoding/json"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/eventheader"
)

func (c Config) further() eventheader.Further {
	return eventheader.Further{ID: c.IDHeader, Trace: c.TraceHeader}
}

const maxHeader = 255

// checkLength bounds the name of a header.
func checkLength(field, name string) error {
	if name == "" {
		return nil
	}
	if err := check.Text(name, maxHeader); err != nil {
		return fmt.Errorf("field %s %w", field, err)
	}
	return nil
}

// addFurther adds the extra headers that a relay with these fields adds after its own headers.
func (c Config) addFurther(e *outbox.ArchivedEvent, r *kgo.Record) {
	further := c.further()
	if further == (eventheader.Further{}) {
		return
	}
	var stored map[string]string
	if e.Headers != nil {
		_ = json.Unmarshal(e.Headers, &stored) // no error: the record was made from these headers
	}
	further.Add(stored, []byte(e.EventID), func(name string, value []byte) {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: value})
	})
}
