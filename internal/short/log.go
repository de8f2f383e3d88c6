package short

import (
	"context"
	"log/slog"
	"slices"
)

// MaxText is how many bytes of a text a line has.
const MaxText = 2_000

// Logger returns a logger that shortens texts and errors, and writes to log.
func Logger(log *slog.Logger) *slog.Logger {
	if _, short := log.Handler().(handler); short {
		return log
	}
	return slog.New(handler{log.Handler()})
}

type handler struct{ slog.Handler }

// Handle implements [slog.Handler]. A record keeps its place in the source.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	if !anyLong(r) {
		return h.Handler.Handle(ctx, r)
	}
	short := slog.NewRecord(r.Time, r.Level, Text(r.Message, MaxText), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		short.AddAttrs(shortened(a))
		return true
	})
	return h.Handler.Handle(ctx, short)
}

// WithAttrs implements [slog.Handler].
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	all := make([]slog.Attr, 0, len(attrs))
	for _, a := range attrs {
		all = append(all, shortened(a))
	}
	return handler{h.Handler.WithAttrs(all)}
}

// WithGroup implements [slog.Handler].
func (h handler) WithGroup(name string) slog.Handler { return handler{h.Handler.WithGroup(name)} }

func anyLong(r slog.Record) bool {
	long := len(r.Message) > MaxText
	r.Attrs(func(a slog.Attr) bool {
		long = long || isLong(a.Value)
		return !long
	})
	return long
}

func isLong(v slog.Value) bool {
	switch v = v.Resolve(); v.Kind() {
	case slog.KindString:
		return len(v.String()) > MaxText
	case slog.KindGroup:
		return slices.ContainsFunc(v.Group(), func(a slog.Attr) bool { return isLong(a.Value) })
	default: // numbers are no errors
		err, ok := v.Any().(error)
		return ok && len(err.Error()) > MaxText
	}
}

// shortened returns an attribute with at most [MaxText] bytes of each text.
func shortened(a slog.Attr) slog.Attr {
	if !isLong(a.Value) {
		return a
	}
	switch v := a.Value.Resolve(); v.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(Text(v.String(), MaxText))
	case slog.KindGroup:
		var all []slog.Attr
		for _, member := range v.Group() {
			all = append(all, shortened(member))
		}
		a.Value = slog.GroupValue(all...)
	default: // an error
		a.Value = slog.AnyValue(shortError{v.Any().(error)})
	}
	return a
}

// shortError is an error with a short text.
type shortError struct{ error }

func (e shortError) Error() string { return Text(e.error.Error(), MaxText) }
func (e shortError) Unwrap() error { return e.error }
