// Package command is what the two benchmarks have in common as commands: their process,
// exit codes and flags.
package command

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

// The codes that a program exits with.
const (
	ExitDone = iota
	ExitFailed
	ExitUsage
)

// Command is a program that measures, and that starts itself again for work that needs a
// process of its own. All fields are required.
type Command struct {
	Name string // in front of errors

	ChildArg string // the hidden argument that makes the program a child
	Child    func(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) (exitCode int)

	// Start reads args and returns what is to be run. [flag.ErrHelp] ends the program well.
	Start func(args []string, stdout, stderr io.Writer) (run func(context.Context) error, err error)
}

// Main is the program's main. It does not return.
func (c Command) Main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	if len(os.Args) == 2 && os.Args[1] == c.ChildArg {
		os.Exit(c.Child(ctx, os.Stdin, os.Stdout, os.Stderr))
	}
	signal.Ignore(syscall.SIGPIPE) // who reads our output may leave; we still have to clean up
	os.Exit(c.run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is Main without the process around it. It returns the exit code.
func (c Command) run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	run, err := c.Start(args, stdout, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return ExitDone
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v; see %[1]s -h\n", c.Name, err)
		return ExitUsage
	}
	if err := run(ctx); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", c.Name, err)
		return ExitFailed
	}
	return ExitDone
}

// ParseFlags parses arguments, all of which must be flags. For -h it writes help and the
// flags to stdout, and returns [flag.ErrHelp].
func ParseFlags(flags *flag.FlagSet, args []string, stdout io.Writer, help func(io.Writer)) error {
	flags.SetOutput(io.Discard) // errors are printed once, by Main
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		help(stdout)
		fmt.Fprint(stdout, "\nFlags:\n")
		flags.SetOutput(stdout)
		flags.PrintDefaults()
		return err
	case err != nil:
		return err
	case flags.NArg() > 0:
		return fmt.Errorf("%q is not a flag", flags.Arg(0))
	}
	return nil
}

// Numbers reads numbers above 0 with commas between them.
func Numbers(flag, list string) (numbers []int, err error) {
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("-%s: %q is not a number above 0", flag, text)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// Refusals collects what is wrong with a configuration.
type Refusals struct{ errs []error }

// If adds a reason, if what it says is so.
func (r *Refusals) If(bad bool, why string) {
	if bad {
		r.errs = append(r.errs, errors.New(why))
	}
}

// Err is nil if there is no reason.
func (r *Refusals) Err() error { return errors.Join(r.errs...) }
