package outbox

import (
	"context"

	"github.com/outboxgo/outbox/internal/envelope"
)

// Mode is how a CloudEvent is written into a Kafka record.
type Mode int

const (
	// Binary puts the payload into the record's value as it is, and the
	// attributes into headers named ce_…. It is the default.
	Binary Mode = iota
	// Structured puts payload and attributes into the value, as one JSON object
	// of content type application/cloudevents+json. Payloads that are not JSON are
	// encoded as base64 in it, which is a third larger: RecorderConfig.MaxPayload
	// must leave room for that.
	Structured
)

// WithCorrelationID returns a context under which recorded events carry id, at
// most 255 characters, as the CloudEvents extension correlationid: in Kafka the
// header ce_correlationid.
func WithCorrelationID(ctx context.Context, id string) context.Context {
	return envelope.WithCarried(ctx, envelope.CorrelationKey, id)
}

// CorrelationID returns what [WithCorrelationID] put into the context, or "".
func CorrelationID(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.CorrelationKey)
}

// WithTraceID returns a context under which recorded events carry id, at most 255
// characters, as the CloudEvents extension traceid: in Kafka the header ce_traceid. It is
// for ids in a form of one's own, such as X-Trace-ID of a request; those of the W3C are
// part of [WithTraceParent].
func WithTraceID(ctx context.Context, id string) context.Context {
	return envelope.WithCarried(ctx, envelope.TraceIDKey, id)
}

// TraceID returns what [WithTraceID] put into the context, or "".
func TraceID(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.TraceIDKey)
}

// WithTraceParent returns a context under which recorded events carry a W3C
// traceparent, unless RecorderConfig.TraceParent reads it from elsewhere. In
// Kafka it is the header ce_traceparent, and traceparent for tracing libraries.
func WithTraceParent(ctx context.Context, traceparent string) context.Context {
	return envelope.WithCarried(ctx, envelope.TraceKey, traceparent)
}

// TraceParent returns what [WithTraceParent] put into the context, or "".
func TraceParent(ctx context.Context) string {
	return envelope.Carried(ctx, envelope.TraceKey)
}
