package short_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/short"
)

// texts returns a logger that writes to a buffer.
func texts() (*slog.Logger, *bytes.Buffer) {
	var b bytes.Buffer
	return short.Logger(slog.New(slog.NewTextHandler(&b, nil))), &b
}

// Whatever is long is cut, wherever it is in a line.
func TestLongTextsAreCut(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", 1<<20)
	for name, write := range map[string]func(*slog.Logger){
		"a text":      func(l *slog.Logger) { l.Info("m", "text", long) },
		"an error":    func(l *slog.Logger) { l.Info("m", "error", errors.New(long)) },
		"a group":     func(l *slog.Logger) { l.Info("m", slog.Group("g", "text", long)) },
		"a message":   func(l *slog.Logger) { l.Info(long) },
		"a member":    func(l *slog.Logger) { l.With("text", long).Info("m") },
		"in a group":  func(l *slog.Logger) { l.WithGroup("g").Info("m", "text", long) },
		"a LogValuer": func(l *slog.Logger) { l.Info("m", "text", valuer(long)) },
	} {
		log, b := texts()
		write(log)
		require.Less(t, b.Len(), 2*short.MaxText, name)
		require.Contains(t, b.String(), "éé", name)
		require.Contains(t, b.String(), "2097152 bytes", name)
	}
}

type valuer string

func (v valuer) LogValue() slog.Value { return slog.StringValue(string(v)) }

// What is short stays as it is, and a shortened error is still that error.
func TestShortTextsStay(t *testing.T) {
	t.Parallel()
	log, b := texts()
	log.Info("m", "text", "short", "number", 1, "error", errors.New("bad"))
	require.Contains(t, b.String(), `msg=m text=short number=1 error=bad`)
	require.Same(t, log, short.Logger(log))

	cause := errors.New(strings.Repeat("x", 1<<20))
	var got error
	slog.New(short.Logger(slog.New(catch{slog.DiscardHandler, &got})).Handler()).Error("m", "error", cause)
	require.ErrorIs(t, got, cause)
	require.Less(t, len(got.Error()), 2*short.MaxText)
}

// catch keeps the error of a line.
type catch struct {
	slog.Handler
	err *error
}

func (c catch) Enabled(context.Context, slog.Level) bool { return true }

func (c catch) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		*c.err, _ = a.Value.Any().(error)
		return true
	})
	return nil
}
