package main

import (
	"math"
	"slices"
)

// series is what one thing measured, turn by turn.
type series []float64

// median is NaN for an empty series.
func (s series) median() float64 { return s.percentile(50) }

// percentile returns the value below or at which p per cent of the series are,
// between two of them by their distance.
func (s series) percentile(p float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	place := p / 100 * float64(len(sorted)-1)
	below := int(place)
	above := min(below+1, len(sorted)-1)
	return sorted[below] + (place-float64(below))*(sorted[above]-sorted[below])
}

// spread is (max - min) / median; of equal values, also of zeros, it is 0.
func (s series) spread() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	if slices.Max(s) == slices.Min(s) {
		return 0
	}
	return (slices.Max(s) - slices.Min(s)) / s.median()
}

// over divides two series turn by turn.
func (s series) over(other series) series {
	ratios := make(series, min(len(s), len(other)))
	for i := range ratios {
		ratios[i] = s[i] / other[i]
	}
	return ratios
}
