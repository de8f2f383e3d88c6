// Observability is a service whose metrics Prometheus scrapes and whose traces run
// from an HTTP request through outbox and Kafka to the consumer of its event.
//
// To copy from it, read telemetry.go (the providers of metrics and traces) and
// service.go (how recorder, relay, consumer and HTTP handlers get them); dashboard.json
// and alerts.yml are for Grafana and Prometheus.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxhttp"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
)

const usage = `Observability runs a service that takes orders by HTTP and publishes them.

  POST /orders   {"id": "…", "cents": 100}
  GET  /metrics  for Prometheus

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them

"make observability" starts both and sets these. A run makes a schema of its own and
drops it at the end; its topics stay. Ctrl-C ends it.

Exit code: 0 ended by a signal, 1 the run failed, 2 wrong usage.

Flags:
`

// The codes that the program exits with.
const (
	exitDone = iota
	exitFailed
	exitUsage
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(start(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// start is main without the process around it. It returns the exit code.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitDone
	}
	if err != nil {
		fmt.Fprintln(stderr, "observability:", err)
		return exitUsage
	}
	cfg.log = slog.New(outboxhttp.LogTrace(slog.NewTextHandler(stderr, nil)))
	err = serve(ctx, cfg, stdout)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "observability: ended by a signal:", err)
		return exitDone
	}
	if err != nil {
		fmt.Fprintln(stderr, "observability:", err)
		return exitFailed
	}
	return exitDone
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("observability", flag.ContinueOnError)
	flags.StringVar(&cfg.listen, "listen", "127.0.0.1:8080", "address to serve HTTP on")
	flags.IntVar(&cfg.rate, "rate", 20, "orders that customers place in a second; 0 for none")
	traces := flags.Bool("traces", false, "print spans as JSON")
	if err := show.Parse(flags, args, usage, stdout); err != nil {
		return cfg, err
	}
	cfg.postgres = os.Getenv("OUTBOX_POSTGRES_URL")
	brokers := os.Getenv("OUTBOX_KAFKA_BROKERS")
	cfg.brokers = strings.Split(brokers, ",")
	switch {
	case flags.NArg() > 0:
		return cfg, fmt.Errorf("%q is not a flag; see observability -h", flags.Arg(0))
	case cfg.rate < 0 || cfg.rate > maxRate:
		return cfg, fmt.Errorf("-rate is 0 to %d; see observability -h", maxRate)
	case cfg.postgres == "" || brokers == "":
		return cfg, errors.New("OUTBOX_POSTGRES_URL and OUTBOX_KAFKA_BROKERS are not set: run it with `make observability`, or see observability -h")
	}
	if *traces {
		cfg.spans, err = stdouttrace.New(stdouttrace.WithWriter(stdout))
	}
	return cfg, err
}
