package outboxotel

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// consumer has the hooks of a consumer.
type consumer struct {
	*Telemetry
	group   attribute.KeyValue
	series  cache[handlerKey, metric.MeasurementOption] // of handlers
	results cache[handlerKey, metric.MeasurementOption] // of results
}

// handlerKey identifies the series of a measurement.
type handlerKey struct{ topic, eventType, action, outcome string }

// Consumer returns cfg with metrics and traces.
func (t *Telemetry) Consumer(cfg outbox.ConsumerConfig) outbox.ConsumerConfig {
	c := &consumer{Telemetry: t, group: semconv.MessagingConsumerGroupName(cfg.Group)}
	theirs := cfg.Hooks
	skips := cfg.Unknown == outbox.SkipUnknown
	cfg.Middleware = slices.Concat([]outbox.Middleware{c.handle}, cfg.Middleware) // theirs is within the span
	cfg.Hooks = outbox.ConsumerHooks{
		Handled: func(m outbox.Metadata, action string, took time.Duration) {
			c.count(recordOf(m).Topic, m.Type, action, "handled")
			if theirs.Handled != nil {
				theirs.Handled(m, action, took)
			}
		},
		Repeated: func(m outbox.Metadata, action string) {
			c.count(recordOf(m).Topic, m.Type, action, "repeated")
			if theirs.Repeated != nil {
				theirs.Repeated(m, action)
			}
		},
		Conflicted: func(m outbox.Metadata, action string, err error) {
			c.conflicts.Add(context.Background(), 1, c.failureOf(m, action, err))
			if theirs.Conflicted != nil {
				theirs.Conflicted(m, action, err)
			}
		},
		Failed: func(m outbox.Metadata, action string, err error) {
			c.failed.Add(context.Background(), 1, c.failureOf(m, action, err))
			if theirs.Failed != nil {
				theirs.Failed(m, action, err)
			}
		},
		DeadLettered: func(m outbox.Metadata, action, topic string, err error) {
			known := m.Type
			if action == "" { // the record was not decoded or has no handler: its type can be any text
				known = ""
			}
			c.count(recordOf(m).Topic, known, action, "dead_lettered")
			if theirs.DeadLettered != nil {
				theirs.DeadLettered(m, action, topic, err)
			}
		},
		Unknown: func(m outbox.Metadata) {
			if skips {
				c.count(recordOf(m).Topic, "", "", "unknown")
			}
			if theirs.Unknown != nil {
				theirs.Unknown(m)
			}
		},
		Lost: func(topic string, partition int32, records int64) {
			c.lost.Add(context.Background(), records, c.set(c.group, semconv.MessagingDestinationName(topic),
				semconv.MessagingDestinationPartitionID(partitionID(partition))))
			if theirs.Lost != nil {
				theirs.Lost(topic, partition, records)
			}
		},
	}
	return cfg
}

// failureOf returns the attributes of a try that failed.
func (c *consumer) failureOf(m outbox.Metadata, action string, err error) metric.MeasurementOption {
	return c.set(c.group, semconv.MessagingDestinationName(recordOf(m).Topic), semconv.CloudEventsEventType(m.Type),
		actionKey.String(action), semconv.ErrorTypeKey.String(c.cfg.ErrorType(err)))
}

// recordOf returns the Kafka record of an event, or the zero value if there is none.
func recordOf(m outbox.Metadata) outbox.KafkaMetadata {
	if m.Kafka == nil {
		return outbox.KafkaMetadata{}
	}
	return *m.Kafka
}

// count counts an event and action with their final result.
func (c *consumer) count(topic, eventType, action, result string) {
	c.processed.Add(context.Background(), 1, c.results.get(handlerKey{topic, eventType, action, result}, func() metric.MeasurementOption {
		return c.set(append(c.about(topic, eventType, action), resultKey.String(result))...)
	}))
}

func (c *consumer) about(topic, eventType, action string) []attribute.KeyValue {
	attrs := []attribute.KeyValue{c.group, semconv.MessagingDestinationName(topic)}
	if eventType != "" {
		attrs = append(attrs, semconv.CloudEventsEventType(eventType))
	}
	if action != "" {
		attrs = append(attrs, actionKey.String(action))
	}
	return attrs
}

// errEnded is the error of a call in which something has ended the goroutine.
var errEnded = errors.New("call has ended its goroutine")

// handle measures and traces calls of handlers.
func (c *consumer) handle(ctx context.Context, call outbox.HandlerCall, next func(context.Context) error) error {
	ctx, span := c.process(ctx, call)
	began, err := time.Now(), errEnded
	defer func() {
		about := c.handler(call.Events[0].Metadata, call.Action, err) // those of a batch are from one partition
		c.handlerTook.Record(ctx, time.Since(began).Seconds(), about)
		c.consumed.Add(ctx, int64(len(call.Events)), about)
		c.end(span, err)
	}()
	err = next(ctx)
	return err
}

// handler returns the attributes of a call of a handler.
func (c *consumer) handler(m outbox.Metadata, action string, err error) metric.MeasurementOption {
	key := handlerKey{topic: recordOf(m).Topic, eventType: m.Type, action: action}
	if err != nil {
		key.outcome = c.cfg.ErrorType(err)
	}
	return c.series.get(key, func() metric.MeasurementOption {
		attrs := append(operation(processOperation), c.about(key.topic, key.eventType, key.action)...)
		if key.outcome != "" {
			attrs = append(attrs, semconv.ErrorTypeKey.String(key.outcome))
		}
		return c.set(attrs...)
	})
}

const traceParentExtension = traceParentHeader // the extension of CloudEvents

// process starts the span of a call of a handler. For one event it is a child of the span
// under which the event was recorded. For several events it starts a new trace with links
// to their spans.
func (c *consumer) process(ctx context.Context, call outbox.HandlerCall) (context.Context, trace.Span) {
	if !c.traced {
		return ctx, noop.Span{}
	}
	first := call.Events[0].Metadata
	record := recordOf(first)
	attrs := append(operation(processOperation), semconv.MessagingOperationTypeProcess)
	attrs = append(attrs, c.about(record.Topic, first.Type, call.Action)...)
	attrs = append(attrs, semconv.MessagingDestinationPartitionID(partitionID(record.Partition)))
	opts := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer)}
	if len(call.Events) == 1 {
		ctx = within(ctx, first.Extensions[traceParentExtension])
		attrs = append(attrs, semconv.MessagingMessageID(first.ID), semconv.MessagingKafkaOffset(int(record.Offset)),
			semconv.MessagingKafkaMessageKey(string(record.Key)))
	} else {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(len(call.Events)))
		opts = append(opts, trace.WithLinks(linksTo(call.Events)...))
	}
	opts = append(opts, trace.WithAttributes(c.attributes(attrs...)...))
	return c.tracer.Start(ctx, processOperation+" "+record.Topic, opts...)
}

// linksTo returns a link to each span under which some of the events were recorded.
func linksTo(events []outbox.Received[outbox.DomainEvent]) (links []trace.Link) {
	seen := map[string]bool{}
	for _, e := range events {
		traceParent := e.Metadata.Extensions[traceParentExtension]
		if seen[traceParent] {
			continue
		}
		seen[traceParent] = true
		if of := spanContext(traceParent); of.IsValid() {
			links = append(links, trace.Link{SpanContext: of})
		}
	}
	return links
}
