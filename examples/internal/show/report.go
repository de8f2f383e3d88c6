package show

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"
)

// Equation is a line of a report: two numbers that must be the same.
type Equation struct {
	What string
	Got  int
	As   string
	Want int
}

// Equal is an equation: so many of what, and so many of as.
func Equal(what string, got int, as string, want int) Equation { return Equation{what, got, as, want} }

// None is an equation of what must not be.
func None(what string, got int) Equation { return Equation{what, got, "none", 0} }

// Equations are the lines of a report.
type Equations []Equation

// Right reports whether all of them hold.
func (all Equations) Right() bool {
	return !slices.ContainsFunc(all, func(e Equation) bool { return e.Got != e.Want })
}

// Print prints them, and says which are wrong.
func (all Equations) Print(out io.Writer) {
	for _, e := range all {
		wrong := map[bool]string{false: "  wrong"}[e.Got == e.Want]
		fmt.Fprintf(out, "  %6d  %-44s = %6d  %s%s\n", e.Got, e.What, e.Want, e.As, wrong)
	}
}

// Conclude prints what a run has shown if all of its report is right. The error is [ErrWrong] if it is not.
func Conclude(out io.Writer, right bool, shown string) error {
	if !right {
		fmt.Fprintln(out, "\nThe numbers do not add up.")
		return ErrWrong
	}
	fmt.Fprintln(out, "\n"+shown)
	return nil
}

// Await looks until all is complete, and reports whether it is. It ends early with ctx, and when nothing has changed
// for as long as patience lasts.
func Await(ctx context.Context, patience time.Duration, look func() (progress int, complete bool, err error)) (bool, error) {
	last, since := -1, time.Now()
	for {
		progress, complete, err := look()
		if err != nil || complete {
			return complete, err
		}
		if progress != last {
			last, since = progress, time.Now()
		}
		if time.Since(since) > patience || !Pause(ctx, 20*time.Millisecond) {
			return false, nil
		}
	}
}

// Pause waits, and reports whether that was not cut short.
func Pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
