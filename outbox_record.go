package outbox

import (
	"context"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/twmb/franz-go/pkg/kgo"
)

// KafkaRecord returns the record in which a [Relay] would send an event, under a
// new event id, and stores nothing: it is for tests of consumers. It takes from ctx
// what [Recorder.Record] takes, and refuses what that refuses.
//
// The record is in [Binary] mode and has no partition, offset or timestamp. A JSON
// payload is as the codec wrote it; PostgreSQL's jsonb, through which a relay's has
// gone, rewrites the order of keys, spaces and numbers.
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
	value, err := e.record(Binary, func(name string, value []byte) {
		headers = append(headers, kgo.RecordHeader{Key: name, Value: value})
	})
	if err != nil {
		return nil, err
	}
	return &kgo.Record{Topic: topic, Key: e.key(), Value: value, Headers: headers}, nil
}

// envelope returns an event as a relay reads it, but for what the columns make of
// its JSON.
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

// textBytes returns nil for NULL.
func textBytes(t pgtype.Text) []byte {
	if !t.Valid {
		return nil
	}
	return []byte(t.String)
}
