package delivery

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
)

// Record is the JSON of event_delivery.record: parts of a record that have no column.
type Record struct {
	Key     []byte         `json:"key"` // null for none
	Headers []RecordHeader `json:"headers,omitempty"`
	Time    int64          `json:"time"` // in Unix milliseconds
	Epoch   int32          `json:"epoch"`
	TopicID []byte         `json:"topic_id,omitempty"`
	NoValue bool           `json:"no_value,omitempty"` // it is a tombstone
	// Missing says which parts were too long for a consumer to be read, nil for none.
	Missing json.RawMessage `json:"missing,omitempty"`
}

// errIncomplete is the error of a record of which parts are missing. Only a consumer can send its dead letter.
var errIncomplete = errors.New("parts of the record were too long to be read")

// RecordHeader is a header of a [Record].
type RecordHeader struct {
	Name  []byte `json:"name"` // any bytes: producers choose names
	Value []byte `json:"value"`
}

// RecordOf returns the record that was parked as a delivery.
func RecordOf(d *Delivery) (r Record, err error) {
	if err := json.Unmarshal(d.Record, &r); err != nil {
		return r, fmt.Errorf("event_delivery.record of delivery %d: %w", d.ID, err)
	}
	return r, nil
}

// headers yields the names and values of the record's headers.
func (r *Record) headers() iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		for _, h := range r.Headers {
			if !yield(string(h.Name), h.Value) {
				return
			}
		}
	}
}

// readRecord returns the event of a record in a form of CloudEvents, and the action that it is for. A worker reads a
// delivery so that a consumer of its group has parked: a relay has sent the event.
func readRecord(d *Delivery, about *envelope.Received) (m *envelope.Message, action string, err error) {
	r, err := RecordOf(d)
	if err == nil && r.Missing != nil {
		err = errIncomplete
	}
	if err != nil {
		return nil, "", err
	}
	about.Headers = envelope.PlainHeaders(r.headers())
	about.Origin.Key, about.Origin.Record.Key = r.Key, r.Key
	about.Origin.TopicID = kafka.TopicID{}
	copy(about.Origin.TopicID[:], r.TopicID)
	if action = d.Action; action == "" {
		for name, value := range r.headers() {
			if name == deadletter.ReplayAction {
				action = string(value)
			}
		}
	}
	value := d.Payload
	if r.NoValue {
		value = nil
	}
	m, err = envelope.DecodeRecord(value, r.headers())
	about.Tombstone = r.NoValue && m.IsTombstone()
	return m, action, err
}
