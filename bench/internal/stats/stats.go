// Package stats sums up what was measured, turn by turn.
package stats

import (
	"math"
	"slices"
)

// Series is what one thing measured, turn by turn.
type Series []float64

// Median is NaN for an empty series.
func (s Series) Median() float64 { return s.Percentile(50) }

// Percentile returns the value below or at which p per cent of the series are,
// between two of them by their distance.
func (s Series) Percentile(p float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	place := p / 100 * float64(len(sorted)-1)
	below := int(place)
	above := min(below+1, len(sorted)-1)
	return sorted[below] + (place-float64(below))*(sorted[above]-sorted[below])
}

// Spread is (max - min) / median; of equal values, also of zeros, it is 0.
func (s Series) Spread() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	if slices.Max(s) == slices.Min(s) {
		return 0
	}
	return (slices.Max(s) - slices.Min(s)) / s.Median()
}

// Over divides two series turn by turn.
func (s Series) Over(other Series) Series {
	ratios := make(Series, min(len(s), len(other)))
	for i := range ratios {
		ratios[i] = s[i] / other[i]
	}
	return ratios
}
