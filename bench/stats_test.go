package main

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSeries(t *testing.T) {
	for _, test := range []struct {
		name           string
		values         series
		median, spread float64
	}{
		{"one value", series{3}, 3, 0},
		{"an odd number", series{9, 1, 2}, 2, 4},
		{"an even number", series{4, 1, 2, 3}, 2.5, 3 / 2.5},
	} {
		t.Run(test.name, func(t *testing.T) {
			require.Equal(t, test.median, test.values.median())
			require.Equal(t, test.spread, test.values.spread())
		})
	}
	require.True(t, math.IsNaN(series{}.median()))
	require.True(t, math.IsNaN(series{}.spread()))
}

func TestPercentileLeavesTheSeriesInOrder(t *testing.T) {
	s := make(series, 101)
	for i := range s {
		s[i] = float64(100 - i)
	}
	require.Equal(t, 99.0, s.percentile(99))
	require.Equal(t, 0.0, s.percentile(0))
	require.Equal(t, 100.0, s.percentile(100))
	require.Equal(t, 100.0, s[0])
}

func TestOverDividesTurnByTurn(t *testing.T) {
	require.Equal(t, series{2, 0.5}, series{4, 2}.over(series{2, 4}))
	require.Equal(t, series{2}, series{4, 2}.over(series{2}), "a turn without its partner does not count")
}
