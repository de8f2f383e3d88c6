package outboxadmin

import (
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)

func TestNiceTop(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]float64{0: 1, 1: 1, 1.1: 2, 2.2: 2.5, 26: 50, 51: 100, 100: 100, 999: 1000, 0.3: 0.5} {
		require.InDelta(t, want, niceTop(v), 1e-9, "%v", v)
	}
}

// A plot has its highest value below the upper edge, a break where nothing is known, and
// a dot for a point without neighbours.
func TestPlot(t *testing.T) {
	t.Parallel()
	at := func(minute int, v float64) point { return point{noon.Add(time.Duration(minute) * time.Minute), v} }
	p := newPlot("Throughput", []point{at(0, 0), at(1, 100), at(5, 50), at(9, 25), at(10, 25)},
		scale{from: noon, to: noon.Add(10 * time.Minute), gap: 90 * time.Second, least: 1, format: rateText})
	require.Equal(t, "M0.0 71.0L36.0 1.0M180.0 36.0h.1M324.0 53.5L360.0 53.5", p.Line)
	require.Equal(t, "M0.0 72L0.0 71.0L36.0 1.0V72ZM324.0 72L324.0 53.5L360.0 53.5V72Z", p.Area)
	require.Equal(t, []string{"25/s", "100/s", "10 min ago"}, []string{p.Now, p.Top, p.From})
	require.Equal(t, "Throughput: 25/s at 12:10:00, at most 100/s in the last 10 min", p.Summary)
	width := 0.0
	for _, s := range p.Spots {
		width += s.Width
	}
	require.InDelta(t, plotWidth, width, 0.01)
	none := newPlot("Latency", nil, scale{from: noon, to: noon.Add(time.Hour), format: millisText})
	require.Empty(t, none.Line)
	require.Contains(t, none.Summary, "nothing known")
}

func TestWords(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"never": relative(noon, time.Time{}), "now": relative(noon, noon.Add(300*time.Millisecond)), "in 24 s": relative(noon, noon.Add(24*time.Second)),
		"119 s ago": relative(noon, noon.Add(-119*time.Second)), "3 min ago": relative(noon, noon.Add(-199*time.Second)),
		"5 h ago": relative(noon, noon.Add(-5*time.Hour)), "3 days ago": relative(noon, noon.Add(-80*time.Hour)), "1,234,567": thousands(1234567), "-100": thousands(-100),
		"1 event": plural(1, "event", "events"), "2,000 events": plural(2000, "event", "events"), "1 byte": bytesText(1), "1.5 KiB": bytesText(1536), "1 MiB": bytesText(1 << 20),
		"12.3k/s": rateText(12345), "0.5/s": rateText(0.5), "1,234": countText(1234), "93 ms": millisText(93.4), "1.5 s": millisText(1500), "3 min": millisText(200_000),
		"2026-02-03 12:00:00.000 UTC": exact(noon.In(time.FixedZone("", 3600))), "message too large": plain("message_too_large"),
	} {
		require.Equal(t, want, got)
	}
}

// Samples are bounded in number, age and relays. Several views at the same time add only one sample.
func TestSamples(t *testing.T) {
	t.Parallel()
	var s samples
	at := func(d time.Duration, pending int64) {
		s.addRelays(noon.Add(d), []outbox.RelayStatus{{Name: "default", Pending: pending, Waiting: 1, Failed: 2, Parked: 3, Dead: 100}})
	}
	at(0, 1)
	at(time.Second, 2)
	at(3*time.Second, 3)
	require.Equal(t, []sample{{noon, 1, 6, nil}, {noon.Add(3 * time.Second), 3, 6, nil}}, s.since("default", noon))
	require.Len(t, s.since("default", noon.Add(time.Second)), 1)
	require.Empty(t, s.since("other", noon))
	for i := range 2 * maxSamples {
		at(time.Minute+time.Duration(i)*sampleSpace, int64(i))
	}
	kept := s.since("default", noon)
	require.Len(t, kept, maxSamples)
	require.EqualValues(t, 2*maxSamples-1, kept[maxSamples-1].pending)
	at(48*time.Hour, 7)
	require.Len(t, s.since("default", noon), 1, "what is old goes")
	for i := range 2 * maxSampled {
		s.addRelays(noon, []outbox.RelayStatus{{Name: strings.Repeat("x", i+1)}})
	}
	require.Len(t, s.of, maxSampled)
}
