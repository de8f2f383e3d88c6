package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/stretchr/testify/require"
)

// measuredAs returns results with a rate and a latency that are so many times those of what they are compared with.
func measuredAs(rate, latency float64) []report.Result {
	return []report.Result{
		report.Compared("drain/relay", "events/s", stats.Series{rate}, "drain/pipe", stats.Series{1}),
		report.Compared("latency/200/relay-p50", "ms", stats.Series{latency}, "latency/200/floor-p50", stats.Series{1}),
	}
}

func TestBounds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bounds.json")
	require.NoError(t, os.WriteFile(file, []byte(`[
		{"scenario": "drain/relay", "against": "drain/pipe", "at_least": 0.5, "usual": 1},
		{"scenario": "latency/200/relay-p50", "against": "latency/200/floor-p50", "at_most": 3, "usual": 1.5}]`), 0o600))
	behind := []report.Result{measuredAs(1, 1)[0], report.Failed("latency/200", "relay achieved 100 of 200 transactions/s")}
	for _, test := range []struct {
		name         string
		measurements [][]report.Result
		want         string
	}{
		{"all is well", [][]report.Result{measuredAs(1, 1.5)}, ""},
		{"slow once", [][]report.Result{measuredAs(0.4, 1.5), measuredAs(0.5, 1.5)}, ""},
		{"slow twice", [][]report.Result{measuredAs(0.4, 1.5), measuredAs(0.3, 1.5)}, "drain/relay exceeds its bound: 0.30 times drain/pipe, at least 0.50 is wanted, 1.00 is usual"},
		{"slow in something else each time", [][]report.Result{measuredAs(0.4, 1.5), measuredAs(1, 4)}, ""},
		{"late twice", [][]report.Result{measuredAs(1, 4), measuredAs(1, 3.1)}, "latency/200/relay-p50 exceeds its bound: 3.10"},
		{"the schedule was not kept twice", [][]report.Result{behind, behind}, "achieved 100 of 200"},
		{"not measured", [][]report.Result{measuredAs(1, 1)[:1]}, "latency/200/relay-p50 against latency/200/floor-p50 was not measured"},
	} {
		t.Run(test.name, func(t *testing.T) {
			times := 0
			err := passWith(config{gate: file}, &bytes.Buffer{}, func() ([]report.Result, error) {
				times++
				return test.measurements[times-1], nil
			})
			if test.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, test.want)
			}
			require.Equal(t, len(test.measurements), times)
		})
	}
}

func TestReadBounds(t *testing.T) {
	all, err := readBounds("bounds.json")
	require.NoError(t, err)
	for _, b := range all {
		require.NotEmpty(t, b.Origin, b.Scenario)
		require.Positive(t, b.Usual, b.Scenario)
	}
	for content, want := range map[string]string{
		"":                                    "unexpected end",
		"[]":                                  "has no bounds",
		`[{"scenario": "a", "against": "b"}]`: "at_least or at_most",
		`[{"scenario": "a", "against": "b", "at_least": 1, "at_most": 2}]`: "at_least or at_most",
	} {
		file := filepath.Join(t.TempDir(), "bounds.json")
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		_, err := readBounds(file)
		require.ErrorContains(t, err, want)
	}
	_, err = readBounds("none.json")
	require.ErrorIs(t, err, os.ErrNotExist)
}
