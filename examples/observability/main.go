// Observability is a service whose metrics Prometheus scrapes and whose traces run
// from an HTTP request through outbox and Kafka to the consumer of its event.
//
// To copy from it, read telemetry.go (the providers of metrics and traces) and
// service.go (how recorder, relay, consumer and HTTP handlers get them). The dashboard
// and the alerts are in deploy/outbox-monitoring.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"

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

func main() { show.Main("observability", start) }

func start(ctx context.Context, args []string, _ io.Reader, stdout, stderr io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	cfg.log = slog.New(outboxhttp.LogTrace(slog.NewTextHandler(stderr, nil)))
	return serve(ctx, cfg, stdout)
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("observability", flag.ContinueOnError)
	flags.StringVar(&cfg.listen, "listen", "127.0.0.1:8080", "address to serve HTTP on")
	flags.IntVar(&cfg.rate, "rate", 20, "orders that customers place in a second; 0 for none")
	traces := flags.Bool("traces", false, "print spans as JSON")
	cfg.Services = show.Environment()
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	if err == nil && *traces {
		cfg.spans, err = stdouttrace.New(stdouttrace.WithWriter(stdout))
	}
	return cfg, err
}

func (c *config) check() error {
	if c.rate < 0 || c.rate > maxRate {
		return fmt.Errorf("-rate is 0 to %d", maxRate)
	}
	return c.Require("observability", true)
}
