package outboxotel

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// relayState is the observed state of the relays with one name in this process.
type relayState struct {
	leading atomic.Int64 // how many of them lead; more than one only for moments
}

// relay has the hooks of a relay.
type relay struct {
	*Telemetry
	name  attribute.KeyValue
	state *relayState

	options cache[topicKey, topicOptions]
	sends   cache[sendKey, metric.MeasurementOption]
	batches [2]metric.MeasurementOption // by whether they are retries
}

// sendKey identifies the series of the durations of sends.
type sendKey struct {
	errorType string
	retried   bool
}

// topicOptions are the attributes of sent events. The latency is measured for each event,
// so it has few attributes: the SDK processes all of them each time.
type topicOptions struct {
	count   []metric.AddOption
	latency []metric.RecordOption
}

// topicKey identifies the series of a measurement of sent events.
type topicKey struct {
	topic, errorType string
	retried          bool
}

// Relay returns cfg with metrics and traces.
func (t *Telemetry) Relay(cfg outbox.RelayConfig) outbox.RelayConfig {
	const defaultName = "default" // of outbox.RelayConfig
	name := cmp.Or(cfg.Name, defaultName)
	t.mu.Lock()
	state := t.relays[name]
	if state == nil {
		state = &relayState{}
		t.relays[name] = state
	}
	t.mu.Unlock()
	r := &relay{Telemetry: t, name: relayKey.String(name), state: state}
	for i, retried := range []bool{false, true} {
		r.batches[i] = t.set(append(operation(sendOperation), r.name, retryKey.Bool(retried))...)
	}
	h := &cfg.Hooks
	h.Leading = both(r.leads, h.Leading)
	h.Sent = both(r.sentBatch, h.Sent)
	h.Rejected = both(r.rejectedEvent, h.Rejected)
	h.Dead = both(r.deadEvent, h.Dead)
	h.RowsRemoved = both(r.rowsRemoved, h.RowsRemoved)
	return cfg
}

// both returns a function that calls ours and then theirs, which may be nil.
func both[T any](ours, theirs func(T)) func(T) {
	if theirs == nil {
		return ours
	}
	return func(event T) {
		ours(event)
		theirs(event)
	}
}

func (r *relay) leads(yes bool) {
	if yes {
		r.state.leading.Add(1)
	} else {
		r.state.leading.Add(-1)
	}
}

func (r *relay) rejectedEvent(e outbox.FailedEvent) {
	r.rejected.Add(context.Background(), 1, r.failure(e))
}

func (r *relay) deadEvent(e outbox.FailedEvent) {
	r.dead.Add(context.Background(), 1, r.failure(e))
}

// failure returns the attributes of an event that Kafka has rejected.
func (r *relay) failure(e outbox.FailedEvent) metric.MeasurementOption {
	topic, eventType := r.of(e.Topic, e.Type, false)
	return r.set(r.name, semconv.MessagingDestinationName(topic), semconv.CloudEventsEventType(eventType), semconv.ErrorTypeKey.String(e.Class))
}

func (r *relay) rowsRemoved(c outbox.RetentionResult) { r.countRemoved(r.removed, r.name, c) }

// countRemoved counts the rows that a run of retention removed.
func (t *Telemetry) countRemoved(counter metric.Int64Counter, by attribute.KeyValue, c outbox.RetentionResult) {
	for table, n := range map[string]int64{
		"outbox": c.Published, "outbox_cursor": c.Cursors, "outbox_failed": c.Resolved, "event_handled": c.Handled,
		"outbox_audit": c.Audited, "event_delivery": c.Delivered,
	} {
		if n > 0 {
			counter.Add(context.Background(), n, t.set(by, semconv.DBCollectionName(table)))
		}
	}
}

// sentBatch measures a batch and makes the spans of its events.
func (r *relay) sentBatch(b outbox.SentBatch) {
	ctx := context.Background()
	spans := &spans{relay: r, began: b.Began, end: b.Began.Add(b.Took), retried: b.Retried}
	r.accepted(ctx, b, spans)
	failure := ""
	for e, class := range b.NotTaken() {
		if b.Events == 0 && failure == "" {
			failure = class
		}
		r.sent.Add(spans.add(ctx, e, class), 1, r.about(topicKey{e.Topic(), class, b.Retried}).count...)
	}
	traced := spans.finish(ctx)
	about := r.batches[0]
	if b.Retried {
		about = r.batches[1]
	}
	if tried := b.Events + b.Failed; tried > 0 {
		r.batchSize.Record(traced, int64(tried), about)
		r.sendTook.Record(traced, b.Took.Seconds(), r.send(sendKey{failure, b.Retried}))
	}
	if b.Expired > 0 {
		r.expired.Add(ctx, int64(b.Expired), about)
	}
}

// send returns the attributes of the duration of a send. A send has failed if Kafka accepted none of its events.
func (r *relay) send(key sendKey) metric.MeasurementOption {
	return r.sends.get(key, func() metric.MeasurementOption {
		attrs := append(operation(sendOperation), semconv.MessagingOperationTypeSend, r.name, retryKey.Bool(key.retried))
		if key.errorType != "" {
			attrs = append(attrs, semconv.ErrorTypeKey.String(key.errorType))
		}
		return r.set(attrs...)
	})
}

// accepted measures and traces the events that Kafka has accepted. Consecutive events of
// one topic are counted in one call, because a batch has thousands.
func (r *relay) accepted(ctx context.Context, b outbox.SentBatch, spans *spans) {
	key, n := topicKey{retried: b.Retried}, int64(0)
	var about topicOptions
	for e := range b.All() {
		if topic := e.Topic(); n == 0 || topic != key.topic {
			if n > 0 {
				r.sent.Add(ctx, n, about.count...)
			}
			key.topic, n = topic, 0
			about = r.about(key)
		}
		n++
		r.latency.Record(spans.add(ctx, e, ""), max(0, spans.end.Sub(e.RecordedAt()).Seconds()), about.latency...)
	}
	if n > 0 {
		r.sent.Add(ctx, n, about.count...)
	}
}

// about returns the attributes of sent events, or of those that were not taken for an error.
func (r *relay) about(key topicKey) topicOptions {
	key.topic = r.topics.Name(key.topic, key.errorType == "")
	return r.options.get(key, func() topicOptions {
		topic := []attribute.KeyValue{r.name}
		if key.topic != "" {
			topic = append(topic, semconv.MessagingDestinationName(key.topic))
		}
		count := append(operation(sendOperation), retryKey.Bool(key.retried))
		if key.errorType != "" {
			count = append(count, semconv.ErrorTypeKey.String(key.errorType))
		}
		return topicOptions{
			count:   []metric.AddOption{r.set(append(count, topic...)...)},
			latency: []metric.RecordOption{r.set(topic...)},
		}
	})
}

// spans are the spans of a batch: one for the events of one Record and topic, and for each class of error.
type spans struct {
	*relay
	began, end time.Time
	retried    bool
	open       map[spanKey]*sendSpan
	order      []*sendSpan
}

type spanKey struct{ traceParent, topic, errorType string }

// sendSpan is a span that will be made.
type sendSpan struct {
	spanKey
	parent context.Context
	first  outbox.SentEvent
	n      int
	spread bool // its events are in several partitions
}

// add counts an event for its span and returns a context in its trace. The error type is that of an event that Kafka
// has not accepted.
func (s *spans) add(ctx context.Context, e outbox.SentEvent, errorType string) context.Context {
	if !s.traced {
		return ctx
	}
	traceParent := e.TraceParent()
	if !isSampled(traceParent) {
		return ctx
	}
	key := spanKey{traceParent, e.Topic(), errorType}
	if span := s.open[key]; span != nil {
		span.n++
		span.spread = span.spread || e.Partition() != span.first.Partition()
		return span.parent
	}
	parent := within(ctx, traceParent)
	if !trace.SpanContextFromContext(parent).IsSampled() { // also if the traceparent is not valid
		return ctx
	}
	if s.open == nil {
		s.open = map[spanKey]*sendSpan{}
	}
	span := &sendSpan{spanKey: key, parent: parent, first: e, n: 1}
	s.open[key] = span
	s.order = append(s.order, span)
	return parent
}

// finish makes the spans, and returns a context in the first one, if there is one. The recorder's span is the one that
// created the messages, so the conventions demand a client span for the send, and a link.
func (s *spans) finish(ctx context.Context) context.Context {
	var first trace.SpanContext
	for i, send := range s.order {
		_, span := s.tracer.Start(send.parent, send.name(), trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(s.began),
			trace.WithLinks(trace.LinkFromContext(send.parent)), trace.WithAttributes(s.attributes(s.about(send)...)...))
		if send.errorType != "" {
			span.SetStatus(codes.Error, send.errorType)
		}
		span.End(trace.WithTimestamp(s.end))
		if i == 0 {
			first = span.SpanContext()
		}
	}
	return trace.ContextWithSpanContext(ctx, first)
}

func (s *sendSpan) name() string {
	if s.topic == "" {
		return sendOperation
	}
	return sendOperation + " " + s.topic
}

// about returns the attributes of a span.
func (s *spans) about(send *sendSpan) []attribute.KeyValue {
	attrs := append(make([]attribute.KeyValue, 0, 16), operation(sendOperation)...)
	attrs = append(attrs, semconv.MessagingOperationTypeSend, s.name, retryKey.Bool(s.retried))
	if send.topic != "" {
		attrs = append(attrs, semconv.MessagingDestinationName(send.topic))
	}
	e, accepted := send.first, send.errorType == ""
	if !accepted {
		attrs = append(attrs, semconv.ErrorTypeKey.String(send.errorType))
	} else if !send.spread {
		attrs = append(attrs, semconv.MessagingDestinationPartitionID(partitionID(e.Partition())))
	}
	if send.n > 1 {
		return append(attrs, semconv.MessagingBatchMessageCount(send.n))
	}
	attrs = append(attrs, semconv.MessagingMessageID(e.ID()), semconv.MessagingKafkaMessageKey(e.Key()), semconv.MessagingMessageBodySize(e.Size()))
	if accepted && e.Offset() >= 0 {
		attrs = append(attrs, semconv.MessagingKafkaOffset(int(e.Offset())))
	}
	if e.Tombstone() {
		attrs = append(attrs, semconv.MessagingKafkaMessageTombstone(true))
	}
	return attrs
}
