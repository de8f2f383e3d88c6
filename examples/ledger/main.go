// Ledger is a bank's ledger: deposits and reversals in PostgreSQL, and their events in Kafka. The
// events are for a feed that external auditors read, for a read model, and for other consumers. The
// transaction, its journal entries, the balance and the event commit together or not at all.
// Tellers, the relay and the consumers are processes of their own, and each of them is killed in
// the middle of its work.
//
// To copy from it, read transaction.go (the domain: what balances, and what a reversal is),
// events.go (what the ledger tells, and by which topics and keys), service.go (one transaction for
// all of it, optimistic locking, and the retry of the whole method), audit.go (a consumer that
// writes each transaction once and verifies the order), auditor.go (who checks it) and view.go (a
// read model). The rest makes a show of it: app.go has the processes and the archive, show.go kills
// them, kafka.go and report.go compare.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/examples/internal/show"
)

const usage = `Ledger posts deposits and reversals, and has a feed for auditors written from their events.
Tellers, relay and consumers are processes, and each of them is killed. At the end it compares
the ledger with its events, the feed, the read model and the archive.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them

"make ledger" starts both and sets these. A run makes a schema of its own and drops it at the
end; its topics stay. Ctrl-C closes the counter early; what was posted is still compared.

Exit code: 0 all adds up, 1 it does not, or the run failed, 2 wrong usage.

Flags:
`

type config struct {
	show.Services
	deposits, rate, accounts int
	topics                   string
	kill, verbose            bool
	seed                     uint64
	patience                 time.Duration

	// Of a process of this program.
	role, schema string
	began        int64 // when the counter opened, in Unix milliseconds
	crashAfter   int64
}

// roleArgs are the arguments of a process of this program.
func (c config) roleArgs(role string, more ...string) []string {
	return append([]string{
		"-role=" + role, "-schema=" + c.schema, "-topics=" + c.topics, "-began=" + strconv.FormatInt(c.began, 10),
		"-deposits=" + strconv.Itoa(c.deposits), "-rate=" + strconv.Itoa(c.rate), "-accounts=" + strconv.Itoa(c.accounts),
		"-seed=" + strconv.FormatUint(c.seed, 10), "-v=" + strconv.FormatBool(c.verbose),
	}, more...)
}

func main() { show.Main("ledger", start) }

func start(ctx context.Context, args []string, stdin io.Reader, stdout, _ io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	if cfg.role != "" {
		return show.Played(cfg.role, play(ctx, cfg, stdin))
	}
	r, err := run(ctx, cfg, stdout)
	if err != nil {
		return err
	}
	return r.print(stdout)
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("ledger", flag.ContinueOnError)
	flags.IntVar(&cfg.deposits, "deposits", 600, "deposits that customers ask for; a fifth of them is reversed")
	flags.IntVar(&cfg.rate, "rate", 120, "deposits per second")
	flags.IntVar(&cfg.accounts, "accounts", 10, "accounts of customers")
	flags.StringVar(&cfg.topics, "topics", "one", "one topic for all events, or two: one for each type")
	flags.BoolVar(&cfg.kill, "kill", true, "kill the tellers, the relay and the consumers once each")
	flags.Uint64Var(&cfg.seed, "seed", 0, "repeats what customers ask for; 0 is by chance")
	flags.DurationVar(&cfg.patience, "patience", 45*time.Second, "how long to wait for the events while nothing happens")
	flags.BoolVar(&cfg.verbose, "v", false, "print what relay and consumers log")
	flags.StringVar(&cfg.role, "role", "", "run only the tellers, the relay or the consumers, until the standard input ends")
	flags.StringVar(&cfg.schema, "schema", "", "with -role: where the tables are")
	flags.Int64Var(&cfg.began, "began", 0, "with -role: when the counter opened")
	flags.Int64Var(&cfg.crashAfter, "crash-after", 0, "with -role=relay: kill the process when Kafka has so many records")
	cfg.Services = show.Environment()
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	for cfg.seed == 0 {
		cfg.seed = uint64(rand.Uint32())
	}
	return cfg, err
}

func (c *config) check() error {
	_, isTopics := topicOptions[c.topics]
	switch {
	case c.deposits < 1 || c.rate < 1 || c.accounts < 1 || c.patience <= 0:
		return errors.New("-deposits, -rate, -accounts and -patience start above 0")
	case !isTopics:
		return fmt.Errorf("-topics is %q, and can be one or two", c.topics)
	case c.role != "" && roles[c.role] == nil:
		return fmt.Errorf("-role is %q, and can be %s, %s or %s", c.role, tellersRole, relayRole, consumersRole)
	case (c.role == "") != (c.schema == ""):
		return errors.New("-role and -schema go together")
	}
	return c.Require("ledger", true)
}
