// Demo is a small shop that publishes its events with outbox. Customers place orders from several
// goroutines; each order and its events are one transaction. A relay sends the events to Kafka, a
// reader prints what arrives, and in the end the demo compares what arrived with what the database
// says has committed. Then it lets an event, a handler and Kafka fail, and shows where that is
// seen.
//
// It reads in the order of its files: events.go is what happens in the shop, shop.go records it,
// reader.go receives it, summary.go compares what was recorded with what arrived; failures.go is
// what goes wrong, and page.go the page of the operators.
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
)

const usage = `Demo runs a small shop on PostgreSQL and Kafka: customers place orders, every
order records one to three events in its own transaction, and a relay publishes
them. At the end it says whether each committed event arrived, in order, and shows
what becomes of an event that Kafka rejects, of a handler that fails, and of an
outage of Kafka.

  OUTBOX_POSTGRES_URL   where PostgreSQL is, for example postgres://localhost/postgres
  OUTBOX_KAFKA_BROKERS  where Kafka is, host:port with commas between them
  OUTBOX_KAFKA_KIND     what Kafka is, kafka or kfake; only shown

"make demo" starts both and sets these. A run makes a schema of its own and drops
it at the end; its topics stay. Ctrl-C closes the shop early and still compares. While it
runs, the operators' page is open to this machine, at the address that it prints;
"make demo ARGS=-keep" keeps it open until Ctrl-C, with what failed on it.

Exit code: 0 all is right, 1 an event is missing, was never committed or is out
of order, or the run failed, 2 wrong usage.

Flags:
`

type config struct {
	show.Services
	orders, shoppers, rate int
	patience               time.Duration
	quiet, keep, calm      bool
	kind                   string
}

func main() { show.Main("demo", start) }

func start(ctx context.Context, args []string, _ io.Reader, stdout, _ io.Writer) error {
	cfg, err := parse(args, stdout)
	if err != nil {
		return err
	}
	s, err := run(ctx, cfg, newConsole(stdout, cfg.quiet))
	if err == nil && !s.right() {
		err = show.ErrWrong
	}
	return err
}

// parse reads the flags and the environment.
func parse(args []string, stdout io.Writer) (cfg config, err error) {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.IntVar(&cfg.orders, "orders", 5000, "orders to place; the first stays in an open transaction until the shop closes")
	flags.IntVar(&cfg.shoppers, "shoppers", 16, "customers who order at the same time")
	flags.IntVar(&cfg.rate, "rate", 500, "orders per second; 0 means as fast as possible, and no latency is measured")
	flags.DurationVar(&cfg.patience, "patience", 10*time.Second, "how long to wait for committed events while none arrives")
	flags.BoolVar(&cfg.quiet, "quiet", false, "print the summary only")
	flags.BoolVar(&cfg.calm, "calm", false, "leave out what goes wrong at the end; so does -quiet")
	flags.BoolVar(&cfg.keep, "keep", false, "stay open for a look at the operators' page at the end, until Ctrl-C")
	cfg.Services, cfg.kind = show.Environment(), os.Getenv("OUTBOX_KAFKA_KIND")
	err = show.Parse(flags, args, usage, stdout, cfg.check)
	return cfg, err
}

func (c *config) check() error {
	c.calm = c.calm || c.quiet
	if c.orders < 1 || c.shoppers < 1 || c.rate < 0 || c.patience <= 0 {
		return errors.New("-orders, -shoppers and -patience start above 0, -rate at 0")
	}
	return c.Require("demo", true)
}

// run opens the shop, lets everybody order, waits for the events, and compares.
func run(ctx context.Context, cfg config, out *console) (*summary, error) {
	runID := "demo_" + uuid.NewString()[:8]
	// One for each shopper, three for the relay, one for the transaction that
	// stays open, one to look around, and two for the operators' page. When the shop is
	// closed, a worker needs nine.
	db, err := show.Connect(ctx, cfg.Postgres, runID, max(cfg.shoppers, 9)+7)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	page, closePage, err := openPage(ctx, db, runID)
	if err != nil {
		return nil, err
	}
	defer closePage()
	out.header(cfg, runID, page)

	events, err := registry()
	if err != nil {
		return nil, err
	}
	defer dismantle(db, runID, out)
	if err := outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: runID}); err != nil {
		return nil, err
	}
	reader, err := newReader(cfg.Brokers, events, runID)
	if err != nil {
		return nil, err
	}
	defer reader.close()
	kafka := new(cable)
	relay, err := outbox.NewRelay(db, kafka.opts(cfg.Brokers), outbox.RelayConfig{Schema: runID})
	if err != nil {
		return nil, err
	}
	shop, err := newShop(ctx, db, events, runID, relay.Waker().Wake)
	if err != nil {
		return nil, err
	}
	return (&demo{db, kafka, events, reader, relay, shop, page}).run(ctx, cfg, out)
}

// demo is what one run of the program uses.
type demo struct {
	db     *pgxpool.Pool
	kafka  *cable
	events *outbox.Registry
	reader *reader
	relay  *outbox.Relay
	shop   *shop
	page   string // address of the operators' page
}

// run sells, compares what has arrived, and then shows failures.
func (d *demo) run(ctx context.Context, cfg config, out *console) (*summary, error) {
	// Ctrl-C closes the shop and nothing else: what was sold is delivered and compared. A relay
	// that fails ends everything.
	life, fail := context.WithCancelCause(context.WithoutCancel(ctx))
	defer fail(nil)
	selling, closeShop := context.WithCancel(life)
	context.AfterFunc(ctx, closeShop)
	defer closeShop()

	stopRelay := background(life, fail, func(ctx context.Context) error {
		if err := d.reader.stand(ctx, out); err != nil {
			return err
		}
		return d.relay.Run(ctx)
	})
	defer stopRelay()
	stopReading := background(life, fail, func(ctx context.Context) error {
		d.reader.read(ctx, out)
		return nil
	})
	defer stopReading()

	if err := d.shop.sell(selling, cfg, out); err != nil {
		return nil, err
	}
	if err := d.reader.awaitStands(ctx, life, cfg.patience); err != nil {
		return nil, err
	}
	if err := await(life, cfg.patience, d.shop, d.reader); err != nil {
		return nil, err
	}
	stopRelay() // from here on nothing is sent, so the ends of the topics stay where they are
	if err := d.reader.finish(life, cfg.patience); err != nil {
		return nil, err
	}
	stopReading()
	s, err := sumUp(life, d.shop, d.reader)
	if err != nil {
		return nil, err
	}
	s.print(out)
	if ctx.Err() != nil || cfg.calm && !cfg.keep {
		return s, nil
	}
	show, err := newFailureShow(d.db, cfg.Brokers, d.kafka, d.events, d.shop, d.reader, out)
	if err != nil {
		return nil, err
	}
	defer background(life, fail, show.relay.Run)()
	defer background(life, fail, show.worker.Run)()
	return s, finish(ctx, life, cfg, show, d.page)
}

// finish shows what goes wrong, and keeps the page open if that is wanted. Ctrl-C ends it.
func finish(ctx, life context.Context, cfg config, show *failureShow, page string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(life, cancel)()
	if !cfg.calm {
		if err := show.run(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
	case cfg.keep:
		show.out.println("\nThe operators' page stays at " + page + " until Ctrl-C. So does the schema, for the command line:\n" +
			"outbox status --schema " + show.shop.runID)
		<-ctx.Done()
	default:
		show.out.println("\nThe operators' page showed it too. -keep keeps it open until Ctrl-C: make demo ARGS=-keep")
	}
	return context.Cause(life)
}

// dismantle drops the run's schema, also after an error or Ctrl-C.
func dismantle(db *pgxpool.Pool, schema string, out *console) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := db.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
	if err != nil {
		out.note("schema %s was not dropped: %v", schema, err)
	}
}

// background runs f until stop is called, which waits for it. An error of f
// ends everybody's life.
func background(life context.Context, fail context.CancelCauseFunc, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(life)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f(ctx); err != nil {
			fail(err)
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// await waits until each committed event has arrived, or none has arrived for
// as long as patience lasts. What is still missing then is reported.
func await(life context.Context, patience time.Duration, s *shop, r *reader) error {
	if life.Err() != nil {
		return context.Cause(life)
	}
	journal, err := s.journal(life)
	if err != nil {
		return err
	}
	missing, progress := len(journal)+1, time.Now()
	for missing > 0 && time.Since(progress) < patience {
		if now := r.missing(journal); now < missing {
			missing, progress = now, time.Now()
			continue
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-life.Done():
			return context.Cause(life)
		}
	}
	return nil
}
