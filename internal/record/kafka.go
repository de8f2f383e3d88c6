package record

import (
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/envelope"
)

// KafkaRecord returns the Kafka record that a relay sends for an event: in JSON, or with headers. It has no
// partition, offset and timestamp. Its error is an [envelope.FieldError].
func KafkaRecord(e *envelope.Event, inJSON bool) (*kgo.Record, error) {
	topic, err := e.Destination()
	if err != nil {
		return nil, err
	}
	var headers []kgo.RecordHeader
	value, err := e.Record(envelope.RecordForm{InJSON: inJSON}, func(name string, value []byte) {
		headers = append(headers, kgo.RecordHeader{Key: name, Value: value})
	})
	if err != nil {
		return nil, err
	}
	return &kgo.Record{Topic: topic, Key: e.Key(), Value: value, Headers: headers}, nil
}
