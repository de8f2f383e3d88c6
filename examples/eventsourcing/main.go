// Eventsourcing is an order service that keeps orders as their events. An event is stored and
// recorded for Kafka in one transaction; a consumer of the events keeps the tables that are
// read. Everything that is claimed is checked: processes of the service are killed meanwhile,
// the read model is damaged and rebuilt, and in the end the program compares.
//
// To copy from it, read order.go (the aggregate, which knows neither database nor Kafka),
// events.go (what can happen to it), store.go (the event store: appends, snapshots, the past),
// commands.go (two who change an order at the same time) and projection.go (the read model, and
// its rebuild while events flow). id.go has ids that sort by time, app.go runs it. The rest
// makes a show of it: service.go has the customers, show.go kills and rebuilds, report.go
// compares.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/outboxgo/outbox/examples/internal/show"
)

const usage = `Eventsourcing runs processes of an order service whose orders are their events. Processes
are killed meanwhile, and the read model is damaged and rebuilt while events flow. At the end
it compares event store, outbox, read model and what the service had acknowledged.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them; not with -worker

"make eventsourcing" starts both and sets these. A run makes a schema of its own and drops it
at the end; its topics stay. Ctrl-C ends the orders early and still compares.

Exit code: 0 all adds up, 1 it does not, or the run failed, 2 wrong usage.

Flags:
`

type config struct {
	show.Services
	duration, patience     time.Duration
	rate, processes, kills int
	worker, verbose        bool
	schema                 string
}

// serviceArgs are the arguments of a process of the service.
func (c config) serviceArgs() []string {
	return []string{"-schema=" + c.schema, fmt.Sprintf("-rate=%d", c.rate), fmt.Sprintf("-worker=%t", c.worker), fmt.Sprintf("-v=%t", c.verbose)}
}

func main() { show.Main("eventsourcing", start) }

func start(ctx context.Context, args []string, stdin io.Reader, stdout, _ io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	if cfg.schema != "" {
		// A signal does not end it: Ctrl-C reaches all processes of a terminal, and those of
		// the service are needed until all is done.
		return show.Played("service", serve(context.WithoutCancel(ctx), cfg, stdin, stdout))
	}
	r, err := run(ctx, cfg, stdout)
	if err != nil {
		return err
	}
	return r.print(stdout)
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("eventsourcing", flag.ContinueOnError)
	flags.DurationVar(&cfg.duration, "for", 8*time.Second, "how long customers place orders")
	flags.IntVar(&cfg.rate, "rate", 25, "orders per second that customers place at each process")
	flags.IntVar(&cfg.processes, "processes", 2, "processes of the service")
	flags.IntVar(&cfg.kills, "kills", 1, "how often one of them is killed")
	flags.BoolVar(&cfg.worker, "worker", false, "let a worker keep the read model, without Kafka")
	flags.DurationVar(&cfg.patience, "patience", 20*time.Second, "how long to wait for the read model while nothing happens")
	flags.BoolVar(&cfg.verbose, "v", false, "print what the service logs")
	flags.StringVar(&cfg.schema, "schema", "", "be a process of the service, with the tables of this schema, until the standard input ends")
	cfg.Services = show.Environment()
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	return cfg, err
}

func (c *config) check() error {
	switch {
	case c.duration <= 0 || c.patience <= 0 || c.rate < 1 || c.rate > maxRate || c.processes < 1:
		return fmt.Errorf("-for, -patience, -rate and -processes start above 0, and -rate ends at %d", maxRate)
	case c.kills < 0:
		return errors.New("-kills starts at 0")
	}
	return c.Require("eventsourcing", !c.worker)
}
