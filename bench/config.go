package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"

	"github.com/outboxgo/outbox/bench/internal/command"
	"github.com/outboxgo/outbox/bench/internal/services"
)

// name of the program.
const name = "bench"

const usage = `Bench measures outbox against what it is made of, on a real PostgreSQL and a real
Kafka. "make bench" starts both, and passes ARGS on:

    make bench ARGS="-run drain -runs 5"

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them
  OUTBOX_KAFKA_KIND     what Kafka is; anything but kafka is refused

Progress goes to stderr, the table to stdout. A ratio belongs to two things that
were measured in turns, A B A B …; it is the median of the ratios of the pairs.
Spread is (max - min) / median of these ratios, or of the values where there is
no ratio. A target that is missed does not fail the run. The README of this
module says what each scenario compares.

A run makes schemas and a topic of its own and removes them at the end, also
after Ctrl-C. All scenarios together take about an hour on two cores; large
takes 2 of them and 10 GB of disk, backlogs 5 and as much, bad-topics 5, failing 5, takeover 5, bus 10. Give it the machine alone: everything shares its cores.

Exit code: 0 all was measured, 1 something could not be, or exceeded a bound of -gate, 2 wrong usage.

Scenarios:
`

// config is what the flags and the environment say.
type config struct {
	services.Addresses

	which      *regexp.Regexp
	runs       int
	again      int
	events     int
	backlog    int
	rates      []int
	seconds    float64
	warm       float64
	warmUp     float64
	workers    int
	polls      int
	records    int
	partitions int
	handled    int
	retained   int

	large, largeSize int
	backlogs         []int
	longRuns         int
	parked           int
	beside           float64
	newlyBad         float64
	bulk             int

	busEvents, busHot int
	busOpen           float64

	failingEvents  int
	failingSeconds float64

	silence  float64
	silences int
	kills    int

	tenants, tenantRate int

	poisons, poisonEvery int
	outage               float64

	json    string
	profile string
	gate    string
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	which := flags.String("run", "", "measure the scenarios that match this `regexp` only")
	rates := flags.String("rates", "200,1000,3000", "transactions per second of the latency scenario, with commas between them")
	backlogs := flags.String("backlogs", "1000000,4000000,10000000", "events of the backlogs scenario, growing, with commas between them")
	flags.IntVar(&cfg.runs, "runs", 5, "turns of everything that is compared")
	flags.IntVar(&cfg.again, "again", 2, "times that a round is run again from which the host of the machine took more than a fifth of the processors")
	flags.IntVar(&cfg.events, "events", 500_000, "events that a drain drains")
	flags.IntVar(&cfg.backlog, "backlog", 1_000_000, "events of the large backlog; the small one has a tenth")
	flags.Float64Var(&cfg.seconds, "seconds", 20, "seconds measured at each latency point, all turns together")
	flags.Float64Var(&cfg.warm, "warm", 1.5, "seconds at the beginning of each turn at a latency point that do not count")
	flags.Float64Var(&cfg.warmUp, "warm-up", 15, "seconds of single records before latencies are measured, until the broker's JVM has compiled what they need; four times as long for -tenants")
	flags.IntVar(&cfg.workers, "workers", 32, "connections that commit at the same time, for latencies")
	flags.IntVar(&cfg.polls, "polls", 3000, "idle polls to look at, all turns together")
	flags.IntVar(&cfg.records, "records", 1500, "transactions that record one event, all turns together; those with more events are fewer")
	flags.Float64Var(&cfg.silence, "silence", 1, "seconds without an event before each of -silences; a relay looks often for 0.35 s after one")
	flags.IntVar(&cfg.silences, "silences", 100, "events after a silence")
	flags.IntVar(&cfg.kills, "kills", 100, "leaders that are killed; a fifth as many are stopped")
	flags.IntVar(&cfg.tenants, "tenants", 200, "schemas that one process relays for")
	flags.IntVar(&cfg.tenantRate, "tenant-rate", 10, "transactions per second of each of -tenants")
	flags.IntVar(&cfg.poisonEvery, "poison-every", 10_000, "one event among so many is a poison")
	flags.IntVar(&cfg.poisons, "poisons", 2, "poisons among the measured events of each turn")
	flags.Float64Var(&cfg.outage, "outage", 20, "seconds without Kafka; what a relay is configured to is as much shorter as they are than 600")
	flags.IntVar(&cfg.partitions, "partitions", 6, "partitions of the topic")
	flags.IntVar(&cfg.handled, "handled", 100_000, "events that a consumer handles; with a transaction for each, a tenth")
	flags.IntVar(&cfg.retained, "retained", 5_000_000, "old rows that retention begins with")
	flags.IntVar(&cfg.large, "large", 5000, "large events that a drain drains")
	flags.IntVar(&cfg.largeSize, "large-size", 900_000, "bytes of the payload of a large event")
	flags.IntVar(&cfg.longRuns, "long-runs", 1, "turns of large and backlogs, in place of -runs")
	flags.IntVar(&cfg.parked, "parked", 1000, "events that wait for a bad topic before anything is measured beside it")
	flags.Float64Var(&cfg.beside, "beside", 8, "seconds measured in each turn beside a bad topic")
	flags.Float64Var(&cfg.newlyBad, "newly-bad", 60, "seconds measured in each turn in which a relay has to find out what is bad")
	flags.IntVar(&cfg.bulk, "bulk", 1_000_000, "events of a transaction that stays open")
	flags.IntVar(&cfg.busEvents, "bus-events", 50_000, "events that workers, and River, handle in each turn")
	flags.IntVar(&cfg.busHot, "bus-hot", 200_000, "events of a single key that workers handle")
	flags.Float64Var(&cfg.busOpen, "bus-open", 300, "seconds that a transaction stays open beside workers and River; 0 leaves that out")
	flags.IntVar(&cfg.failingEvents, "failing-events", 100_000, "events of the failing scenario, one of a hundred of which fails")
	flags.Float64Var(&cfg.failingSeconds, "failing-seconds", 20, "seconds that a turn of the failing scenario takes at most")
	flags.StringVar(&cfg.json, "json", "", "write the results as JSON lines to this `file`; - means stdout, in place of the table")
	flags.StringVar(&cfg.gate, "gate", "", "fail if ratios exceed the bounds in this `file` in two measurements")
	flags.StringVar(&cfg.profile, "profile", "", "write CPU and allocation profiles of drains, consumers and failing handlers into this `folder`")
	if err := command.ParseFlags(flags, args, stdout, help); err != nil {
		return cfg, err
	}
	cfg.Addresses = services.AddressesFrom(os.Getenv)
	var badRates, badBacklogs, badRun error
	cfg.rates, badRates = command.Numbers("rates", *rates)
	cfg.backlogs, badBacklogs = command.Numbers("backlogs", *backlogs)
	cfg.which, badRun = regexp.Compile(*which)
	return cfg, errors.Join(badRates, badBacklogs, badRun, cfg.validate())
}

func help(w io.Writer) {
	fmt.Fprint(w, usage)
	for _, s := range scenarios {
		fmt.Fprintf(w, "  %-10s %s\n", s.name, s.what)
	}
}

func (c *config) validate() error {
	var refusals command.Refusals
	refuse := refusals.If
	refuse(c.runs < 1 || c.workers < 1 || c.partitions < 1 || c.again < 0, "-runs, -workers and -partitions start above 0, -again at 0")
	refuse(c.events < minEvents || c.backlog < 10*minEvents, fmt.Sprintf("-events starts at %d, -backlog at ten times that", minEvents))
	refuse(c.handled < minEvents, fmt.Sprintf("-handled starts at %d", minEvents))
	refuse(c.retained < minEvents, fmt.Sprintf("-retained starts at %d", minEvents))
	refuse(c.large < 1 || c.longRuns < 1 || c.parked < 1, "-large, -long-runs and -parked start above 0")
	refuse(c.largeSize < minLargeSize || c.largeSize > maxLargeSize, fmt.Sprintf("-large-size goes from %d to %d", minLargeSize, maxLargeSize))
	refuse(c.busEvents < minEvents || c.busHot < minEvents, fmt.Sprintf("-bus-events and -bus-hot start at %d", minEvents))
	refuse(c.busOpen < 0, "-bus-open starts at 0")
	refuse(c.failingEvents < minEvents, fmt.Sprintf("-failing-events starts at %d", minEvents))
	refuse(c.failingSeconds <= 0, "-failing-seconds starts above 0")
	refuse(c.silence <= 0 || c.silences < 1, "-silence and -silences start above 0")
	refuse(c.kills < 1, "-kills starts above 0")
	refuse(c.tenants < 1 || c.tenantRate < 1, "-tenants and -tenant-rate start above 0")
	refuse(c.beside <= 0 || c.newlyBad <= 0 || c.bulk < 1, "-beside, -newly-bad and -bulk start above 0")
	refuse(!slices.IsSorted(c.backlogs) || len(slices.Compact(slices.Clone(c.backlogs))) < len(c.backlogs), "-backlogs must grow")
	refuse(c.seconds <= 0 || c.warm < 0 || c.warmUp < 0, "-seconds starts above 0, -warm and -warm-up at 0")
	refuse(c.polls < c.runs || c.records < c.runs, "-polls and -records start at -runs")
	refuse(c.poisons < 1 || c.poisonEvery < 2, "-poisons starts above 0, -poison-every above 1")
	refuse(c.outage < minOutage, fmt.Sprintf("-outage starts at %d", minOutage))
	refuse(c.which != nil && !slices.ContainsFunc(scenarios, func(s scenario) bool { return c.which.MatchString(s.name) }),
		"-run matches no scenario")
	return errors.Join(refusals.Err(), c.Validate("make bench"))
}
