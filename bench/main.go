// Bench measures outbox against what it is made of: a loop that copies rows from
// PostgreSQL to Kafka, a producer that is called after the commit, a transaction
// that records nothing. All of it runs on the same services, with the same
// bytes, in turns, and what counts are the ratios.
//
// It reads in this order: scenarios.go lists what is measured and calls the file
// of each scenario; child.go runs relay, pipe and producer in processes of their
// own; the packages under internal/ are what the peers of bench/peers share: laps, events,
// services and the report. Speed is a ratio to look at: the program fails when it
// cannot measure, never because something is slow, unless -gate says how slow is too slow.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
)

// The codes that the program exits with.
const (
	exitDone = iota
	exitFailed
	exitUsage
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	if len(os.Args) == 2 && os.Args[1] == childCommand {
		os.Exit(childMain(ctx, os.Stdin, os.Stdout, os.Stderr))
	}
	signal.Ignore(syscall.SIGPIPE) // who reads our output may leave; we still have to clean up
	os.Exit(start(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// start is main without the process around it. It returns the exit code.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitDone
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return exitUsage
	}
	if cfg.gate != "" {
		err = pass(ctx, cfg, stdout, stderr)
	} else {
		err = run(ctx, cfg, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return exitFailed
	}
	return exitDone
}

// run measures, and prints what there is even if it ends early.
func run(ctx context.Context, cfg config, stdout, stderr io.Writer) error {
	_, err := results(ctx, cfg, stdout, stderr)
	return err
}

// results is run that returns what was measured, too.
func results(ctx context.Context, cfg config, stdout, stderr io.Writer) (all []report.Result, err error) {
	s, err := connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	b := &bench{Services: s, cfg: cfg, stderr: stderr, report: &report.Report{}}
	if err := s.LookAround(ctx, b.report, cfg.partitions); err != nil {
		return nil, err
	}
	err = b.measure(ctx)
	if ctx.Err() != nil {
		err = cmp.Or(context.Cause(ctx), err)
	}
	return b.report.Results(), errors.Join(err, b.report.Write(stdout, cfg.json))
}

// connect makes the run's topic.
func connect(ctx context.Context, cfg config) (*services.Services, error) {
	return services.Connect(ctx, services.Config{Postgres: cfg.postgres, Brokers: cfg.brokers, Conns: cfg.workers + 8, Partitions: cfg.partitions})
}
