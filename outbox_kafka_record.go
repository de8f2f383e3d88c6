package outbox

import (
	"context"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/twmb/franz-go/pkg/kgo"
)

// KafkaRecord returns the Kafka record that a [Relay] would send for an event, with a
// new event id, and stores nothing: it is for tests of consumers. It reads the same
// values from ctx as [Recorder.Record] and rejects the same events.
//
// The record is in [Binary] mode and has no partition, offset or timestamp, nor the headers of
// RelayConfig.IDHeader and TraceHeader. A JSON
// payload is as the codec wrote it, whereas a relay sends it as jsonb prints it, with
// other spaces, order of keys and form of numbers.
func (r *Recorder) KafkaRecord(ctx context.Context, event DomainEvent) (*kgo.Record, error) {
	rows, err := r.rows(ctx, []DomainEvent{event})
	if err != nil {
		return nil, atIndex(-1, "", err)
	}
	e := rows.envelope(0)
	topic, err := e.destination()
	if err != nil {
		return nil, err
	}
	var headers []kgo.RecordHeader
	value, err := e.record(recordForm{}, func(name string, value []byte) {
		headers = append(headers, kgo.RecordHeader{Key: name, Value: value})
	})
	if err != nil {
		return nil, err
	}
	return &kgo.Record{Topic: topic, Key: e.key(), Value: value, Headers: headers}, nil
}

// envelope returns an event as a relay reads it, except that its JSON is not as jsonb
// prints it.
func (c *columns) envelope(i int) *envelope {
	e := &envelope{
		eventID:       []byte(c.eventID[i].String()),
		eventType:     []byte(c.eventType[i]),
		source:        []byte(c.source),
		aggregateType: []byte(c.aggregateType[i]),
		aggregateID:   []byte(c.aggregateID[i]),
		payload:       c.payloadBytes[i],
		isJSON:        c.payload[i].Valid,
		contentType:   []byte(c.contentType[i]),
		topic:         textBytes(c.topic[i]),
		partitionKey:  textBytes(c.partitionKey[i]),
		headers:       textBytes(c.headers[i]),
		occurredAt:    appendTime(nil, c.occurredAt[i]),
	}
	if e.isJSON {
		e.payload = textBytes(c.payload[i])
	}
	return e
}

// textBytes returns the bytes of a text, nil for NULL.
func textBytes(t pgtype.Text) []byte {
	if !t.Valid {
		return nil
	}
	return []byte(t.String)
}
