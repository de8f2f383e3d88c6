package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/outboxgo/outbox/bench/internal/report"
)

// bound is how far a ratio may go before a change is to be looked at. One of AtLeast and AtMost is
// set.
type bound struct {
	Scenario string  `json:"scenario"`
	Against  string  `json:"against"`
	AtLeast  float64 `json:"at_least,omitempty"`
	AtMost   float64 `json:"at_most,omitempty"`
	Usual    float64 `json:"usual"`  // ratio
	Origin   string  `json:"origin"` // of the usual ratio, and why the bound is as far away as it is
}

// errSlow says that a bound was exceeded.
var errSlow = errors.New("exceeds its bound")

// readBounds reads the bounds in a file: a JSON list.
func readBounds(file string) (all []bound, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("-gate: %w", err)
	}
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("-gate: read %s: %w", file, err)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("-gate: %s has no bounds", file)
	}
	for _, b := range all {
		if b.Scenario == "" || b.Against == "" || (b.AtLeast > 0) == (b.AtMost > 0) {
			return nil, fmt.Errorf("-gate: %s: %q wants scenario, against, and at_least or at_most", file, b.Scenario)
		}
	}
	return all, nil
}

// check returns an error, errSlow among others, unless the results are within the bound.
func (b bound) check(results []report.Result) error {
	for _, r := range results {
		if r.Failed != "" && strings.HasPrefix(b.Scenario, r.Scenario) {
			return fmt.Errorf("%s %w: %s", b.Scenario, errSlow, r.Failed)
		}
	}
	i := slices.IndexFunc(results, func(r report.Result) bool { return r.Scenario == b.Scenario && r.Against == b.Against })
	if i < 0 {
		return fmt.Errorf("%s against %s was not measured", b.Scenario, b.Against)
	}
	switch ratio := results[i].Ratio; {
	case b.AtLeast > 0 && !(ratio >= b.AtLeast):
		return fmt.Errorf("%s %w: %.2f times %s, at least %.2f is wanted, %.2f is usual", b.Scenario, errSlow, ratio, b.Against, b.AtLeast, b.Usual)
	case b.AtMost > 0 && !(ratio <= b.AtMost):
		return fmt.Errorf("%s %w: %.2f times %s, at most %.2f is wanted, %.2f is usual", b.Scenario, errSlow, ratio, b.Against, b.AtMost, b.Usual)
	}
	return nil
}

// exceeded returns the bounds that results exceed, and why. An error of another kind ends it.
func exceeded(all []bound, results []report.Result) (over []bound, why, err error) {
	for _, b := range all {
		switch err := b.check(results); {
		case errors.Is(err, errSlow):
			over, why = append(over, b), errors.Join(why, err)
		case err != nil:
			return nil, nil, err
		}
	}
	return over, why, nil
}

// pass measures, and returns an error if a bound is exceeded. A machine may be busy with something else for a
// while, so it measures once more before it says so; then only what was exceeded before counts.
func pass(ctx context.Context, cfg config, stdout, stderr io.Writer) error {
	return passWith(cfg, stderr, func() ([]report.Result, error) { return results(ctx, cfg, stdout, stderr) })
}

func passWith(cfg config, stderr io.Writer, measure func() ([]report.Result, error)) error {
	over, err := readBounds(cfg.gate)
	if err != nil {
		return err
	}
	var why error
	for range 2 {
		if why != nil {
			fmt.Fprintf(stderr, "%v\nmeasuring once more\n", why)
		}
		results, err := measure()
		if err != nil {
			return err
		}
		if over, why, err = exceeded(over, results); err != nil || len(over) == 0 {
			return err
		}
	}
	return why
}
