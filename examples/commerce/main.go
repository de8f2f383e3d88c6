// Commerce is a shop as an HTTP service, with the consumers of its events: one group counts
// how often each product is liked, sold and viewed, another deletes the cached page of a
// product that is sold out. The service runs in a process of its own, which is killed
// meanwhile, and customers make sure that there is something to count.
//
// To copy from it, read events.go (what happens, and how it travels), order.go (the domain,
// which knows none of this), shop.go (how data and events are committed together), api.go (the
// endpoints), statistics.go and cache.go (the consumers), groups.go and topics.go (how they are
// set up), service.go (how all of it runs, with the operators' page) and telemetry.go (metrics
// for Prometheus). The rest makes a show of it: redis.go starts a Redis, visits.go has the
// customers, show.go kills, report.go compares.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/outboxgo/outbox/examples/internal/show"
)

const usage = `Commerce runs a shop as an HTTP service on PostgreSQL, Kafka and Redis, and two groups of
consumers: product-statistics counts likes, sales and views, cache-invalidation deletes the
cached pages of what is sold out. Customers visit it. The service is killed meanwhile,
everything is published twice, and some orders are announced twice besides; at the end it
compares what was counted with what committed.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them
  REDIS_URL             where Redis is, for example redis://localhost:6379/0; without it
                        a redis-server is started, or a small one in this process
  OPERATOR_PASSWORD     for the operators' page; without it, one is made

"make commerce" starts the first two and sets these. A run makes a schema of its own
and drops it at the end; its topics stay. Ctrl-C closes the shop early and still compares.

Exit code: 0 all is counted right, 1 it is not, or the run failed, 2 wrong usage.

Flags:
`

const maxRate = 1000

type config struct {
	show.Services
	rate, kills        int
	duration, patience time.Duration
	load, verbose      bool
	listen             string
	schema             string // of a process of the service
	twice              bool   // that publishes everything twice
	redis, password    string
}

// serviceArgs are the arguments of a process of the service.
func (c config) serviceArgs() []string {
	return []string{"-schema=" + c.schema, "-listen=" + c.listen, fmt.Sprintf("-twice=%t", c.twice), fmt.Sprintf("-v=%t", c.verbose)}
}

func main() { show.Main("commerce", start) }

func start(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	if cfg.schema != "" {
		// A signal does not end it: Ctrl-C reaches all processes of a terminal, and the
		// service is needed until all is counted.
		return show.Played("service", serve(context.WithoutCancel(ctx), cfg, stdin, stdout, stderr))
	}
	r, err := run(ctx, cfg, stdout)
	if err != nil {
		return err
	}
	return r.print(stdout)
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("commerce", flag.ContinueOnError)
	flags.DurationVar(&cfg.duration, "for", 8*time.Second, "how long the shop is open")
	flags.IntVar(&cfg.rate, "rate", 30, "customers per second; each views, likes and orders")
	flags.IntVar(&cfg.kills, "kills", 1, "how often the service is killed")
	flags.BoolVar(&cfg.load, "load", false, "only measure: nothing is killed, and nothing published twice")
	flags.DurationVar(&cfg.patience, "patience", 20*time.Second, "how long to wait for the consumers while they do nothing")
	flags.StringVar(&cfg.listen, "listen", "127.0.0.1:0", "address of the service; port 0 is any that is free")
	flags.BoolVar(&cfg.verbose, "v", false, "print what the service logs")
	flags.StringVar(&cfg.schema, "schema", "", "be the service, with the tables of this schema, until the standard input ends")
	flags.BoolVar(&cfg.twice, "twice", false, "with -schema: publish everything twice")
	cfg.Services, cfg.redis, cfg.password = show.Environment(), os.Getenv("REDIS_URL"), os.Getenv("OPERATOR_PASSWORD")
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	return cfg, err
}

func (c *config) check() error {
	switch {
	case c.rate < 1 || c.rate > maxRate || c.duration <= 0 || c.patience <= 0:
		return fmt.Errorf("-rate, -for and -patience start above 0, and -rate ends at %d", maxRate)
	case c.kills < 0:
		return errors.New("-kills starts at 0")
	}
	if c.load {
		c.kills = 0
	}
	return c.Require("commerce", true)
}
