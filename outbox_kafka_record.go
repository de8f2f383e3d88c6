package outbox

import (
	"context"

	"github.com/outboxgo/outbox/internal/envelope"

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
	return kafkaRecord(rows.stored(0), Binary)
}

// KafkaRecord returns the Kafka record that a [Relay] with this mode sent for the event, or
// would send: the same topic, key, value and headers, byte by byte, without partition, offset
// and timestamp, and without the headers of RelayConfig.IDHeader and TraceHeader. Its error is a [*FieldError] that names the column of which no record can be made.
func (e ArchivedEvent) KafkaRecord(mode Mode) (*kgo.Record, error) {
	return kafkaRecord(&envelope.Event{
		Id:            e.OutboxID,
		EventID:       []byte(e.EventID),
		EventType:     []byte(e.Type),
		Source:        []byte(e.Source),
		AggregateType: []byte(e.AggregateType),
		AggregateID:   []byte(e.AggregateID),
		Payload:       e.Payload,
		IsJSON:        e.JSON,
		ContentType:   []byte(e.ContentType),
		Topic:         bytesOrNil(e.Topic),
		PartitionKey:  bytesOrNil(e.PartitionKey),
		Headers:       e.Headers,
		OccurredAt:    envelope.AppendTime(nil, e.OccurredAt),
	}, mode)
}

// bytesOrNil returns the bytes of a text, nil for an empty one.
func bytesOrNil(text string) []byte {
	if text == "" {
		return nil
	}
	return []byte(text)
}

// kafkaRecord returns the record of an event.
func kafkaRecord(e *envelope.Event, mode Mode) (*kgo.Record, error) {
	topic, err := e.Destination()
	if err != nil {
		return nil, public(err)
	}
	var headers []kgo.RecordHeader
	value, err := e.Record(envelope.RecordForm{InJSON: mode == Structured}, func(name string, value []byte) {
		headers = append(headers, kgo.RecordHeader{Key: name, Value: value})
	})
	if err != nil {
		return nil, public(err)
	}
	return &kgo.Record{Topic: topic, Key: e.Key(), Value: value, Headers: headers}, nil
}

// envelope returns an event as a relay reads it, except that its JSON is not as jsonb
// prints it.
func (c *columns) stored(i int) *envelope.Event {
	e := &envelope.Event{
		EventID:       []byte(c.eventID[i].String()),
		EventType:     []byte(c.eventType[i]),
		Source:        []byte(c.source),
		AggregateType: []byte(c.aggregateType[i]),
		AggregateID:   []byte(c.aggregateID[i]),
		Payload:       c.payloadBytes[i],
		IsJSON:        c.payload[i].Valid,
		ContentType:   []byte(c.contentType[i]),
		Topic:         textBytes(c.topic[i]),
		PartitionKey:  textBytes(c.partitionKey[i]),
		Headers:       textBytes(c.headers[i]),
		OccurredAt:    envelope.AppendTime(nil, c.occurredAt[i]),
	}
	if e.IsJSON {
		e.Payload = textBytes(c.payload[i])
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
