package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// app is what the parts of the program share. In a company each service has a database of its own, with an outbox and a
// relay; here they share one, and no service looks into the tables of another.
type app struct {
	schema string // of this run, and part of other names
	source string // of its events; in a service it has one name for ever
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	decode func(*kgo.Record) (*outbox.Message, error)
	events *outbox.Registry
	log    *slog.Logger
}

// maxConns is for each process.
const maxConns = 12

// open connects to PostgreSQL.
func open(ctx context.Context, cfg config) (*app, error) {
	a := &app{schema: cfg.schema, source: "shop/" + cfg.schema, kafka: []kgo.Opt{kgo.SeedBrokers(cfg.Brokers...)}, log: show.Log(cfg.verbose)}
	a.decode = outbox.DecodeCloudEvent
	if cfg.debezium {
		a.decode = outbox.DecodeDebezium // of a relay's records, too
	}
	if err := a.wire(); err != nil {
		return nil, err
	}
	var err error
	a.db, err = show.Connect(ctx, cfg.Postgres, cfg.schema, maxConns)
	return a, err
}

// wire makes the registry.
func (a *app) wire() (err error) {
	a.events, err = registry(a.source)
	return err
}

const sqlStock = `INSERT INTO stock (product_id, initial, available) SELECT product_id, n, n FROM unnest($1::text[], $2::bigint[]) AS s (product_id, n)`

// migrate makes the tables, and fills the shelves. A publication is for Debezium; empty means none.
func (a *app) migrate(ctx context.Context, publication string, stock map[string]int64) error {
	if err := outbox.Migrate(ctx, a.db, outbox.MigrateConfig{Schema: a.schema, AggregateIndex: true, Publication: publication, Logger: a.log}); err != nil {
		return err
	}
	if _, err := a.db.Exec(ctx, sqlOrders+";"+sqlInventory+";"+sqlReward+";"+sqlSales+";"+sqlNotifications); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	var products []string
	var pieces []int64
	for product, n := range stock {
		products, pieces = append(products, product), append(pieces, n)
	}
	if _, err := a.db.Exec(ctx, sqlStock, products, pieces); err != nil {
		return fmt.Errorf("fill the shelves: %w", err)
	}
	return nil
}

// makeTopics makes the topics of the registry, once Kafka is there, and runs until stop is called. How many copies
// there are of each is up to the broker here. In a company it runs beside the relay of each service.
func (a *app) makeTopics() (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error {
		return outboxtopics.Run(ctx, a.kafka, a.events, outboxtopics.Config{ReplicationFactor: -1, Logger: a.log})
	})
	return func() error {
		cancel()
		return g.Wait()
	}
}

const (
	customersRole    = "customers"
	relayRole        = "relay"
	ordersRole       = "orders"
	inventoryRole    = "inventory"
	rewardRole       = "reward"
	notificationRole = "notification"
)

// roles are what processes of this program do.
var roles = map[string]func(a *app, ctx context.Context, cfg config) error{
	customersRole: (*app).customers, relayRole: (*app).relay, ordersRole: (*app).orders,
	inventoryRole: (*app).inventory, rewardRole: (*app).reward, notificationRole: (*app).notification,
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

// idHeader is the header in which consumers of another making look for the id of an event. Ours need it not.
const idHeader = "event-id"

// relay is the process that sends events to Kafka. Other processes of the same kind would stand by.
func (a *app) relay(ctx context.Context, cfg config) error {
	opts := a.kafka
	if cfg.crashAfter > 0 {
		opts = append(opts, show.CrashAfter(cfg.crashAfter))
	}
	relay, err := outbox.NewRelay(a.db, opts, outbox.RelayConfig{Schema: a.schema, IDHeader: idHeader, Logger: a.log})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

// orders is the process of the orders service that hears what the inventory answers.
func (a *app) orders(ctx context.Context, _ config) error {
	s, waker, err := a.recording()
	if err != nil {
		return err
	}
	return a.consume(ctx, waker, ordersGroup, 0, orders{waker.InTx, s}.handlers()...)
}

// oneOrder is MaxPoll of the inventory. Orders that share a transaction would lock their products one order after the
// other, and two transactions might wait for each other.
const oneOrder = 1

func (a *app) inventory(ctx context.Context, _ config) error {
	s, waker, err := a.recording()
	if err != nil {
		return err
	}
	return a.consume(ctx, waker, inventoryGroup, oneOrder, inventory{s}.handlers()...)
}

// reward is the process with the groups reward and sales.
func (a *app) reward(ctx context.Context, _ config) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.consume(ctx, nil, rewardGroup, 0, rewardHandlers()...) })
	g.Go(func() error { return a.consume(ctx, nil, salesGroup, 0, salesHandlers()...) })
	return g.Wait()
}

func (a *app) notification(ctx context.Context, cfg config) error {
	client := &http.Client{Timeout: mailTimeout, Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	return a.consume(ctx, nil, notificationGroup, 0, notifications{client, cfg.mail}.handlers()...)
}

// recording returns what a process needs that records events. The waker has to run.
func (a *app) recording() (*outbox.Recorder, *outbox.Waker, error) {
	events, err := outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: a.schema})
	if err != nil {
		return nil, nil, err
	}
	waker, err := outbox.NewWaker(a.db, outbox.WakerConfig{Schema: a.schema, Logger: a.log})
	return events, waker, err
}

// consume runs a member of a group. A waker is that of a group whose handlers record events: the relay looks when
// they have committed, and not at its next poll.
func (a *app) consume(ctx context.Context, waker *outbox.Waker, group string, maxPoll int, handlers ...outbox.Handler) error {
	c, err := a.consumer(group, maxPoll, waker, handlers...)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.Run(ctx) })
	if waker != nil {
		g.Go(func() error { return waker.Run(ctx) })
	}
	return g.Wait()
}

// consumer returns a member of a group. Its instance id lets a process that was killed and comes back have its
// partitions at once, before Kafka has noticed that it was away.
func (a *app) consumer(group string, maxPoll int, waker *outbox.Waker, handlers ...outbox.Handler) (*outbox.Consumer, error) {
	var hooks outbox.ConsumerHooks
	if waker != nil {
		hooks.Handled = func(outbox.Metadata, string, time.Duration) { waker.Wake() }
	}
	return outbox.NewConsumer(a.db, append(a.kafka, kgo.InstanceID("shop-1"), kgo.SessionTimeout(6*time.Second)), a.events, group+"."+a.schema, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Schema:  a.schema,
			Retry:   outbox.RetryPolicy{MaxRetries: 10},
			Hooks:   hooks,
			Logger:  a.log,
			MaxPoll: maxPoll,
			From:    outbox.FromStart, // the shop does not wait until the consumers are ready
		},
		Decode: a.onlyOurs,
	}, handlers...)
}

// onlyOurs passes over what other runs of this program send to the same topics.
func (a *app) onlyOurs(r *kgo.Record) (*outbox.Message, error) {
	m, err := a.decode(r)
	if err == nil && m.Source != a.source {
		return nil, nil
	}
	return m, err
}

// customers is the process that places orders. A process that was killed and comes back places all
// of them again, because its progress is not known: the service knows their ids.
func (a *app) customers(ctx context.Context, cfg config) error {
	events, waker, err := a.recording()
	if err != nil {
		return err
	}
	waking, stop := context.WithCancel(ctx)
	var g, shoppers errgroup.Group
	g.Go(func() error { return waker.Run(waking) })
	for n := range atOnce {
		shoppers.Go(func() error { return a.shop(ctx, orders{waker.InTx, events}, cfg, n) })
	}
	err = shoppers.Wait()
	stop()
	return errors.Join(err, g.Wait())
}
