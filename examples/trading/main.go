// Trading is a system whose event bus is PostgreSQL alone: bots decide, workers place orders,
// notify owners, run backtests and obey the kill switch, and no Kafka is needed.
// Everything is on this machine: the exchange, which is late, wrong or silent now and then,
// the bots, and the processes of workers, which are killed meanwhile.
//
// To copy from it, read order.go (the domain: what may become of an order), events.go (streams
// and events), bot.go (a decision and its command, committed together), executor.go and
// exchange.go (external calls outside of transactions, and what a time-out means),
// notification.go, backtest.go and killswitch.go (the other groups) and workers.go (how all of
// them run, without Kafka and with it). The rest makes a show of it: show.go trades and
// kills, report.go compares, and the package simulator has the exchange.
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/examples/internal/show"
)

const usage = `Trading runs bots, an exchange that fails, and processes of workers that place the
orders, on PostgreSQL alone. Processes are killed meanwhile, and the kill switch is tried.
At the end it compares the orders at the exchange with what PostgreSQL says.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres

"make trading" starts one and sets it. A run makes a schema of its own and drops it at the
end. Ctrl-C ends the signals early; what was decided is done and compared.

Exit code: 0 all adds up, 1 it does not, or the run failed, 2 wrong usage.

Flags:
`

type config struct {
	show.Services
	orders, rate, backtests, kills, processes int
	seed                                      uint64
	backtest, lease, patience, worth          time.Duration
	verbose                                   bool
	schema, exchange                          string // of a process of workers
}

// workerArgs are the arguments of a process of workers.
func (c config) workerArgs() []string {
	return []string{"-schema=" + c.schema, "-exchange=" + c.exchange, "-lease=" + c.lease.String(),
		"-backtest=" + c.backtest.String(), "-v=" + strconv.FormatBool(c.verbose)}
}

func main() { show.Main("trading", start) }

func start(ctx context.Context, args []string, stdin io.Reader, stdout, _ io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	if cfg.exchange != "" {
		return show.Played("workers", startWorkers(ctx, cfg, stdin))
	}
	r, err := run(ctx, cfg, stdout)
	if err != nil {
		return err
	}
	return r.print(stdout)
}

// startWorkers is start for a process of workers. A signal does not end it: Ctrl-C reaches
// all processes of a terminal, and the workers are needed until all is done.
func startWorkers(ctx context.Context, cfg config, stdin io.Reader) error {
	ctx = context.WithoutCancel(ctx)
	a, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer a.db.Close()
	return a.work(ctx, stdin)
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("trading", flag.ContinueOnError)
	flags.IntVar(&cfg.orders, "orders", 600, "signals of the bots; each becomes an order")
	flags.IntVar(&cfg.rate, "rate", 60, "signals per second")
	flags.IntVar(&cfg.backtests, "backtests", 6, "backtests to run meanwhile")
	flags.DurationVar(&cfg.backtest, "backtest", 5*time.Second, "how long one of them takes")
	flags.IntVar(&cfg.processes, "processes", 2, "processes with the four groups of workers")
	flags.IntVar(&cfg.kills, "kills", 2, "how often one of them is killed")
	flags.DurationVar(&cfg.worth, "worth", 4*time.Second, "how long a signal is worth an order; after that its command expires")
	flags.DurationVar(&cfg.lease, "lease", 2*time.Second, "after which the events of a killed process are taken over")
	flags.Uint64Var(&cfg.seed, "seed", 0, "repeats what the bots decide and what the exchange does with it; 0 is by chance")
	flags.DurationVar(&cfg.patience, "patience", 20*time.Second, "how long to wait for the workers while nothing happens")
	flags.BoolVar(&cfg.verbose, "v", false, "print what the workers log")
	flags.StringVar(&cfg.schema, "schema", "", "with -exchange: where the tables are")
	flags.StringVar(&cfg.exchange, "exchange", "", "run the workers only, against this exchange, until the standard input ends")
	cfg.Services = show.Environment()
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	for cfg.seed == 0 {
		cfg.seed = uint64(rand.Uint32())
	}
	return cfg, err
}

func (c *config) check() error {
	switch {
	case c.orders < 1 || c.rate < 1 || c.processes < 1 || c.backtest <= 0 || c.lease <= 0 || c.patience <= 0 || c.worth <= 0:
		return errors.New("-orders, -rate, -processes, -backtest, -lease, -worth and -patience start above 0")
	case c.backtests < 0 || c.kills < 0:
		return errors.New("-backtests and -kills start at 0")
	case (c.schema == "") != (c.exchange == ""):
		return errors.New("-schema and -exchange go together")
	}
	return c.Require("trading", false)
}
