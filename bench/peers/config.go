package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/outboxgo/outbox/bench/internal/command"
	"github.com/outboxgo/outbox/bench/internal/services"
)

// name of the program.
const name = "bench-peers"

const usage = `Bench-peers measures outbox beside other libraries that publish events from PostgreSQL
to Kafka, on a real PostgreSQL and a real Kafka. "make bench-peers" starts both, and
passes ARGS on:

    make bench-peers ARGS="-run latency -peers outbox,debezium"

  OUTBOX_POSTGRES_URL   where PostgreSQL is; for Debezium with wal_level=logical
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them
  OUTBOX_KAFKA_KIND     what Kafka is; anything but kafka is refused

Progress goes to stderr, the table to stdout. What is compared was measured in turns;
a ratio is the median of the ratios of the turns, ours by the peer's. Spread is
(max - min) / median of these ratios, or of the values where there is no ratio. A peer
that falls behind the schedule is reported as FAILED and not compared. A target that is
missed does not fail the run.

Exit code: 0 all was measured, 1 something could not be, 2 wrong usage.

Scenarios:
`

// config is what the flags and the environment say.
type config struct {
	services.Addresses

	which       *regexp.Regexp
	peers       []string
	runs        int
	again       int
	rates       []int
	seconds     float64
	warm        float64
	warmUps     int
	workers     int
	partitions  int
	events      int
	drainPeriod float64
	walEvents   int

	json   string
	docs   string
	render bool
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	which := flags.String("run", "", "measure the scenarios that match this `regexp` only")
	only := flags.String("peers", strings.Join(peerNames(), ","), "peers to measure, with commas between them; outbox is always one")
	rates := flags.String("rates", "200,1000,3000", "transactions per second of the latency scenario, with commas between them")
	flags.IntVar(&cfg.runs, "runs", 5, "turns of everything that is compared")
	flags.IntVar(&cfg.again, "again", 2, "times that a round is run again from which the host of the machine took more than a fifth of the processors")
	flags.Float64Var(&cfg.seconds, "seconds", 40, "seconds measured at each latency point, all turns of a peer together")
	flags.Float64Var(&cfg.warm, "warm", 2, "seconds at the beginning of each turn at a latency point that do not count")
	flags.IntVar(&cfg.warmUps, "warm-ups", 3, "small backlogs that each peer relays before anything is measured")
	flags.IntVar(&cfg.workers, "workers", 32, "connections that commit at the same time")
	flags.IntVar(&cfg.partitions, "partitions", 6, "partitions of the topic")
	flags.IntVar(&cfg.events, "events", 200_000, "events of a backlog to drain; peers that take minutes for them get fewer")
	flags.Float64Var(&cfg.drainPeriod, "drain-seconds", 180, "seconds after which a drain is given up")
	flags.IntVar(&cfg.walEvents, "wal-events", 2000, "events whose WAL is measured in each turn")
	flags.StringVar(&cfg.json, "json", "", "write the results as JSON lines to this `file`; - means stdout, in place of the table")
	flags.StringVar(&cfg.docs, "docs", "", "write benchmarks.md, benchmarks.json and plots in images/ into this `folder`")
	flags.BoolVar(&cfg.render, "render", false, "write benchmarks.md and plots again from the benchmarks.json of -docs, and measure nothing")
	if err := command.ParseFlags(flags, args, stdout, help); err != nil {
		return cfg, err
	}
	cfg.Addresses = services.AddressesFrom(os.Getenv)
	var badRates, badRun error
	cfg.rates, badRates = command.Numbers("rates", *rates)
	cfg.which, badRun = regexp.Compile(*which)
	cfg.peers = strings.Split(*only, ",")
	return cfg, errors.Join(badRates, badRun, cfg.validate())
}

func help(w io.Writer) {
	fmt.Fprint(w, usage)
	for _, s := range scenarios {
		fmt.Fprintf(w, "  %-10s %s\n", s.name, s.what)
	}
	fmt.Fprint(w, "\nPeers:\n")
	for _, p := range peers {
		fmt.Fprintf(w, "  %-14s %s\n", p.name, p.what)
	}
}

// minEvents still make a rate.
const minEvents = 1000

func (c *config) validate() error {
	var refusals command.Refusals
	refuse := refusals.If
	for _, name := range c.peers {
		refuse(!slices.Contains(peerNames(), name), fmt.Sprintf("-peers: %q is none of %s", name, strings.Join(peerNames(), ", ")))
	}
	if c.render {
		refuse(c.docs == "", "-render needs -docs")
		return refusals.Err()
	}
	refuse(c.runs < 1 || c.workers < 1 || c.partitions < 1 || c.warmUps < 0 || c.again < 0, "-runs, -workers and -partitions start above 0, -warm-ups and -again at 0")
	refuse(c.seconds <= 0 || c.warm < 0, "-seconds starts above 0, -warm at 0")
	refuse(c.events < minEvents || c.walEvents < minEvents, fmt.Sprintf("-events and -wal-events start at %d", minEvents))
	refuse(c.drainPeriod <= 0, "-drain-seconds starts above 0")
	refuse(c.which != nil && !slices.ContainsFunc(scenarios, func(s scenario) bool { return c.which.MatchString(s.name) }),
		"-run matches no scenario")
	return errors.Join(refusals.Err(), c.Validate("make bench-peers"))
}
