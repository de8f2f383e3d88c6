package main

import (
	"bytes"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Metrics in the text format of Prometheus, version 0.0.4, and in OpenMetrics 1.0, which Prometheus prefers and which
// alone has exemplars. The client library of Prometheus would add a dozen modules to every program that imports outbox.

// Content types of the formats.
const (
	textFormat  = "text/plain; version=0.0.4; charset=utf-8"
	openMetrics = "application/openmetrics-text"
	openFormat  = openMetrics + "; version=1.0.0; charset=utf-8"
)

// Types of metrics.
const (
	typeCounter   = "counter"
	typeGauge     = "gauge"
	typeHistogram = "histogram"
)

// labels are names and values of labels, as they are written.
type labels string

// labelsOf takes names and values in turn. Labels without a value are left out, which means the same.
func labelsOf(pairs ...string) labels {
	var b strings.Builder
	for pair := range slices.Chunk(pairs, 2) {
		if pair[1] == "" {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `%s="%s"`, pair[0], labelEscapes.Replace(strings.ToValidUTF8(pair[1], "\uFFFD")))
	}
	return labels(b.String())
}

var labelEscapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// with adds one more label.
func (l labels) with(name, value string) labels {
	more := labelsOf(name, value)
	if l == "" || more == "" {
		return l + more
	}
	return l + "," + more
}

// counters are the series of a counter.
type counters map[labels]float64

// histogram counts values up to bounds.
type histogram struct {
	bounds    []float64
	counts    []uint64 // one more than bounds
	exemplars []string // the last one of each count, as it is written; or empty
	sum       float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1), exemplars: make([]string, len(bounds)+1)}
}

// observe counts a value, and returns its place in counts.
func (h *histogram) observe(v float64) int {
	n, _ := slices.BinarySearch(h.bounds, v) // a value that equals a bound is within it
	h.counts[n]++
	h.sum += v
	return n
}

// observeIn counts a value with an exemplar, if the traceparent is that of a sampled trace.
func (h *histogram) observeIn(v float64, traceParent string, at time.Time) {
	n := h.observe(v)
	if ids := sampledTrace.FindStringSubmatch(traceParent); ids != nil {
		h.exemplars[n] = fmt.Sprintf("{%s} %s %.3f", labelsOf("trace_id", ids[1], "span_id", ids[2]), number(v), float64(at.UnixMilli())/1000)
	}
}

// sampledTrace are the traceparents whose last bit is set.
var sampledTrace = regexp.MustCompile(`^00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]$`)

// exposition is a text of metrics. A family is written as a whole, its series sorted.
type exposition struct {
	bytes.Buffer
	open bool // OpenMetrics
}

func (x *exposition) family(name, typ, help string) {
	if x.open && typ == typeCounter {
		name = strings.TrimSuffix(name, "_total")
	}
	fmt.Fprintf(x, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, typ)
}

func (x *exposition) sample(name string, l labels, v float64, exemplar string) {
	x.WriteString(name)
	if l != "" {
		fmt.Fprintf(x, "{%s}", string(l))
	}
	fmt.Fprintf(x, " %s", number(v))
	if x.open && exemplar != "" {
		fmt.Fprintf(x, " # %s", exemplar)
	}
	x.WriteByte('\n')
}

// end ends the text, and returns its Content-Type.
func (x *exposition) end() string {
	if !x.open {
		return textFormat
	}
	x.WriteString("# EOF\n")
	return openFormat
}

func (x *exposition) values(name, typ, help string, series map[labels]float64) {
	x.family(name, typ, help)
	for _, l := range sortedKeys(series) {
		x.sample(name, l, series[l], "")
	}
}

func (x *exposition) histograms(name, help string, series map[labels]*histogram) {
	x.family(name, typeHistogram, help)
	for _, l := range sortedKeys(series) {
		h, n := series[l], uint64(0)
		for i, c := range h.counts {
			n += c
			bound := math.Inf(1)
			if i < len(h.bounds) {
				bound = h.bounds[i]
			}
			x.sample(name+"_bucket", l.with("le", number(bound)), float64(n), h.exemplars[i])
		}
		x.sample(name+"_sum", l, h.sum, "")
		x.sample(name+"_count", l, float64(n), "")
	}
}

func sortedKeys[V any](series map[labels]V) []labels {
	keys := make([]labels, 0, len(series))
	for l := range series {
		keys = append(keys, l)
	}
	slices.Sort(keys)
	return keys
}

func number(v float64) string {
	if math.IsInf(v, 1) {
		return "+Inf"
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
