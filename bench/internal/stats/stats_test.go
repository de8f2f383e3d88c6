package stats

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSeries(t *testing.T) {
	for _, test := range []struct {
		name           string
		values         Series
		median, spread float64
	}{
		{"one value", Series{3}, 3, 0},
		{"an odd number", Series{9, 1, 2}, 2, 4},
		{"an even number", Series{4, 1, 2, 3}, 2.5, 3 / 2.5},
	} {
		t.Run(test.name, func(t *testing.T) {
			require.Equal(t, test.median, test.values.Median())
			require.Equal(t, test.spread, test.values.Spread())
		})
	}
	require.True(t, math.IsNaN(Series{}.Median()))
	require.True(t, math.IsNaN(Series{}.Spread()))
}

func TestPercentileLeavesTheSeriesInOrder(t *testing.T) {
	s := make(Series, 101)
	for i := range s {
		s[i] = float64(100 - i)
	}
	require.Equal(t, 99.0, s.Percentile(99))
	require.Equal(t, 0.0, s.Percentile(0))
	require.Equal(t, 100.0, s.Percentile(100))
	require.Equal(t, 100.0, s[0])
}

func TestOverDividesTurnByTurn(t *testing.T) {
	require.Equal(t, Series{2, 0.5}, Series{4, 2}.Over(Series{2, 4}))
	require.Equal(t, Series{2}, Series{4, 2}.Over(Series{2}), "a turn without its partner does not count")
}
