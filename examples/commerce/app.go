package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/redis/go-redis/v9"
	"github.com/twmb/franz-go/pkg/kgo"
)

// app is what the parts of the program share.
type app struct {
	id     string // of this run: its schema, and part of other names
	source string // of its events
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	events *outbox.Registry
	pages  pages
	hooks  outbox.ConsumerHooks // of both groups
	log    *slog.Logger
}

// maxConns is for requests, four for each relay, and one for each partition.
const maxConns = 32

// open connects to PostgreSQL and Redis.
func open(ctx context.Context, cfg config, stderr io.Writer) (*app, error) {
	a := &app{id: cfg.schema, source: "commerce-api/" + cfg.schema, kafka: []kgo.Opt{kgo.SeedBrokers(cfg.Brokers...)}}
	level := slog.LevelWarn
	if cfg.verbose {
		level = slog.LevelDebug
	}
	a.log = slog.New(outboxhttp.LogTrace(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level})))
	var err error
	if a.events, err = registry(a.source); err != nil {
		return nil, err
	}
	if a.db, err = show.Connect(ctx, cfg.Postgres, a.id, maxConns); err != nil {
		return nil, err
	}
	client, err := connectRedis(ctx, cfg.redis)
	if err != nil {
		a.db.Close()
		return nil, err
	}
	a.pages = pages{client, a.id}
	return a, nil
}

func (a *app) close() {
	_ = a.pages.redis.Close() // nothing waits in it
	a.db.Close()
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

// connectRedis returns a client of the Redis at url, which answers.
func connectRedis(ctx context.Context, url string) (*redis.Client, error) {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("REDIS_URL: %w", err)
	}
	client := redis.NewClient(opts)
	if err := client.Ping(ctx).Err(); err != nil {
		_ = client.Close() // nothing waits in it
		return nil, fmt.Errorf("connect to Redis: %w", err)
	}
	return client, nil
}
