package outboxadmin

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// plot is a small line over time, drawn as SVG by the template plot. Its words are HTML outside the
// drawing, so that they neither stretch nor depend on styles inside it.
type plot struct {
	Name    string
	Now     string // the newest value, with its unit
	Age     string // the time of the newest value
	Top     string // value at the upper edge
	From    string // time at the left edge
	Summary string // the whole in words
	Line    string // path
	Area    string // path
	Spots   []spot // texts for a pointer
	Width   int
	Height  int
}

// spot is a vertical part of a plot with a text.
type spot struct {
	X, Width float64
	Text     string
}

// point is a value at a time.
type point struct {
	at    time.Time
	value float64
}

const (
	plotWidth  = 360
	plotHeight = 72
)

// scale defines the axes of a plot.
type scale struct {
	from, to time.Time
	gap      time.Duration        // points with a larger distance are not joined
	format   func(float64) string // with its unit
	least    float64              // of the upper edge
}

// newPlot draws points, which come in order of time.
func newPlot(name string, points []point, s scale) plot {
	p := plot{Name: name, Width: plotWidth, Height: plotHeight, From: short(s.to.Sub(s.from)) + " ago"}
	if len(points) == 0 {
		p.Summary = name + ": nothing known in this time"
		return p
	}
	highest := 0.0
	for _, pt := range points {
		highest = max(highest, pt.value)
	}
	top := niceTop(max(highest, s.least))
	last := points[len(points)-1]
	p.Now, p.Top = s.format(last.value), s.format(top)
	p.Summary = fmt.Sprintf("%s: %s at %s, at most %s in the last %s", name, p.Now, clock(last.at), s.format(highest), short(s.to.Sub(s.from)))

	x := func(t time.Time) float64 { return float64(t.Sub(s.from)) / float64(s.to.Sub(s.from)) * plotWidth }
	y := func(v float64) float64 { return plotHeight - v/top*(plotHeight-2) - 1 }
	p.Line, p.Area = paths(points, s.gap, x, y)
	for i, pt := range points {
		begin, end := 0.0, float64(plotWidth)
		if i > 0 {
			begin = (x(points[i-1].at) + x(pt.at)) / 2
		}
		if i < len(points)-1 {
			end = (x(pt.at) + x(points[i+1].at)) / 2
		}
		p.Spots = append(p.Spots, spot{begin, end - begin, clock(pt.at) + "  " + s.format(pt.value)})
	}
	return p
}

// aged sets the time of the newest value. Each value belongs to a step of time, or to a moment.
func (p plot) aged(now time.Time, points []point, step time.Duration) plot {
	if len(points) == 0 {
		return p
	}
	last := points[len(points)-1].at
	p.Age = relative(now, last)
	if step > 0 && now.Sub(last) < step {
		p.Age = "in the last " + short(step)
	}
	p.Summary += " (" + p.Age + ")"
	return p
}

// paths draws points as a line, and as the area under it, with breaks where nothing is
// known. A point without neighbours is a dot.
func paths(points []point, gap time.Duration, x func(time.Time) float64, y func(float64) float64) (line, area string) {
	var l, a strings.Builder
	for i, pt := range points {
		begins := i == 0 || pt.at.Sub(points[i-1].at) > gap
		ends := i == len(points)-1 || points[i+1].at.Sub(pt.at) > gap
		px, py := x(pt.at), y(pt.value)
		switch {
		case begins && ends:
			fmt.Fprintf(&l, "M%.1f %.1fh.1", px, py)
			continue
		case begins:
			fmt.Fprintf(&l, "M%.1f %.1f", px, py)
			fmt.Fprintf(&a, "M%.1f %d", px, plotHeight)
		default:
			fmt.Fprintf(&l, "L%.1f %.1f", px, py)
		}
		fmt.Fprintf(&a, "L%.1f %.1f", px, py)
		if ends {
			fmt.Fprintf(&a, "V%dZ", plotHeight)
		}
	}
	return l.String(), a.String()
}

// niceTop is the next of 1, 2, 2.5 and 5, times a power of ten.
func niceTop(v float64) float64 {
	if v <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, step := range []float64{1, 2, 2.5, 5} {
		if v <= step*power*(1+1e-9) {
			return step * power
		}
	}
	return 10 * power
}

// countText writes a number of events, about.
func countText(v float64) string {
	switch {
	case v >= 10_000:
		return fmt.Sprintf("%sk", trimZero(v/1000))
	case v >= 100 || v == math.Trunc(v):
		return thousands(int64(math.Round(v)))
	}
	return trimZero(v)
}

func rateText(v float64) string { return countText(v) + "/s" }

// millisText writes a number of milliseconds as a duration.
func millisText(v float64) string {
	switch {
	case v < 1000:
		return fmt.Sprintf("%.0f ms", v)
	case v < 100_000:
		return trimZero(v/1000) + " s"
	}
	return short(time.Duration(v) * time.Millisecond)
}

func trimZero(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }
