package show

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Equation is a line of a report: two numbers that must be the same.
type Equation struct {
	What string
	Got  int
	As   string
	Want int

	atEnd bool
}

// AtEnd returns an equation that need not hold before all is done.
func (e Equation) AtEnd() Equation {
	e.atEnd = true
	return e
}

// Problem is empty if the equation holds, and says otherwise what that means: a run that has not finished can say
// only of some numbers that they are wrong.
func (e Equation) Problem(finished bool) string {
	switch {
	case e.Got == e.Want:
		return ""
	case e.atEnd && !finished:
		return Unfinished
	}
	return Wrong
}

// What a line of a report says that does not hold.
const (
	Wrong      = "wrong"
	Unfinished = "not finished yet"
)

// Equal is an equation: so many of what, and so many of as.
func Equal(what string, got int, as string, want int) Equation {
	return Equation{What: what, Got: got, As: as, Want: want}
}

// None is an equation of what must not be.
func None(what string, got int) Equation { return Equation{What: what, Got: got, As: "none"} }

// Equations are the lines of a report.
type Equations []Equation

// Right reports whether all of them hold.
func (all Equations) Right() bool {
	return !slices.ContainsFunc(all, func(e Equation) bool { return e.Got != e.Want })
}

// Conclude prints them, and what the run has shown if all of them hold. Otherwise the error is [ErrWrong], or
// [ErrUnfinished] if the run ended too early to say whether a number is wrong.
func (all Equations) Conclude(out io.Writer, finished bool, shown string) error {
	var err error
	for _, e := range all {
		problem := e.Problem(finished)
		switch {
		case problem == Wrong:
			err = ErrWrong
		case problem == Unfinished && err == nil:
			err = ErrUnfinished
		}
		fmt.Fprintf(out, "  %6d  %-44s = %6d  %s\n", e.Got, e.What, e.Want, strings.TrimRight(e.As+"  "+problem, " "))
	}
	switch {
	case errors.Is(err, ErrWrong):
		shown = "The numbers do not add up."
	case err != nil:
		shown = "The run ended before all was done: nothing had changed for a while. A longer -patience waits longer."
	}
	fmt.Fprintln(out, "\n"+shown)
	return err
}

// Nothing prints that a run was too short to show anything. It returns [ErrWrong].
func Nothing(out io.Writer) error {
	fmt.Fprintln(out, "  Nothing happened, so the run shows nothing.")
	return ErrWrong
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
