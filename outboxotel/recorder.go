package outboxotel

import (
	"context"

	"github.com/outboxgo/outbox"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// Recorder returns cfg with metrics and traces: a span and a count for each Record and
// Queue. The traceparent of events is that of the span, or without a span the result of
// cfg.TraceParent.
func (t *Telemetry) Recorder(cfg outbox.RecorderConfig) outbox.RecorderConfig {
	hosts, theirs := cfg.TraceParent, cfg.Hooks.Recording
	if hosts == nil {
		hosts = outbox.TraceParent
	}
	cfg.TraceParent = func(ctx context.Context) string {
		if own := traceParent(trace.SpanContextFromContext(ctx)); own != "" {
			return own
		}
		return hosts(ctx)
	}
	cfg.Hooks.Recording = func(ctx context.Context, events []outbox.DomainEvent) (context.Context, func(error)) {
		ctx, done := t.recording(ctx, hosts, len(events))
		if theirs == nil {
			return ctx, done
		}
		ctx, theirDone := theirs(ctx, events)
		return ctx, func(err error) {
			theirDone(err)
			done(err)
		}
	}
	return cfg
}

// recording starts a span for the recording of n events.
func (t *Telemetry) recording(ctx context.Context, hosts func(context.Context) string, n int) (context.Context, func(error)) {
	if !trace.SpanContextFromContext(ctx).IsValid() { // the trace is that of a consumer without spans, or there is none
		ctx = within(ctx, hosts(ctx))
	}
	attrs := append(operation(recordOperation), semconv.MessagingOperationTypeCreate)
	if n > 1 {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(n))
	}
	ctx, span := t.tracer.Start(ctx, recordOperation, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(t.attributes(attrs...)...))
	return ctx, func(err error) {
		if err == nil {
			t.recorded.Add(ctx, int64(n), t.set())
		} else {
			t.recorded.Add(ctx, int64(n), t.set(semconv.ErrorTypeKey.String(t.cfg.ErrorType(err))))
		}
		t.end(span, err)
	}
}

// end ends a span, with the error of the operation.
func (t *Telemetry) end(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		span.SetAttributes(semconv.ErrorTypeKey.String(t.cfg.ErrorType(err)))
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}
