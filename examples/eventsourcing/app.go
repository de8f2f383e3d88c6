package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
)

// app is what the parts of a process share.
type app struct {
	schema string // of this run
	source string // of its events
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	events *outbox.Registry
	log    *slog.Logger
}

// maxConns is for each process.
const maxConns = 16

// open connects to PostgreSQL.
func open(ctx context.Context, cfg config) (*app, error) {
	a := &app{
		schema: cfg.schema, source: "/order-service/" + cfg.schema, kafka: []kgo.Opt{kgo.SeedBrokers(cfg.Brokers...)},
		log: slog.New(slog.DiscardHandler),
	}
	if cfg.verbose {
		lines := slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})
		a.log = slog.New(outboxhttp.LogTrace(lines)) // the trace id of a command is in all lines about its events
	}
	var err error
	if a.events, err = registry(a.source); err != nil {
		return nil, err
	}
	a.db, err = show.Connect(ctx, cfg.Postgres, cfg.schema, maxConns)
	return a, err
}

func (a *app) migrate(ctx context.Context) error {
	if err := outbox.Migrate(ctx, a.db, outbox.MigrateConfig{Schema: a.schema}); err != nil {
		return err
	}
	if _, err := a.db.Exec(ctx, sqlStore+";"+sqlReadModel); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	return nil
}

// makeTopics makes the topic and its dead-letter topic, with as many replicas as the broker wants, once Kafka is there.
func (a *app) makeTopics(ctx context.Context) error {
	return outboxtopics.Run(ctx, a.kafka, a.events, outboxtopics.Config{ReplicationFactor: -1, Logger: a.log})
}

// store returns the event store. Waker wakes who publishes the events.
func (a *app) store(waker *outbox.Waker) (*EventStore, error) {
	rec, err := outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: a.schema})
	return &EventStore{a.db, rec, waker.InTx}, err
}

func (a *app) projection() projection { return projection{a.db, a.log} }

// runner runs until its context ends.
type runner func(ctx context.Context) error

// background returns the parts that run alongside the commands, and the waker for the commands: a
// relay, the consumer of the projection and what makes their topics, or a worker that has the events
// from PostgreSQL. The handlers are the same.
func (a *app) background(withWorker bool) (runners []runner, waker *outbox.Waker, err error) {
	if withWorker {
		w, err := outbox.NewWorker(a.db, a.events, a.group(), outbox.WorkerConfig{
			HandlerConfig: a.handling(), PollInterval: 200 * time.Millisecond, Lease: 2 * time.Second,
		}, a.projection().handlers()...)
		if err != nil {
			return nil, nil, err
		}
		return []runner{w.Run}, w.Waker(), nil
	}
	relay, err := outbox.NewRelay(a.db, a.kafka, outbox.RelayConfig{Schema: a.schema, Logger: a.log})
	if err != nil {
		return nil, nil, err
	}
	c, err := a.consumer()
	if err != nil {
		return nil, nil, err
	}
	return []runner{a.makeTopics, relay.Run, c.Run}, relay.Waker(), nil
}

// consumer returns the consumer of the projection. Kafka gives the partitions of a killed
// process to others after the session timeout, 6 s here so that a run is short.
func (a *app) consumer() (*outbox.Consumer, error) {
	return outbox.NewConsumer(a.db, append(a.kafka, kgo.SessionTimeout(6*time.Second)), a.events, a.group(), outbox.ConsumerConfig{
		HandlerConfig: a.handling(),
		Decode:        a.onlyOurs,
	}, a.projection().handlers()...)
}

// group returns the group of the projection. In a service it keeps its name.
func (a *app) group() string { return "order-projection." + a.schema }

func (a *app) handling() outbox.HandlerConfig {
	return outbox.HandlerConfig{Schema: a.schema, From: outbox.FromStart, Logger: a.log}
}

// onlyOurs passes over what other runs have sent to the topic.
func (a *app) onlyOurs(r *kgo.Record) (*outbox.Message, error) {
	m, err := outbox.DecodeCloudEvent(r)
	if err == nil && m.Source != a.source {
		return nil, nil // of another run
	}
	return m, err
}

// run starts the processes of the service, kills some of them, and compares.
func run(ctx context.Context, cfg config, out io.Writer) (*report, error) {
	cfg.schema = "eventsourcing_" + uuid.NewString()[:8]
	a, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer a.db.Close()
	printHeader(out, cfg)
	defer show.DropSchema(a.db, a.schema, out)
	if err := a.migrate(ctx); err != nil {
		return nil, err
	}
	return newScene(a, cfg).run(ctx)
}
