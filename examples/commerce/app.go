package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/redis/go-redis/v9"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// app is what the parts of the program share.
type app struct {
	id     string // of this run: its schema, and part of other names
	source string // of its events
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	events *outbox.Registry
	pages  pages
	tally  *tally
}

// run opens the shop, lets customers in, waits for the consumers, and compares.
func run(ctx context.Context, cfg config, out io.Writer) (*report, error) {
	a := &app{id: "commerce_" + uuid.NewString()[:8], kafka: []kgo.Opt{kgo.SeedBrokers(cfg.brokers...)}, tally: newTally()}
	a.source = "commerce-api/" + a.id
	var err error
	if a.events, err = registry(a.source); err != nil {
		return nil, err
	}
	if a.db, err = connect(ctx, cfg.postgres, a.id); err != nil {
		return nil, err
	}
	defer a.db.Close()
	client, closeRedis, err := openRedis(ctx, cfg.redis)
	if err != nil {
		return nil, err
	}
	defer closeRedis()
	a.pages = pages{client, a.id}

	printHeader(out, a.id, cfg.brokers, client.Options().Addr)
	defer a.dropSchema(out)
	return a.run(ctx, cfg)
}

// run runs everything in this process until the last customer has left and all
// events are handled. Ctrl-C closes the shop, and nothing else: what was sold is
// counted and compared.
func (a *app) run(ctx context.Context, cfg config) (*report, error) {
	if err := a.migrate(ctx); err != nil {
		return nil, err
	}
	relays, err := a.relays("default", "again")
	if err != nil {
		return nil, err
	}
	groups, err := a.groups(ctx)
	if err != nil {
		return nil, err
	}
	shop, err := a.openShop(ctx, relays)
	if err != nil {
		return nil, err
	}

	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g, life := errgroup.WithContext(life)
	for _, relay := range relays {
		g.Go(func() error { return relay.Run(life) })
	}
	for _, group := range groups {
		g.Go(func() error { return group.Run(life) })
	}
	var r *report
	g.Go(func() error {
		defer stop() // relays and groups finish what is in flight, and return
		err := shop.welcome(ctx, life, cfg.visits)
		if err == nil {
			r, err = a.await(life, len(relays), cfg.patience)
		}
		return err
	})
	err = g.Wait()
	return r, err
}

func (a *app) migrate(ctx context.Context) error {
	if err := outbox.Migrate(ctx, a.db, outbox.MigrateConfig{Schema: a.id}); err != nil {
		return err
	}
	if _, err := a.db.Exec(ctx, sqlShop+";"+sqlStatistics); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	return nil
}

// relays returns a relay for each name. A service has one, which runs in every
// process. Here a second one publishes everything once more, as a crash might, so
// that there is something to skip.
func (a *app) relays(names ...string) (relays []*outbox.Relay, err error) {
	for _, name := range names {
		relay, err := outbox.NewRelay(a.db, a.kafka, outbox.RelayConfig{Schema: a.id, Name: name})
		if err != nil {
			return nil, err
		}
		relays = append(relays, relay)
	}
	return relays, nil
}

func (a *app) openShop(ctx context.Context, relays []*outbox.Relay) (*shop, error) {
	rec, err := outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: a.id})
	if err != nil {
		return nil, err
	}
	s := &shop{db: a.db, rec: rec, wake: func() {
		for _, relay := range relays {
			relay.Waker().Wake()
		}
	}}
	return s, s.open(ctx, a.pages)
}

// connect returns a pool whose connections look for tables in a schema.
func connect(ctx context.Context, url, schema string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err // pgx leaves the password out of it
	}
	cfg.ConnConfig.RuntimeParams["search_path"] = schema
	cfg.MaxConns = 32 // customers, four for each relay, one for each partition
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := db.Ping(ctx); err != nil {
		db.Close()
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return db, nil
}

// dropSchema removes the tables of this run, also after an error or Ctrl-C.
func (a *app) dropSchema(out io.Writer) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := a.db.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{a.id}.Sanitize()+" CASCADE")
	if err != nil {
		fmt.Fprintf(out, "schema %s was not dropped: %v\n", a.id, err)
	}
}

// openRedis connects to the Redis at url, or to one that it starts in this process.
func openRedis(ctx context.Context, url string) (client *redis.Client, closeAll func(), err error) {
	stop := func() {}
	if url == "" {
		server, err := miniredis.Run()
		if err != nil {
			return nil, nil, fmt.Errorf("start Redis: %w", err)
		}
		url, stop = "redis://"+server.Addr(), server.Close
	}
	opts, err := redis.ParseURL(url)
	if err != nil {
		stop()
		return nil, nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	client = redis.NewClient(opts)
	closeAll = func() {
		_ = client.Close() // nothing waits in it
		stop()
	}
	if err := client.Ping(ctx).Err(); err != nil {
		closeAll()
		return nil, nil, fmt.Errorf("connect to Redis: %w", err)
	}
	return client, closeAll, nil
}
