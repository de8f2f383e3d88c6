package show

import (
	"context"
	"fmt"
	"io"
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

// Right reports whether all of them hold.
func Right(equations []Equation) bool {
	for _, e := range equations {
		if e.Got != e.Want {
			return false
		}
	}
	return true
}

// Print prints equations, and says which are wrong.
func Print(out io.Writer, equations []Equation) {
	for _, e := range equations {
		wrong := map[bool]string{false: "  wrong"}[e.Got == e.Want]
		fmt.Fprintf(out, "  %6d  %-44s = %6d  %s%s\n", e.Got, e.What, e.Want, e.As, wrong)
	}
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
