// Bench-peers measures outbox beside other libraries that publish events from PostgreSQL
// to Kafka: Debezium's outbox event router, River with a worker that produces, and
// Watermill's forwarder. All of them have the same bytes, the same writers, the same
// schedule and the same reader, in turns, in one run.
//
// It reads in this order: scenarios.go lists what is measured and calls the file of each
// scenario; peer.go says what a peer is, and each peer has a file; document.go writes
// docs/benchmarks.md. Speed is a ratio to look at: the program fails when it cannot
// measure, never because something is slow.
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
		fmt.Fprintln(stderr, "bench-peers:", err)
		return exitUsage
	}
	if cfg.render {
		err = renderAgain(cfg.docs)
	} else {
		err = run(ctx, cfg, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench-peers:", err)
		return exitFailed
	}
	return exitDone
}

// run measures, and prints what there is even if it ends early. The document is written
// only if everything was measured.
func run(ctx context.Context, cfg config, stdout, stderr io.Writer) (err error) {
	s, err := services.Connect(ctx, services.Config{
		Postgres: cfg.postgres, Brokers: cfg.brokers, Conns: cfg.workers + 8, Partitions: cfg.partitions,
	})
	if err != nil {
		return err
	}
	b := &bench{Services: s, cfg: cfg, stderr: stderr, report: &report.Report{}, next: 1}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := s.LookAround(ctx, b.report, cfg.partitions); err != nil {
		return err
	}
	if err := b.describe(ctx); err != nil {
		return err
	}
	err = b.measure(ctx)
	if ctx.Err() != nil {
		err = cmp.Or(context.Cause(ctx), err)
	}
	if err == nil && cfg.docs != "" {
		err = b.document().write(cfg.docs)
	}
	return errors.Join(err, b.report.Write(stdout, cfg.json))
}
