package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/processors"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

const (
	idleBegins   = 10 * time.Second // until leaders are chosen, and what was prepared is prepared
	idleMeasured = 20 * time.Second
)

// idleService is a process of a service without events: a relay, a consumer and a worker, with their defaults.
func idleService(ctx context.Context, j job) (u used, err error) {
	db, err := services.NewPool(ctx, j.Postgres, busConns)
	if err != nil {
		return u, err
	}
	defer db.Close()
	events, err := outbox.NewRegistry(orders.Source, outbox.Event(j.EventType, orders.Aggregate, orders.Placed.Key).Topic(j.Topic))
	if err != nil {
		return u, err
	}
	opts := []kgo.Opt{kgo.SeedBrokers(j.Brokers...)}
	cfg := outbox.HandlerConfig{Schema: j.Schema, From: outbox.FromStart}
	handler := outbox.Handle("HANDLED", func(context.Context, pgx.Tx, orders.Placed, outbox.Metadata) error { return nil })
	relay, err := outbox.NewRelay(db, opts, outbox.RelayConfig{Schema: j.Schema})
	if err != nil {
		return u, err
	}
	consumer, err := outbox.NewConsumer(db, opts, events, j.Group, outbox.ConsumerConfig{HandlerConfig: cfg}, handler)
	if err != nil {
		return u, err
	}
	worker, err := outbox.NewWorker(db, events, j.Group+"-worker", outbox.WorkerConfig{HandlerConfig: cfg}, handler)
	if err != nil {
		return u, err
	}
	running, stop := runAside(ctx, func(ctx context.Context) error {
		g, ctx := errgroup.WithContext(ctx)
		for _, run := range []func(context.Context) error{relay.Run, consumer.Run, worker.Run} {
			g.Go(func() error { return run(ctx) })
		}
		return g.Wait()
	})
	wait := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-running.Done():
		}
	}
	wait(idleBegins)
	before := processors.Read()
	wait(idleMeasured)
	u = used{CPU: processors.Read().Since(before).Process, Elapsed: idleMeasured}
	if running.Err() != nil {
		err = context.Cause(running)
	}
	return u, errors.Join(err, stop())
}

// sqlTransactions counts the transactions of the database.
const sqlTransactions = `SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()`

// idle measures what one process, and ten, of a service cost that has no events.
func (b *bench) idle(ctx context.Context) error {
	schema, err := b.NewSchema(ctx, "idle")
	if err != nil {
		return err
	}
	topic, err := b.newConsumedTopic(ctx, "idle", b.cfg.partitions)
	if err != nil {
		return err
	}
	for _, n := range []int{1, 10} {
		j := b.connect(job{Work: "idle", Schema: schema, Topic: topic, EventType: b.EventType(), Group: fmt.Sprintf("bench-%s-idle-%d", b.ID, n)})
		if err := b.idleProcesses(ctx, n, j); err != nil {
			return err
		}
	}
	return nil
}

// idleProcesses measures n processes at the same time. The transactions are counted in the middle of their time.
func (b *bench) idleProcesses(ctx context.Context, n int, j job) error {
	g, running := errgroup.WithContext(ctx)
	cpus := make(stats.Series, n)
	for i := range n {
		g.Go(func() error {
			var u used
			err := spawn(running, j, io.Discard, &u, nil)
			cpus[i] = u.CPU.Seconds() * 1000 / u.Elapsed.Seconds()
			return err
		})
	}
	const edge = idleMeasured / 4
	var transactions [2]int64
	var machine [2]processors.Time
	for i, wait := range []time.Duration{idleBegins + edge, idleMeasured - 2*edge} {
		select {
		case <-time.After(wait):
		case <-running.Done():
			return g.Wait()
		}
		if err := b.DB.QueryRow(ctx, sqlTransactions).Scan(&transactions[i]); err != nil {
			return fmt.Errorf("count transactions: %w", err)
		}
		machine[i] = processors.Read()
	}
	if err := g.Wait(); err != nil {
		return err
	}
	seconds := (idleMeasured - 2*edge).Seconds()
	busy := machine[1].Since(machine[0]).Machine
	name := "idle/" + strconv.Itoa(n)
	b.report.Add(
		report.Measured(name+"-cpu", "ms/s of a process", stats.Series{cpus.Median()}),
		report.Measured(name+"-machine-cpu", "ms/s", stats.Series{busy.Seconds() * 1000 / seconds}),
		report.Measured(name+"-transactions", "1/s", stats.Series{float64(transactions[1]-transactions[0]) / seconds}))
	return nil
}
