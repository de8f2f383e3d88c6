// Bench-peers compares outbox with other libraries that publish events from PostgreSQL to Kafka:
// Debezium's outbox event router, River with a worker that produces, and Watermill's forwarder. All
// of them have the same bytes, the same writers, the same schedule and the same reader, in turns,
// in one run.
//
// It reads in this order: scenarios.go lists what is measured and calls the file of each scenario;
// peer.go says what a peer is, and each peer has a file; document.go writes docs/benchmarks.md.
// Speed is a ratio to look at: the program fails when it cannot measure, never because something is
// slow.
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
		if cfg.render {
			return renderAgain(cfg.docs)
		}
		return run(ctx, cfg, stdout, stderr)
	}, nil
}

// run measures, and prints what there is even if it ends early. The document is written
// only if everything was measured.
func run(ctx context.Context, cfg config, stdout, stderr io.Writer) (err error) {
	s, err := services.Connect(ctx, services.Config{Addresses: cfg.Addresses, Conns: cfg.workers + 8, Partitions: cfg.partitions})
	if err != nil {
		return err
	}
	b := &bench{Services: s, cfg: cfg, stderr: stderr, report: &report.Report{}, next: 1}
	b.rounds.Say, b.rounds.Again = b.say, cfg.again
	defer func() { err = errors.Join(err, b.close()) }()
	if err := s.LookAround(ctx, b.report, cfg.partitions); err != nil {
		return err
	}
	if err := b.describe(ctx); err != nil {
		return err
	}
	err = b.measure(ctx)
	b.report.Note("%s", &b.rounds)
	if ctx.Err() != nil {
		err = cmp.Or(context.Cause(ctx), err)
	}
	if err == nil && cfg.docs != "" {
		err = b.document().write(cfg.docs)
	}
	return errors.Join(err, b.report.Write(stdout, cfg.json))
}
