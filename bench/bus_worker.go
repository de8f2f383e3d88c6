package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
	"golang.org/x/sync/errgroup"
)

// busGroup is the consumer group of all laps: its cursor goes on where the lap before ended.
const busGroup = "bench-bus"

// busConns are enough for the handlers of a worker, and for what it does besides.
const busConns = 10

// newWorker makes a worker whose handler has an effect for each event.
func newWorker(db *pgxpool.Pool, j job, begin func(orders.Placed, outbox.Metadata), handled func(outbox.Metadata)) (*outbox.Worker, error) {
	events, err := outbox.NewRegistry(orders.Source, outbox.Event(j.EventType, orders.Aggregate, orders.Placed.Key))
	if err != nil {
		return nil, err
	}
	effect := services.InSchema(sqlEffect, j.Schema)
	return outbox.NewWorker(db, events, j.Group, outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Schema: j.Schema,
			Hooks:  outbox.ConsumerHooks{Handled: func(m outbox.Metadata, _ string, _ time.Duration) { handled(m) }},
			From:   outbox.FromStart,
		},
	}, outbox.Handle("EFFECT", func(ctx context.Context, tx pgx.Tx, e orders.Placed, m outbox.Metadata) error {
		begin(e, m)
		_, err := tx.Exec(ctx, effect, e.Order, e.N)
		return err
	}))
}

// workBus lets workers, each with its own pool, handle all events.
func workBus(ctx context.Context, j job) (u used, err error) {
	late, done := newLateMeter(j), newCountdown(j.Events)
	run := func(ctx context.Context) error {
		g, ctx := errgroup.WithContext(ctx)
		for range busWorkers {
			g.Go(func() error {
				db, err := services.NewPool(ctx, j.Postgres, busConns)
				if err != nil {
					return err
				}
				defer db.Close()
				w, err := newWorker(db, j, func(orders.Placed, outbox.Metadata) { late.called() }, func(outbox.Metadata) { late.handled(); done.done(1) })
				if err != nil {
					return err
				}
				return w.Run(ctx)
			})
		}
		return g.Wait()
	}
	running, stop := runAside(ctx, run)
	select {
	case <-done.all:
		u, err = late.finish()
	case <-running.Done():
		err = context.Cause(running)
	}
	return u, errors.Join(err, stop())
}

// workerLap is a lap of one worker, which is woken after each commit.
func (s *bus) workerLap(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	l, j := s.newHandledLap(rate, measured), s.workers.job
	j.Schema, j.EventType = s.workers.schema, s.EventType()
	var numbers sync.Map // of the events whose transactions have not committed yet, by event id
	worker, err := newWorker(s.DB, j, func(e orders.Placed, m outbox.Metadata) { numbers.Store(m.ID, e.N) }, func(m outbox.Metadata) {
		if n, ok := numbers.LoadAndDelete(m.ID); ok {
			l.handled(n.(int))
		}
	})
	if err != nil {
		return nil, err
	}
	running, stop := runAside(ctx, worker.Run)
	err = s.timed(running, s.workers, l, worker.Waker().Wake)
	if err := errors.Join(err, stop()); err != nil {
		return nil, err
	}
	return l.Lap, s.checkTimed(ctx, s.workers, l)
}
