package outboxtest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Deliver passes an event to the handlers of a consumer as if a relay had sent it, without Kafka,
// and returns the error of [outbox.Consumer.Deliver]: that of a handler, for the test to check.
// Each call is an event of its own; [DeliverTwice] is for repeats.
//
// A correlation id and a traceparent in ctx travel with the event. The test fails if the event
// cannot be sent, or if no handler would get it in production: the consumer does not read its topic, or skips its type.
func Deliver(ctx context.Context, t T, consumer *outbox.Consumer, events *outbox.Registry, event outbox.DomainEvent) error {
	t.Helper()
	return deliver(ctx, t, consumer, events, event, 1)
}

// DeliverTwice is [Deliver] of one event that arrives twice, as any may: what the
// handlers do must be done once. An error of the first time is returned at once.
func DeliverTwice(ctx context.Context, t T, consumer *outbox.Consumer, events *outbox.Registry, event outbox.DomainEvent) error {
	t.Helper()
	return deliver(ctx, t, consumer, events, event, 2)
}

func deliver(ctx context.Context, t T, consumer *outbox.Consumer, events *outbox.Registry, event outbox.DomainEvent, times int64) error {
	t.Helper()
	record, err := newRecord(ctx, events, event)
	if err == nil {
		err = checkArrives(consumer, event, record)
	}
	if err != nil {
		t.Fatalf("outboxtest: %v", err)
		return err
	}
	for offset := range times {
		record.Offset = offset
		if err := consumer.Deliver(ctx, record); err != nil {
			return err
		}
	}
	return nil
}

// checkArrives returns an error if a handler of the consumer does not get an event.
func checkArrives(consumer *outbox.Consumer, event outbox.DomainEvent, record *kgo.Record) error {
	if !slices.Contains(consumer.Topics(), record.Topic) {
		return fmt.Errorf("%T goes to topic %s, and the consumer reads %v", event, record.Topic, consumer.Topics())
	}
	m, err := outbox.DecodeCloudEvent(record)
	if err == nil && len(consumer.Actions(m.Type)) == 0 {
		err = fmt.Errorf("%T has the type %s, which the consumer skips: it has no handler for it", event, m.Type)
	}
	return err
}

// NewRecord returns the record in which a consumer would get an event, for tests
// that change it before they give it to [outbox.Consumer.Deliver]. It is that of
// [outbox.Recorder.KafkaRecord] with a zero configuration.
func NewRecord(ctx context.Context, t T, events *outbox.Registry, event outbox.DomainEvent) *kgo.Record {
	t.Helper()
	record, err := newRecord(ctx, events, event)
	if err != nil {
		t.Fatalf("outboxtest: %v", err)
		return nil
	}
	return record
}

func newRecord(ctx context.Context, events *outbox.Registry, event outbox.DomainEvent) (*kgo.Record, error) {
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		return nil, err
	}
	record, err := rec.KafkaRecord(ctx, event)
	if err != nil {
		return nil, err
	}
	record.Timestamp = time.Now().Truncate(time.Millisecond)
	return record, nil
}
