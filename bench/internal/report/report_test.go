package report

import (
	"bytes"
	"strings"
	"testing"

	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/stretchr/testify/require"
)

func example() *Report {
	r := &Report{}
	r.Note("cores: %d", 2)
	pipe, relay := stats.Series{100_000, 120_000, 110_000}, stats.Series{90_000, 60_000, 99_000}
	r.Add(Measured("drain/pipe", "events/s", pipe),
		Compared("drain/relay", "events/s", relay, "drain/pipe", pipe).RatioAtLeast(0.8),
		Compared("drain/cpu", "µs/event", stats.Series{7}, "drain/pipe-cpu", stats.Series{3.5}).ValueAtMost(6),
		Failed("latency/3000", "floor achieved 2000 of 3000 transactions/s"))
	return r
}

func TestTable(t *testing.T) {
	require.Equal(t, `cores: 2

scenario        value  unit      ratio  against         target        met  spread  runs
drain/pipe    110,000  events/s                                              18 %     3
drain/relay    90,000  events/s   0.90  drain/pipe      ratio ≥ 0.80  yes    44 %     3
drain/cpu        7.00  µs/event   2.00  drain/pipe-cpu  value ≤ 6     NO      0 %     1
latency/3000  FAILED: floor achieved 2000 of 3000 transactions/s
`, example().table())
}

func TestJSON(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, example().Write(&b, "-"))
	require.Equal(t, `{"scenario":"drain/pipe","value":110000,"unit":"events/s","runs":3,"spread":0.18181818181818182}
{"scenario":"drain/relay","value":90000,"unit":"events/s","ratio":0.9,"against":"drain/pipe","runs":3,"spread":0.4444444444444445,"target":"ratio ≥ 0.80","met":true}
{"scenario":"drain/cpu","value":7,"unit":"µs/event","ratio":2,"against":"drain/pipe-cpu","runs":1,"spread":0,"target":"value ≤ 6","met":false}
{"scenario":"latency/3000","value":0,"unit":"","runs":0,"spread":0,"failed":"floor achieved 2000 of 3000 transactions/s"}
`, b.String())
}

// Processor time is counted in ticks, so that of a short turn may be 0. JSON has no infinity.
func TestNothingIsDividedByZero(t *testing.T) {
	r := &Report{}
	r.Add(Compared("relay-cpu", "µs", stats.Series{10, 20}, "floor-cpu", stats.Series{0, 5}),
		Compared("no-cpu", "µs", stats.Series{0}, "floor-cpu", stats.Series{0}),
		Measured("floor-cpu", "µs", stats.Series{0, 0, 5}))
	var b bytes.Buffer
	require.NoError(t, r.Write(&b, "-"))
	require.Equal(t, 3, strings.Count(b.String(), `"failed":"floor-cpu is 0 in a turn`))
}

func TestNumber(t *testing.T) {
	for want, v := range map[string]float64{"0.12": 0.123, "5.43": 5.432, "54.3": 54.32, "543": 543.2, "5,432": 5432.1, "1,234,568": 1234567.8} {
		require.Equal(t, want, Number(v))
	}
}
