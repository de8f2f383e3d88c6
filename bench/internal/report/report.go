// Package report prints what was measured as a table and as JSON lines: values, ratios to what
// they were measured in turns with, spread and targets.
package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/outboxgo/outbox/bench/internal/stats"
)

// Result is one line of the report.
type Result struct {
	Scenario string  `json:"scenario"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Ratio    float64 `json:"ratio,omitempty"` // 0: it is compared with nothing
	Against  string  `json:"against,omitempty"`
	Runs     int     `json:"runs"`
	Spread   float64 `json:"spread"`
	Target   string  `json:"target,omitempty"`
	Met      *bool   `json:"met,omitempty"`
	Failed   string  `json:"failed,omitempty"` // why this was not measured
}

// Measured is a result by itself. It has failed if most turns are 0 and one is not: the clock was too coarse.
func Measured(scenario, unit string, values stats.Series) Result {
	return Result{Scenario: scenario, Value: values.Median(), Unit: unit, Runs: len(values), Spread: values.Spread()}.unlessCoarse(scenario)
}

// Compared is a result that is held against another one, turn by turn. It has failed if the other one is 0 in a turn.
func Compared(scenario, unit string, values stats.Series, against string, base stats.Series) Result {
	r := Measured(scenario, unit, values)
	ratios := values.Over(base)
	r.Against, r.Ratio, r.Spread = against, ratios.Median(), ratios.Spread()
	return r.unlessCoarse(against)
}

// unlessCoarse returns the result, or one that has failed if a number of it was divided by a 0 of what.
func (r Result) unlessCoarse(what string) Result {
	if math.IsInf(r.Ratio, 0) || math.IsInf(r.Spread, 0) || r.Against != "" && math.IsNaN(r.Ratio) {
		return Failed(r.Scenario, what+" is 0 in a turn: it took too little to be measured")
	}
	return r
}

// Failed is a result that there is not.
func Failed(scenario, why string) Result { return Result{Scenario: scenario, Failed: why} }

// RatioAtMost sets a target for the ratio.
func (r Result) RatioAtMost(limit float64) Result {
	return r.target(fmt.Sprintf("ratio ≤ %.2f", limit), r.Ratio <= limit)
}

// RatioAtLeast sets a target for the ratio.
func (r Result) RatioAtLeast(limit float64) Result {
	return r.target(fmt.Sprintf("ratio ≥ %.2f", limit), r.Ratio >= limit)
}

// ValueAtMost sets a target for the value.
func (r Result) ValueAtMost(limit float64) Result {
	return r.target(fmt.Sprintf("value ≤ %g", limit), r.Value <= limit)
}

// ValueAtLeast sets a target for the value.
func (r Result) ValueAtLeast(limit float64) Result {
	return r.target(fmt.Sprintf("value ≥ %g", limit), r.Value >= limit)
}

func (r Result) target(what string, met bool) Result {
	r.Target, r.Met = what, &met
	return r
}

// Report collects notes about the run and results.
type Report struct {
	notes   []string
	results []Result
}

// Note adds a line about the run, formatted as by [fmt.Sprintf].
func (r *Report) Note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

// Add adds results, in the order of the report.
func (r *Report) Add(results ...Result) { r.results = append(r.results, results...) }

// Write prints the table to w and JSON lines to file. A file named - is w, which
// then gets no table.
func (r *Report) Write(w io.Writer, file string) error {
	if file == "-" {
		return r.writeJSON(w)
	}
	if _, err := io.WriteString(w, r.table()); err != nil || file == "" {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(r.writeJSON(f), f.Close())
}

func (r *Report) writeJSON(w io.Writer) error {
	lines := json.NewEncoder(w)
	lines.SetEscapeHTML(false)
	for _, result := range r.results {
		if err := lines.Encode(result); err != nil {
			return fmt.Errorf("encode %s: %w", result.Scenario, err)
		}
	}
	return nil
}
