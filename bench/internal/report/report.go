// Package report prints what was measured as a table and as JSON lines: values, ratios to what
// they were measured in turns with, spread and targets.
package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// Measured is a result by itself.
func Measured(scenario, unit string, values stats.Series) Result {
	return Result{Scenario: scenario, Value: values.Median(), Unit: unit, Runs: len(values), Spread: values.Spread()}
}

// Compared is a result that is held against another one, turn by turn.
func Compared(scenario, unit string, values stats.Series, against string, base stats.Series) Result {
	r := Measured(scenario, unit, values)
	ratios := values.Over(base)
	r.Against, r.Ratio, r.Spread = against, ratios.Median(), ratios.Spread()
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
