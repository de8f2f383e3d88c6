package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
)

// handledLap is a lap whose events are handled in this process.
type handledLap struct {
	*laps.Lap
	events chan handledEvent
}

// handledEvent is an event whose effect has committed.
type handledEvent struct {
	n  int
	at time.Duration
}

// latencies compares a worker with a client of River: the time from the commit of an event
// to that of its effect.
func (s *bus) latencies(ctx context.Context) error {
	return s.race(ctx, race{
		name: fmt.Sprintf("bus/%d", busRate), rate: busRate, measured: s.lapTime(),
		base: side{"river", s.riverLap}, with: side{"worker", s.workerLap},
	})
}

func (s *bus) newHandledLap(rate int, measured time.Duration) *handledLap {
	l := laps.New(s.next, rate, seconds(s.cfg.warm), measured)
	s.next += l.Total()
	return &handledLap{l, make(chan handledEvent, l.Total())}
}

// handled notes that the effect of event n has committed.
func (l *handledLap) handled(n int) { l.events <- handledEvent{n, time.Since(l.Start)} }

// collect waits until all events of the lap are handled.
func (l *handledLap) collect(ctx context.Context, _ *laps.Lap) error {
	for l.Missing > 0 {
		select {
		case e := <-l.events:
			l.Arrive(e.n, e.at)
		case <-ctx.Done():
			return fmt.Errorf("%d events were not handled: %w", l.Missing, context.Cause(ctx))
		}
	}
	return nil
}

// timed runs a lap of transactions that record an event each, and checks it. Woken is
// called after each commit.
func (s *bus) timed(ctx context.Context, w busWay, l *handledLap, woken func()) error {
	if err := s.newEffects(ctx, w.schema); err != nil {
		return err
	}
	return laps.Run(ctx, l.Lap, s.cfg.workers, l.collect, func(ctx context.Context, n int, committed func()) error {
		events := []orders.Placed{busEvent(n, busKeys)}
		if err := pgx.BeginFunc(ctx, s.DB, func(tx pgx.Tx) error { return w.record(ctx, tx, events) }); err != nil {
			return err
		}
		committed()
		woken()
		return nil
	})
}

// checkTimed is checkLap for transactions that have overlapped.
func (s *bus) checkTimed(ctx context.Context, w busWay, l *handledLap) error {
	h := handled{l.First, l.Total()}
	if err := errors.Join(s.checkEffects(ctx, w.schema, h), w.check(ctx, h)); err != nil || !w.ordered {
		return err
	}
	return l.InOrder(func(n int) orders.Placed { return busEvent(n, busKeys) })
}

// riverLap is a lap of one client of River, which learns by a notification that there
// are jobs.
func (s *bus) riverLap(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	l, t := s.newHandledLap(rate, measured), s.river.job.River
	t.Clients, t.Cooldown = 1, time.Millisecond
	clients, err := startRiver(ctx, s.river.schema, t, &riverWorker{
		db: s.DB, inTx: t.InTx, effect: services.InSchema(sqlEffect, s.river.schema), begin: func() {}, handled: l.handled,
	})
	if err != nil {
		return nil, err
	}
	err = s.timed(ctx, s.river, l, func() {})
	if err == nil {
		err = completedAll(ctx, s.DB, s.river.schema)
	}
	if err := errors.Join(err, clients.stop(ctx)); err != nil {
		return nil, err
	}
	return l.Lap, s.checkTimed(ctx, s.river, l)
}
