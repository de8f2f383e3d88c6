package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	riverSettings = "A worker produces. `InsertTx` in the writer's transaction, notifications on; one client with `MaxWorkers` 500 and `FetchCooldown` 1 ms, a pool of 36 " +
		"connections. The worker produces with franz-go, acks of all replicas, no linger, and waits for the acknowledgement. It keeps no order per key."

	riverJobs     = 500 // that a client works on at the same time
	riverCooldown = time.Millisecond
	riverConns    = 36
	riverStop     = 20 * time.Second
)

// riverJob is an event as River's jobs carry it.
type riverJob orders.Placed

// Kind implements [river.JobArgs].
func (riverJob) Kind() string { return "order_placed" }

// riverWorker produces the records of jobs.
type riverWorker struct {
	river.WorkerDefaults[riverJob]

	client *kgo.Client
	topic  string
}

// Work implements [river.Worker].
func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverJob]) error {
	record := &kgo.Record{Topic: w.topic, Key: []byte(job.Args.Order), Value: job.EncodedArgs}
	return w.client.ProduceSync(ctx, record).FirstErr()
}

// riverInstance is River in a schema of its own.
type riverInstance struct {
	b        *bench
	schema   string
	order    string                // SQL
	inserter *river.Client[pgx.Tx] // works on nothing
}

// riverLog keeps quiet about anything but errors, which would explain a figure.
func riverLog() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

func openRiver(ctx context.Context, b *bench) (instance, error) {
	schema, err := b.newSchemaWithOrders(ctx, b.newName("river"))
	if err != nil {
		return nil, err
	}
	m, err := rivermigrate.New(riverpgxv5.New(b.DB), &rivermigrate.Config{Schema: schema, Logger: riverLog()})
	if err != nil {
		return nil, fmt.Errorf("migrate River: %w", err)
	}
	if _, err := m.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, fmt.Errorf("migrate River: %w", err)
	}
	inserter, err := river.NewClient(riverpgxv5.New(b.DB), &river.Config{Schema: schema, Logger: riverLog(), FetchCooldown: riverCooldown})
	if err != nil {
		return nil, fmt.Errorf("make River client: %w", err)
	}
	return &riverInstance{b: b, schema: schema, order: services.InSchema(sqlOrder, schema), inserter: inserter}, nil
}

func (r *riverInstance) write(ctx context.Context, e orders.Placed, committed func()) error {
	err := pgx.BeginFunc(ctx, r.b.DB, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, r.order, e.Customer); err != nil {
			return err
		}
		_, err := r.inserter.InsertTx(ctx, tx, riverJob(e), nil)
		return err
	})
	if err == nil {
		committed()
	}
	return err
}

func (r *riverInstance) fill(ctx context.Context, events []orders.Placed) error {
	jobs := make([]river.InsertManyParams, len(events))
	for i, e := range events {
		jobs[i] = river.InsertManyParams{Args: riverJob(e)}
	}
	return pgx.BeginFunc(ctx, r.b.DB, func(tx pgx.Tx) error {
		_, err := r.inserter.InsertManyFastTx(ctx, tx, jobs)
		return err
	})
}

func (r *riverInstance) relay(ctx context.Context) (stop func() error, err error) {
	db, err := services.NewPool(ctx, r.b.cfg.Postgres, riverConns)
	if err != nil {
		return nil, err
	}
	producer, err := newProducer(r.b.cfg.Brokers)
	if err != nil {
		db.Close()
		return nil, err
	}
	release := func() {
		producer.Close()
		db.Close()
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{client: producer, topic: r.b.Topic})
	client, err := river.NewClient(riverpgxv5.New(db), &river.Config{
		Schema: r.schema, Workers: workers, Logger: riverLog(), FetchCooldown: riverCooldown,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: riverJobs}},
	})
	if err == nil {
		err = client.Start(ctx)
	}
	if err != nil {
		release()
		return nil, fmt.Errorf("start River: %w", err)
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), riverStop)
		defer cancel()
		defer release()
		err := client.Stop(ctx)
		if errors.Is(err, context.DeadlineExceeded) { // jobs of a backlog that was abandoned
			err = client.StopAndCancel(context.WithoutCancel(ctx))
		}
		return err
	}, nil
}

func (r *riverInstance) close(ctx context.Context) error { return r.b.DropSchema(ctx, r.schema) }
