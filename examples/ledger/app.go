package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// app is what the parts of the program share.
type app struct {
	schema string // of this run, and part of other names
	source string // of its events; in a service it has one name for ever
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	events *outbox.Registry
	log    *slog.Logger

	archive *outboxarchive.Table // for five years
}

// maxConns is for each process.
const maxConns = 12

// open connects to PostgreSQL.
func open(ctx context.Context, cfg config) (*app, error) {
	a := &app{schema: cfg.schema, source: "ledger/" + cfg.schema, kafka: []kgo.Opt{kgo.SeedBrokers(cfg.Brokers...)}, log: show.Log(cfg.verbose)}
	var err error
	if a.db, err = show.Connect(ctx, cfg.Postgres, cfg.schema, maxConns); err != nil {
		return nil, err
	}
	if err := a.wire(cfg.topics); err != nil {
		a.db.Close()
		return nil, err
	}
	return a, nil
}

// wire makes the registry and the archive.
func (a *app) wire(topicOption string) (err error) {
	if a.events, err = registry(a.source, topicOption); err != nil {
		return err
	}
	a.archive, err = outboxarchive.NewTable(a.db, outboxarchive.TableConfig{Schema: a.schema, OutboxSchema: a.schema})
	return err
}

const sqlAccounts = `INSERT INTO balance (account_id) SELECT unnest($1::text[])`

// migrate makes the tables and opens the accounts.
func (a *app) migrate(ctx context.Context, accounts int) error {
	if err := outbox.Migrate(ctx, a.db, outbox.MigrateConfig{Schema: a.schema}); err != nil {
		return err
	}
	if _, err := a.db.Exec(ctx, sqlLedger+";"+sqlFeed+";"+sqlView); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	if err := a.archive.Ensure(ctx); err != nil {
		return err
	}
	names := make([]string, accounts)
	for n := range names {
		names[n] = accountID(n)
	}
	if _, err := a.db.Exec(ctx, sqlAccounts, names); err != nil {
		return fmt.Errorf("open accounts: %w", err)
	}
	return nil
}

func accountID(n int) string { return fmt.Sprintf("account-%d", n+1) }

// makeTopics makes the topics of the registry, once Kafka is there. How many copies there are of each is up to the
// broker here.
func (a *app) makeTopics(ctx context.Context) error {
	return outboxtopics.Run(ctx, a.kafka, a.events, outboxtopics.Config{ReplicationFactor: -1, Logger: a.log})
}

const (
	tellersRole   = "tellers"
	relayRole     = "relay"
	consumersRole = "consumers"
)

// roles are what processes of this program do.
var roles = map[string]func(a *app, ctx context.Context, cfg config) error{
	tellersRole: (*app).tellers, relayRole: (*app).relay, consumersRole: (*app).consumers,
}

// play has this process play its role until its standard input ends.
func play(ctx context.Context, cfg config, stdin io.Reader) error {
	ctx, stop := show.UntilEnd(ctx, stdin)
	defer stop()
	a, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer a.db.Close()
	return roles[cfg.role](a, ctx, cfg)
}

// relay is the process that makes the topics and sends events to Kafka. Others of the same kind would stand by.
func (a *app) relay(ctx context.Context, cfg config) error {
	opts := a.kafka
	if cfg.crashAfter > 0 {
		opts = append(opts, show.CrashAfter(cfg.crashAfter))
	}
	relay, err := outbox.NewRelay(a.db, opts, outbox.RelayConfig{
		Schema: a.schema,
		Logger: a.log,
		Retention: outbox.RetentionConfig{ // a service leaves this at its default, 7 days
			PublishedFor: time.Second,
			Archive:      a.archive.Archive,
		},
	})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.makeTopics(ctx) })
	g.Go(func() error { return relay.Run(ctx) })
	return g.Wait()
}

// consumers is the process with the groups audit-feed and portfolio-view.
func (a *app) consumers(ctx context.Context, _ config) error {
	audit, err := a.consumer(auditGroup, auditHandlers()...)
	if err != nil {
		return err
	}
	portfolio, err := a.consumer(viewGroup, view{a.db}.handlers()...)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return audit.Run(ctx) })
	g.Go(func() error { return portfolio.Run(ctx) })
	return g.Wait()
}

// consumer returns a member of a group. Its instance id lets a process that was killed and comes back have its
// partitions at once, before Kafka has noticed that it was away.
func (a *app) consumer(group string, handlers ...outbox.Handler) (*outbox.Consumer, error) {
	return outbox.NewConsumer(a.db, append(a.kafka, kgo.InstanceID("ledger-1"), kgo.SessionTimeout(6*time.Second)), a.events, group+"."+a.schema, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Schema: a.schema,
			Retry:  outbox.RetryPolicy{RetriesFor: retries},
			Logger: a.log,
			From:   outbox.FromStart, // the counter does not wait until the consumers are ready
		},
		Decode: onlyFrom(a.source),
	}, handlers...)
}

// onlyFrom passes over what other runs of this program send to the same topics.
func onlyFrom(source string) func(*kgo.Record) (*outbox.Message, error) {
	return func(r *kgo.Record) (*outbox.Message, error) {
		m, err := outbox.DecodeCloudEvent(r)
		if err == nil && m.Source != source {
			return nil, nil
		}
		return m, err
	}
}

// atOnce is how many tellers there are. Each of them serves a customer at the same time as the others.
const atOnce = 8

// tellers is the process that posts what customers ask for. A process that was killed and comes
// back asks for everything again, because its progress is not known: the ledger knows the requests.
func (a *app) tellers(ctx context.Context, cfg config) error {
	events, err := outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: a.schema})
	if err != nil {
		return err
	}
	waker, err := outbox.NewWaker(a.db, outbox.WakerConfig{Schema: a.schema, Logger: a.log})
	if err != nil {
		return err
	}
	waking, stop := context.WithCancel(ctx)
	var g, t errgroup.Group
	g.Go(func() error { return waker.Run(waking) })
	for n := range atOnce {
		t.Go(func() error { return a.serve(ctx, ledger{waker.InTx, events}, cfg, n) })
	}
	err = t.Wait()
	stop()
	return errors.Join(err, g.Wait())
}

// serve is what a teller does.
func (a *app) serve(ctx context.Context, l ledger, cfg config, teller int) error {
	random := rand.New(rand.NewPCG(cfg.seed, uint64(teller)))
	for n := teller; n < cfg.deposits; n += atOnce {
		due := time.UnixMilli(cfg.began).Add(time.Duration(n/atOnce*atOnce) * time.Second / time.Duration(cfg.rate))
		if !show.Pause(ctx, time.Until(due)) {
			return nil // the counter closes
		}
		account, amount := accountID(random.IntN(cfg.accounts)), 1+random.Int64N(500_00)
		id, err := l.deposit(ctx, a.request("deposit", n), account, amount)
		if err == nil && n%5 == 0 {
			_, err = l.reverse(ctx, a.request("reversal", n), id, "the cheque bounced")
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("customer %d: %w", n, err)
		}
	}
	return nil
}

// request returns the id of what a customer asks for: the same, however often he does.
func (a *app) request(what string, n int) uuid.UUID {
	return uuid.NewSHA1(uuid.NameSpaceURL, fmt.Appendf(nil, "%s/%s/%d", a.source, what, n))
}
