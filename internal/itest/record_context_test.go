package itest

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

var traceParentTests = []struct {
	name, traceparent string
	kept              bool
}{
	{"that is well formed", traceparent, true},
	{"that is not sampled", strings.TrimSuffix(traceparent, "01") + "00", true},
	{"that is not there", "", false},
	{"in capitals", strings.ToUpper(traceparent), false},
	{"without flags", strings.TrimSuffix(traceparent, "-01"), false},
	{"with a space in front", " " + traceparent, false},
	{"with a newline behind", traceparent + "\n", false},
	{"with NUL", traceparent + "\x00", false},
	{"that is no UTF-8", "\xff", false},
	{"with more behind", traceparent + "-what-the-future-brings", false},
	{"of many bytes", strings.Repeat("0", 1<<20), false},
}

// The W3C asks those who pass a traceparent on to leave out what is malformed.
func TestTraceParent(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	for _, tt := range traceParentTests {
		t.Run(tt.name, func(t *testing.T) { c.requireTraceParent(t, tt.traceparent, tt.kept) })
	}
}

// https://www.w3.org/TR/trace-context/#traceparent-header: version ff is
// forbidden, and an id of zeros means that there is none.
func TestTraceParentOfZeros(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	for name, tp := range map[string]string{
		"trace id":  "00-00000000000000000000000000000000-b7ad6b7169203331-01",
		"parent id": "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
		"version":   "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
	} {
		t.Run(name, func(t *testing.T) { c.requireTraceParent(t, tp, false) })
	}
}

// requireTraceParent requires that a recorded event carries it or not, whether
// it comes from the context or from the hook, which has the last word.
func (c *counter) requireTraceParent(t *testing.T, tp string, kept bool) {
	t.Helper()
	hooked := c.recorder(t, outbox.RecorderConfig{TraceParent: func(context.Context) string { return tp }})
	c.commit(t, outbox.WithTraceParent(background, tp), c.rec, good)
	c.commit(t, outbox.WithTraceParent(background, strings.Replace(traceparent, "0af", "fff", 1)), hooked, good)
	var want *string
	if kept {
		want = new(`{"traceparent": "` + tp + `"}`)
	}
	all := c.rows(t)
	for _, r := range all[len(all)-2:] {
		require.Equal(t, want, r.Headers)
	}
}

func TestContextValues(t *testing.T) {
	t.Parallel()
	require.Empty(t, outbox.CorrelationID(background))
	require.Empty(t, outbox.TraceParent(background))
	ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, "c"), "t")
	require.Equal(t, "c", outbox.CorrelationID(ctx))
	require.Equal(t, "t", outbox.TraceParent(ctx))
	require.Empty(t, outbox.CorrelationID(outbox.WithCorrelationID(ctx, "")))
}
