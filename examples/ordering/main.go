// Ordering is a shop of four services: orders, inventory, reward and notification. Each has its own tables, and
// learns from the others by Kafka alone. An order, and what it asks of the three others, are one transaction. When
// the stock is short the order is cancelled, and what was done for it is undone: a saga. Customers, the relay and the
// services are processes of their own, and most of them are killed in the middle of their work.
//
// To copy from it, read order.go (the domain), orders.go (createOrder, cancelOrder, completeOrder: one transaction
// each, and the compensation), inventory.go (a step of the saga: reserve, answer, release), reward.go (a step whose
// compensation may come in any order, and a read model), notification.go (one mail for each state, which no
// transaction can contain), events.go (what they say to each other) and history.go (all events of an order). The rest
// makes a show of it: app.go has the processes, customer.go what customers want, mail.go is the mail provider,
// show.go kills, debezium.go waits for one that takes the relay's place, report.go compares.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/examples/internal/show"
)

const usage = `Ordering takes orders, and has services for inventory, reward and notification do their part by their
events. Stock is short, so some orders are cancelled, and what was done for them is undone. Customers, relay
and services are processes, and are killed. At the end it compares what each of them knows.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them; not with -order

"make ordering" starts both and sets these. A run makes a schema of its own and drops it at the
end; its topics stay. Ctrl-C closes the shop early; what was ordered is still compared.

  ordering -order ID -schema SCHEMA   prints all events of an order: of a run that goes on, or had -keep

Exit code: 0 all adds up, 1 it does not, or the run failed, 2 wrong usage.

Flags:
`

// What the program computes in advance has to end.
const (
	maxOrders   = 1_000_000
	maxProducts = 1_000
	maxStock    = 1_000
)

type config struct {
	show.Services
	orders, rate, products, stock int
	kill, keep, debezium, verbose bool
	seed                          uint64
	patience                      time.Duration

	// To look at an order.
	orderText, schema string
	order             uuid.UUID

	// Of a process of this program.
	role       string
	mail       string // where the mail provider is
	began      int64  // when the shop opened, in Unix milliseconds
	crashAfter int64
}

// roleArgs are the arguments of a process of this program.
func (c config) roleArgs(role string, more ...string) []string {
	return append([]string{
		"-role=" + role, "-schema=" + c.schema, "-mail=" + c.mail, "-began=" + strconv.FormatInt(c.began, 10),
		"-orders=" + strconv.Itoa(c.orders), "-rate=" + strconv.Itoa(c.rate), "-products=" + strconv.Itoa(c.products),
		"-seed=" + strconv.FormatUint(c.seed, 10), "-debezium=" + strconv.FormatBool(c.debezium), "-v=" + strconv.FormatBool(c.verbose),
	}, more...)
}

func main() { show.Main("ordering", start) }

func start(ctx context.Context, args []string, stdin io.Reader, stdout, _ io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	switch {
	case cfg.role != "":
		return show.Played(cfg.role, play(ctx, cfg, stdin))
	case cfg.order != uuid.Nil:
		return look(ctx, cfg, stdout)
	}
	r, err := run(ctx, cfg, stdout)
	if err != nil {
		return err
	}
	return r.print(stdout)
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("ordering", flag.ContinueOnError)
	flags.IntVar(&cfg.orders, "orders", 300, "orders that customers place; a sixth of them change their minds")
	flags.IntVar(&cfg.rate, "rate", 60, "orders per second")
	flags.IntVar(&cfg.products, "products", 8, "products of the shop")
	flags.IntVar(&cfg.stock, "stock", 60, "percent of what customers ask for that is in stock")
	flags.BoolVar(&cfg.kill, "kill", true, "kill the customers' process, the relay, and the services orders, inventory and notification once each")
	flags.BoolVar(&cfg.debezium, "debezium", false, "have Debezium send the events, in place of the relay: see the README")
	flags.BoolVar(&cfg.keep, "keep", false, "do not drop the schema at the end, for -order")
	flags.Uint64Var(&cfg.seed, "seed", 0, "repeats what customers ask for; 0 is by chance")
	flags.DurationVar(&cfg.patience, "patience", 45*time.Second, "how long to wait for the services while nothing happens")
	flags.BoolVar(&cfg.verbose, "v", false, "print what relay and consumers log")
	flags.StringVar(&cfg.orderText, "order", "", "print the events of an order")
	flags.StringVar(&cfg.schema, "schema", "", "with -order or -role: where the tables are")
	flags.StringVar(&cfg.role, "role", "", "run only the customers, the relay or a service, until the standard input ends")
	flags.StringVar(&cfg.mail, "mail", "", "with -role: where the mail provider is")
	flags.Int64Var(&cfg.began, "began", 0, "with -role: when the shop opened")
	flags.Int64Var(&cfg.crashAfter, "crash-after", 0, "with -role=relay: kill the process when Kafka has so many records")
	cfg.Services = show.Environment()
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	for cfg.seed == 0 {
		cfg.seed = uint64(rand.Uint32())
	}
	return cfg, err
}

// check also reads the id of the order.
func (c *config) check() (err error) {
	if c.orderText != "" {
		if c.order, err = uuid.Parse(c.orderText); err != nil || c.order == uuid.Nil {
			return fmt.Errorf("-order is %q, and has to be the UUID of an order", c.orderText)
		}
	}
	switch {
	case c.orders < 1 || c.orders > maxOrders || c.rate < 1 || c.products < 1 || c.products > maxProducts || c.patience <= 0:
		return fmt.Errorf("-orders, -rate, -products and -patience start above 0, -orders ends at %d and -products at %d", maxOrders, maxProducts)
	case c.stock < 0 || c.stock > maxStock:
		return fmt.Errorf("-stock starts at 0 and ends at %d", maxStock)
	case c.role != "" && roles[c.role] == nil:
		return fmt.Errorf("-role is %q, and can be one of %s", c.role, strings.Join(slices.Sorted(maps.Keys(roles)), ", "))
	case c.role != "" && c.orderText != "":
		return errors.New("-role and -order exclude each other")
	case (c.role != "" || c.orderText != "") != (c.schema != ""):
		return errors.New("-schema goes together with -role or -order")
	}
	return c.Require("ordering", c.orderText == "")
}
