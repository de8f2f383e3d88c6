package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// result is one line of the report.
type result struct {
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

// measured is a result by itself.
func measured(scenario, unit string, values series) result {
	return result{Scenario: scenario, Value: values.median(), Unit: unit, Runs: len(values), Spread: values.spread()}
}

// compared is a result that is held against another one, turn by turn.
func compared(scenario, unit string, values series, against string, base series) result {
	r := measured(scenario, unit, values)
	ratios := values.over(base)
	r.Against, r.Ratio, r.Spread = against, ratios.median(), ratios.spread()
	return r
}

// failed is a result that there is not.
func failed(scenario, why string) result { return result{Scenario: scenario, Failed: why} }

func (r result) ratioAtMost(limit float64) result {
	return r.target(fmt.Sprintf("ratio ≤ %.2f", limit), r.Ratio <= limit)
}

func (r result) ratioAtLeast(limit float64) result {
	return r.target(fmt.Sprintf("ratio ≥ %.2f", limit), r.Ratio >= limit)
}

func (r result) valueAtMost(limit float64) result {
	return r.target(fmt.Sprintf("value ≤ %g", limit), r.Value <= limit)
}

func (r result) valueAtLeast(limit float64) result {
	return r.target(fmt.Sprintf("value ≥ %g", limit), r.Value >= limit)
}

func (r result) target(what string, met bool) result {
	r.Target, r.Met = what, &met
	return r
}

// report collects notes about the run and results.
type report struct {
	notes   []string
	results []result
}

func (r *report) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

func (r *report) add(results ...result) { r.results = append(r.results, results...) }

// write prints the table to w and JSON lines to file. A file named - is w, which
// then gets no table.
func (r *report) write(w io.Writer, file string) error {
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

func (r *report) writeJSON(w io.Writer) error {
	lines := json.NewEncoder(w)
	lines.SetEscapeHTML(false)
	for _, result := range r.results {
		if err := lines.Encode(result); err != nil {
			return fmt.Errorf("encode %s: %w", result.Scenario, err)
		}
	}
	return nil
}
