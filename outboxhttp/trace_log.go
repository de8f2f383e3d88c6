package outboxhttp

import (
	"context"
	"log/slog"
)

// TraceKey is the name under which [LogTrace] logs a trace id.
const TraceKey = "trace_id"

// LogTrace returns a handler that adds trace_id to log lines whose context has one: in HTTP handlers inside [Trace],
// and in consumers' handlers, whose context has that of the event. Without a trace id it is the correlation id.
// trace_id is never inside a group. Log with the methods that take a context, such as [slog.Logger.InfoContext].
func LogTrace(next slog.Handler) slog.Handler { return &traceLog{next: next, outside: next} }

// traceLog is next, and the calls of WithGroup and WithAttrs since the first group. The
// attributes of a record belong into its groups, so trace_id must be added to next before
// these calls are repeated on it.
type traceLog struct {
	next    slog.Handler
	outside slog.Handler // before the first group
	inside  []func(slog.Handler) slog.Handler
}

// Enabled implements slog.Handler.
func (l *traceLog) Enabled(ctx context.Context, level slog.Level) bool {
	return l.next.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (l *traceLog) Handle(ctx context.Context, r slog.Record) error {
	id := traceID(ctx)
	if id == "" {
		return l.next.Handle(ctx, r)
	}
	traced := l.outside.WithAttrs([]slog.Attr{slog.String(TraceKey, id)})
	for _, do := range l.inside {
		traced = do(traced)
	}
	return traced.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (l *traceLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return l.with(func(h slog.Handler) slog.Handler { return h.WithAttrs(attrs) }, len(l.inside) > 0)
}

// WithGroup implements slog.Handler.
func (l *traceLog) WithGroup(name string) slog.Handler {
	if name == "" {
		return l
	}
	return l.with(func(h slog.Handler) slog.Handler { return h.WithGroup(name) }, true)
}

func (l *traceLog) with(do func(slog.Handler) slog.Handler, inside bool) slog.Handler {
	next := do(l.next)
	if !inside {
		return &traceLog{next: next, outside: next}
	}
	return &traceLog{next: next, outside: l.outside, inside: append(l.inside[:len(l.inside):len(l.inside)], do)}
}
