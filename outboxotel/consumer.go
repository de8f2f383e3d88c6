package outboxotel

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/outboxgo/outbox"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// handlers has the hooks of what runs handlers: a consumer or a worker.
type handlers struct {
	*Telemetry
	outcomes
	results
	names  names              // a worker's streams are texts of writers, and take no room from the topics of relays
	system attribute.KeyValue // what brings the events
	group  attribute.KeyValue
	skips  bool                                        // events of unknown types are skipped
	series cache[handlerKey, metric.MeasurementOption] // of handlers
	counts cache[handlerKey, metric.MeasurementOption] // of results

	breakers cache[string, *atomic.Int64] // of actions: each an outbox.BreakerState
}

// results are values of outbox.result. What is empty is not counted.
type results struct{ handled, retried, givenUp string }

// handlerKey identifies the series of a measurement.
type handlerKey struct{ topic, eventType, action, outcome string }

func (t *Telemetry) handlersOf(group string, cfg outbox.HandlerConfig, system attribute.KeyValue, outcomes outcomes, results results) *handlers {
	h := &handlers{
		Telemetry: t, outcomes: outcomes, results: results, names: newNames(), system: system, group: semconv.MessagingConsumerGroupName(group),
		skips: cfg.Unknown == outbox.SkipUnknown,
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.handlers = append(t.handlers, h)
	return h
}

// Consumer returns the configuration of a consumer of a group with metrics and traces.
func (t *Telemetry) Consumer(group string, cfg outbox.ConsumerConfig) outbox.ConsumerConfig {
	h := t.handlersOf(group, cfg.HandlerConfig, semconv.MessagingSystemKafka, t.consumerOutcomes, results{handled: "handled", givenUp: "dead_lettered"})
	theirs := cfg.Hooks.Lost
	cfg.HandlerConfig = h.added(cfg.HandlerConfig)
	cfg.Hooks.Lost = func(topic string, partition int32, records int64) {
		h.lost.Add(context.Background(), records, h.set(h.group, semconv.MessagingDestinationName(topic),
			semconv.MessagingDestinationPartitionID(partitionID(partition))))
		if theirs != nil {
			theirs(topic, partition, records)
		}
	}
	return cfg
}

// added returns cfg with the hooks and the middleware.
func (h *handlers) added(cfg outbox.HandlerConfig) outbox.HandlerConfig {
	cfg.Middleware = slices.Concat([]outbox.Middleware{h.handle}, cfg.Middleware) // theirs is within the span
	h.addOutcomes(&cfg.Hooks)
	h.addFailures(&cfg.Hooks)
	return cfg
}

// addOutcomes counts how events end, and calls the hooks of the host.
func (h *handlers) addOutcomes(hooks *outbox.ConsumerHooks) {
	theirHandled, theirRepeated, theirUnknown, theirDead := hooks.Handled, hooks.Repeated, hooks.Unknown, hooks.DeadLettered
	hooks.Handled = func(m outbox.Metadata, action string, took time.Duration) {
		h.count(context.Background(), m.Topic(), m.Type, action, h.handled)
		if theirHandled != nil {
			theirHandled(m, action, took)
		}
	}
	hooks.Repeated = func(m outbox.Metadata, action string) {
		result := "repeated"
		if m.Expired {
			result = "expired"
		}
		h.count(context.Background(), m.Topic(), m.Type, action, result)
		if theirRepeated != nil {
			theirRepeated(m, action)
		}
	}
	hooks.DeadLettered = func(m outbox.Metadata, action, topic string, err error) {
		known := m.Type
		if action == "" { // the event was not decoded or has no handler: its type can be any text
			known = ""
		}
		h.count(h.within(m), m.Topic(), known, action, h.givenUp)
		if theirDead != nil {
			theirDead(m, action, topic, err)
		}
	}
	hooks.Unknown = func(m outbox.Metadata) {
		if h.skips {
			h.count(context.Background(), m.Topic(), "", "", "unknown")
		}
		if theirUnknown != nil {
			theirUnknown(m)
		}
	}
}

// addFailures counts failed attempts and conflicts, notes the states of breakers, and calls the hooks of the host.
func (h *handlers) addFailures(hooks *outbox.ConsumerHooks) {
	theirConflicted, theirFailed := hooks.Conflicted, hooks.Failed
	hooks.Conflicted = func(m outbox.Metadata, action string, err error) {
		h.conflicts.Add(h.within(m), 1, h.failureOf(m, action, err))
		if theirConflicted != nil {
			theirConflicted(m, action, err)
		}
	}
	hooks.Failed = func(m outbox.Metadata, action string, err error, retry bool) {
		ctx := h.within(m)
		h.failed.Add(ctx, 1, h.failureOf(m, action, err))
		if retry && h.retried != "" {
			h.count(ctx, m.Topic(), m.Type, action, h.retried)
		}
		if theirFailed != nil {
			theirFailed(m, action, err, retry)
		}
	}
	theirBreaker := hooks.Breaker
	hooks.Breaker = func(action string, from, to outbox.BreakerState) {
		h.breakerOf(action).Store(int64(to))
		if theirBreaker != nil {
			theirBreaker(action, from, to)
		}
	}
}

// breakerOf returns the state of the breaker of an action. Those that are asked for are reported.
func (h *handlers) breakerOf(action string) *atomic.Int64 {
	return h.breakers.get(action, func() *atomic.Int64 { return new(atomic.Int64) })
}

// failureOf returns the attributes of a try that failed.
func (h *handlers) failureOf(m outbox.Metadata, action string, err error) metric.MeasurementOption {
	topic, eventType := h.names.of(m.Topic(), m.Type, true)
	return h.set(h.group, semconv.MessagingDestinationName(topic), semconv.CloudEventsEventType(eventType),
		actionKey.String(action), semconv.ErrorTypeKey.String(h.cfg.ErrorType(err)))
}

// within returns a context in the trace in which an event was recorded, for exemplars of what is rare.
func (h *handlers) within(m outbox.Metadata) context.Context {
	if !h.traced {
		return context.Background()
	}
	return within(context.Background(), m.Extensions[traceParentExtension])
}

// count counts an event and action with a result.
func (h *handlers) count(ctx context.Context, topic, eventType, action, result string) {
	topic, eventType = h.names.of(topic, eventType, true)
	h.processed.Add(ctx, 1, h.counts.get(handlerKey{topic, eventType, action, result}, func() metric.MeasurementOption {
		return h.set(append(h.about(topic, eventType, action), resultKey.String(result))...)
	}))
}

func (h *handlers) about(topic, eventType, action string) []attribute.KeyValue {
	attrs := []attribute.KeyValue{h.group, semconv.MessagingDestinationName(topic)}
	if eventType != "" {
		attrs = append(attrs, semconv.CloudEventsEventType(eventType))
	}
	if action != "" {
		attrs = append(attrs, actionKey.String(action))
	}
	return attrs
}

// operation returns the attributes of a call of a handler for conventional metrics and spans.
func (h *handlers) operation() []attribute.KeyValue {
	return []attribute.KeyValue{h.system, semconv.MessagingOperationName(processOperation)}
}

// errEnded is the error of a call in which something has ended the goroutine.
var errEnded = errors.New("call has ended its goroutine")

// handle measures and traces calls of handlers.
func (h *handlers) handle(ctx context.Context, call outbox.HandlerCall, next func(context.Context) error) error {
	h.breakerOf(call.Action)
	ctx, span := h.process(ctx, call)
	began, err := time.Now(), errEnded
	defer func() {
		about := h.handler(call.Events[0].Metadata, call.Action, err) // those of a batch are from one partition
		h.handlerTook.Record(ctx, time.Since(began).Seconds(), about)
		h.consumed.Add(ctx, int64(len(call.Events)), about)
		h.end(span, err)
	}()
	err = next(ctx)
	return err
}

// handler returns the attributes of a call of a handler.
func (h *handlers) handler(m outbox.Metadata, action string, err error) metric.MeasurementOption {
	topic, eventType := h.names.of(m.Topic(), m.Type, true)
	key := handlerKey{topic: topic, eventType: eventType, action: action}
	if err != nil {
		key.outcome = h.cfg.ErrorType(err)
	}
	return h.series.get(key, func() metric.MeasurementOption {
		attrs := append(h.operation(), h.about(key.topic, key.eventType, key.action)...)
		if key.outcome != "" {
			attrs = append(attrs, semconv.ErrorTypeKey.String(key.outcome))
		}
		return h.set(attrs...)
	})
}

const traceParentExtension = traceParentHeader // the extension of CloudEvents

// process starts the span of a call of a handler, with links to the spans under which the events were recorded. For one
// event it is also a child of that span, and has a link to a span that ctx has.
func (h *handlers) process(ctx context.Context, call outbox.HandlerCall) (context.Context, trace.Span) {
	if !h.traced {
		return ctx, noop.Span{}
	}
	first := call.Events[0].Metadata
	attrs := append(make([]attribute.KeyValue, 0, 16), h.operation()...)
	attrs = append(attrs, semconv.MessagingOperationTypeProcess)
	attrs = append(attrs, h.about(first.Topic(), first.Type, call.Action)...)
	if first.Kafka != nil {
		attrs = append(attrs, semconv.MessagingDestinationPartitionID(partitionID(first.Kafka.Partition)))
	}
	var links []trace.Link
	if len(call.Events) == 1 {
		outside := trace.SpanContextFromContext(ctx)
		ctx = within(ctx, first.Extensions[traceParentExtension])
		attrs = appendMessage(attrs, first)
		if created := trace.SpanContextFromContext(ctx); !created.Equal(outside) {
			links = append(links, trace.Link{SpanContext: created})
			if outside.IsValid() {
				links = append(links, trace.Link{SpanContext: outside})
			}
		}
	} else {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(len(call.Events)))
		links = linksTo(call.Events)
	}
	return h.tracer.Start(ctx, processOperation+" "+first.Topic(), trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithLinks(links...), trace.WithAttributes(h.attributes(attrs...)...))
}

// appendMessage appends the attributes of one event.
func appendMessage(attrs []attribute.KeyValue, m outbox.Metadata) []attribute.KeyValue {
	attrs = append(attrs, semconv.MessagingMessageID(m.ID))
	record := m.Kafka
	if record == nil {
		return attrs
	}
	attrs = append(attrs, semconv.MessagingKafkaOffset(int(record.Offset)))
	if record.Key != nil && utf8.Valid(record.Key) { // a key without a form as text is left out
		attrs = append(attrs, semconv.MessagingKafkaMessageKey(string(record.Key)))
	}
	if m.Tombstone {
		attrs = append(attrs, semconv.MessagingKafkaMessageTombstone(true))
	}
	return attrs
}

// linksTo returns a link to each span under which some of the events were recorded. The link of a single event has the
// attributes of the event.
func linksTo(events []outbox.Received[outbox.DomainEvent]) (links []trace.Link) {
	at := map[string]int{} // in links, or -1
	for _, e := range events {
		traceParent := e.Metadata.Extensions[traceParentExtension]
		if i, ok := at[traceParent]; ok {
			if i >= 0 {
				links[i].Attributes = nil
			}
			continue
		}
		at[traceParent] = -1
		if of := spanContext(traceParent); of.IsValid() {
			at[traceParent] = len(links)
			links = append(links, trace.Link{SpanContext: of, Attributes: appendMessage(nil, e.Metadata)})
		}
	}
	return links
}
