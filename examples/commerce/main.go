// Commerce is a shop with the consumers of its events: one group counts how often
// each product is liked, sold and viewed, another deletes the cached page of a product
// that is sold out. Everything runs in this process: migration, relays, both groups,
// and customers who make sure that there is something to count, some of it twice.
//
// To copy from it, read events.go (what happens, and how it travels), order.go (the
// domain, which knows none of this), statistics.go and cache.go (the consumers),
// groups.go and topics.go (how they are set up), shop.go (how data and events are
// committed together) and app.go (how all of it runs). The rest makes a show of it:
// visits.go has the customers, report.go compares.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const usage = `Commerce runs a shop on PostgreSQL and Kafka, and two groups of consumers:
product-statistics counts likes, sales and views, cache-invalidation deletes the
cached pages of what is sold out. Everything is published twice, and some orders are
announced twice besides; at the end it compares what was counted with what committed.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them
  REDIS_URL             where Redis is, for example redis://localhost:6379/0; without
                        it, a small one runs in this process

"make commerce" starts the first two and sets these. A run makes a schema of its own
and drops it at the end; its topics stay. Ctrl-C closes the shop early and still compares.

Exit code: 0 all is counted right, 1 it is not, or the run failed, 2 wrong usage.

Flags:
`

// The codes that the program exits with.
const (
	exitRight = iota
	exitWrong
	exitUsage
)

type config struct {
	visits          int
	patience        time.Duration
	postgres, redis string
	brokers         []string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(start(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// start is main without the process around it. It returns the exit code.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitRight
	}
	if err != nil {
		fmt.Fprintln(stderr, "commerce:", err)
		return exitUsage
	}
	r, err := run(ctx, cfg, stdout)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "commerce: ended by a signal:", err)
		return exitRight
	}
	if err != nil {
		fmt.Fprintln(stderr, "commerce:", err)
		return exitWrong
	}
	r.print(stdout)
	if !r.right() {
		return exitWrong
	}
	return exitRight
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("commerce", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are printed once, by start
	flags.IntVar(&cfg.visits, "visits", 300, "customers who visit the shop; each views, likes and orders")
	flags.DurationVar(&cfg.patience, "patience", 10*time.Second, "how long to wait for the consumers while they do nothing")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(stdout, usage)
			flags.SetOutput(stdout)
			flags.PrintDefaults()
			return cfg, err
		}
		return cfg, fmt.Errorf("%w; see commerce -h", err)
	}
	cfg.postgres, cfg.redis = os.Getenv("OUTBOX_POSTGRES_URL"), os.Getenv("REDIS_URL")
	brokers := os.Getenv("OUTBOX_KAFKA_BROKERS")
	cfg.brokers = strings.Split(brokers, ",")
	switch {
	case flags.NArg() > 0:
		err = fmt.Errorf("%q is not a flag; see commerce -h", flags.Arg(0))
	case cfg.visits < 1 || cfg.patience <= 0:
		err = errors.New("-visits and -patience start above 0; see commerce -h")
	case cfg.postgres == "" || brokers == "":
		err = errors.New("OUTBOX_POSTGRES_URL and OUTBOX_KAFKA_BROKERS are not set: run it with `make commerce`, or see commerce -h")
	}
	return cfg, err
}
