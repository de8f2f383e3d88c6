package outboxotel

import (
	"context"
	"errors"
	"net"
	"strings"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

const traceParentHeader = "traceparent"

// traceParent returns the W3C form of a span's context, or "" if that is not valid.
func traceParent(of trace.SpanContext) string {
	if !of.IsValid() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpanContext(context.Background(), of), carrier)
	return carrier[traceParentHeader]
}

// within returns a context in the trace of a traceparent, or ctx if that is not valid.
func within(ctx context.Context, traceParent string) context.Context {
	if traceParent == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceParentHeader: traceParent})
}

// isSampled reads the flags of a traceparent without checking the rest.
func isSampled(traceParent string) bool {
	if traceParent == "" {
		return false
	}
	return strings.IndexByte("13579bdf", traceParent[len(traceParent)-1]) >= 0 // the last bit
}

// spanContext parses a traceparent.
func spanContext(traceParent string) trace.SpanContext {
	return trace.SpanContextFromContext(within(context.Background(), traceParent))
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

func isCanceled(err error) bool { return errors.Is(err, context.Canceled) }
