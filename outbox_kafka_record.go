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
	return rows.stored(0).kafkaRecord(Binary)
}

// KafkaRecord returns the Kafka record that a [Relay] with this mode sent for the event, or
// would send: the same topic, key, value and headers, byte by byte, without partition, offset
// and timestamp, and without the headers of RelayConfig.IDHeader and TraceHeader. Its error is a [*FieldError] that names the column of which no record can be made.
func (e ArchivedEvent) KafkaRecord(mode Mode) (*kgo.Record, error) {
	return (&stored{
		id:            e.OutboxID,
		eventID:       []byte(e.EventID),
		eventType:     []byte(e.Type),
		source:        []byte(e.Source),
		aggregateType: []byte(e.AggregateType),
		aggregateID:   []byte(e.AggregateID),
		payload:       e.Payload,
		isJSON:        e.JSON,
		contentType:   []byte(e.ContentType),
		topic:         bytesOrNil(e.Topic),
		partitionKey:  bytesOrNil(e.PartitionKey),
		headers:       e.Headers,
		occurredAt:    appendTime(nil, e.OccurredAt),
	}).kafkaRecord(mode)
}

// bytesOrNil returns the bytes of a text, nil for an empty one.
func bytesOrNil(text string) []byte {
	if text == "" {
		return nil
	}
	return []byte(text)
}

// kafkaRecord returns the record of an event.
func (e *stored) kafkaRecord(mode Mode) (*kgo.Record, error) {
	topic, err := e.destination()
	if err != nil {
		return nil, err
	}
	var headers []kgo.RecordHeader
	value, err := e.record(recordForm{inJSON: mode == Structured}, func(name string, value []byte) {
		headers = append(headers, kgo.RecordHeader{Key: name, Value: value})
	})
	if err != nil {
		return nil, err
	}
	return &kgo.Record{Topic: topic, Key: e.key(), Value: value, Headers: headers}, nil
}

// envelope returns an event as a relay reads it, except that its JSON is not as jsonb
// prints it.
func (c *columns) stored(i int) *stored {
	e := &stored{
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
