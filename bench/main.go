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
	"io"

	"github.com/outboxgo/outbox/bench/internal/command"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
)

func main() {
	command.Command{Name: name, ChildArg: childArg, Child: childMain, Start: start}.Main()
}

// start reads the arguments.
func start(args []string, stdout, stderr io.Writer) (func(context.Context) error, error) {
	cfg, err := parse(args, stdout)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		if cfg.gate != "" {
			return pass(ctx, cfg, stdout, stderr)
		}
		return run(ctx, cfg, stdout, stderr)
	}, nil
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
	b.rounds.Say, b.rounds.Again = b.say, cfg.again
	if err := s.LookAround(ctx, b.report, cfg.partitions); err != nil {
		return nil, err
	}
	err = b.measure(ctx)
	b.report.Note("%s", &b.rounds)
	if ctx.Err() != nil {
		err = cmp.Or(context.Cause(ctx), err)
	}
	return b.report.Results(), errors.Join(err, b.report.Write(stdout, cfg.json))
}

// connect makes the run's topic.
func connect(ctx context.Context, cfg config) (*services.Services, error) {
	return services.Connect(ctx, services.Config{Addresses: cfg.Addresses, Conns: cfg.workers + 8, Partitions: cfg.partitions})
}
