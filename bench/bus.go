package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

const (
	busKeys      = 1000
	busPerTx     = 100 // events, or jobs, that a transaction records
	busWorkers   = 4
	busRate      = 200 // transactions per second, for latencies
	busTxShare   = 5   // of the events; a transaction for each takes its time
	busTuneShare = 5   // of the events
	busOpenShare = 5   // of the time for River, which gets the slower the longer a transaction is open
)

// bus records events and has them handled, by workers or as jobs of River.
type bus struct {
	*bench
	rec      *outbox.Recorder
	inserter *river.Client[pgx.Tx] // works on nothing

	workers, river, riverTx busWay

	next int // number of the next event
}

// busWay is one way to record events and to handle them.
type busWay struct {
	name    string
	schema  string
	share   int // of the events of a lap: one of so many
	job     job // of the process that handles them
	record  func(ctx context.Context, tx pgx.Tx, events []orders.Placed) error
	check   func(ctx context.Context, h handled) error
	ordered bool // of a key, one event after the other is handled
}

// handled is what a lap has handled: n events from number first on.
type handled struct{ first, n int }

func (h handled) last() int { return h.first + h.n - 1 }

// bus compares workers with River: how much they handle, and how soon. Then workers handle the
// events of a single key. The last part leaves much to vacuum: it measures the throughput of
// workers while a transaction stays open.
func (b *bench) bus(ctx context.Context) error {
	s, err := b.newBus(ctx)
	if err != nil {
		return err
	}
	if err := s.tuneRiver(ctx); err != nil {
		return err
	}
	if _, err := s.lap(ctx, s.workers, b.cfg.busEvents/busTuneShare, busKeys); err != nil { // for warming up
		return err
	}
	alone, err := s.interleaved(ctx, []busWay{s.river, s.riverTx, s.workers}, b.cfg.runs)
	if err != nil {
		return err
	}
	s.reportRates(alone)
	if err := s.latencies(ctx); err != nil {
		return err
	}
	if err := s.hot(ctx); err != nil {
		return err
	}
	return s.besideOpen(ctx, alone)
}

func (b *bench) newBus(ctx context.Context) (s *bus, err error) {
	s = &bus{bench: b, next: 1}
	if err := s.newWorkers(ctx); err != nil {
		return nil, err
	}
	return s, s.newRiver(ctx)
}

// newWorkers prepares the product.
func (s *bus) newWorkers(ctx context.Context) (err error) {
	s.workers = busWay{name: "bus/workers", share: 1, job: job{Work: "workers", Group: busGroup}, record: s.recordEvents, check: s.checkDeliveries, ordered: true}
	if s.workers.schema, err = s.NewSchema(ctx, "bus"); err != nil {
		return err
	}
	s.rec, err = s.Recorder(s.workers.schema)
	return err
}

// newRiver prepares the rival, in two ways.
func (s *bus) newRiver(ctx context.Context) (err error) {
	s.river = busWay{name: "bus/river", share: 1, job: job{Work: "river"}, record: s.insertJobs, check: s.checkJobs}
	if s.river.schema, err = s.newRiverSchema(ctx, "river"); err != nil {
		return err
	}
	s.riverTx = s.river
	s.riverTx.name, s.riverTx.share = "bus/river-tx", busTxShare
	s.inserter, err = river.NewClient(riverpgxv5.New(s.DB), &river.Config{Schema: s.river.schema, Logger: riverLog()})
	if err != nil {
		return fmt.Errorf("make River client: %w", err)
	}
	return nil
}

// tuneRiver tries ways to run River, and keeps the best of those that complete jobs in
// batches, and of those that complete each in the transaction of its effect.
func (s *bus) tuneRiver(ctx context.Context) error {
	for _, of := range []struct {
		way  *busWay
		inTx bool
	}{{&s.river, false}, {&s.riverTx, true}} {
		best := 0.0
		for _, t := range riverTunings {
			t.InTx = of.inTx
			w := *of.way
			w.job.River = t
			u, err := s.lap(ctx, w, s.cfg.busEvents/busTuneShare, busKeys)
			if err != nil {
				return err
			}
			s.say("%s: %v: %s jobs/s", w.name, t, report.Number(u.rate()))
			if u.rate() > best {
				best, of.way.job.River = u.rate(), t
			}
		}
		s.report.Note("%s: %v, the best of %d", of.way.name, of.way.job.River, len(riverTunings))
	}
	return nil
}

// interleaved runs laps of all ways in turns.
func (s *bus) interleaved(ctx context.Context, all []busWay, rounds int) (map[string][]used, error) {
	runs := map[string][]used{}
	for round := range rounds {
		for _, w := range all {
			u, err := s.lap(ctx, w, s.cfg.busEvents, busKeys)
			if err != nil {
				return nil, err
			}
			s.say("%d/%d %s: %s events/s, %.1f µs CPU/event", round+1, rounds, w.name, report.Number(u.rate()), u.cpu())
			runs[w.name] = append(runs[w.name], u)
		}
	}
	return runs, nil
}

// reportRates holds the workers against the faster way of River.
func (s *bus) reportRates(runs map[string][]used) {
	rate := func(w busWay) stats.Series { return each(runs[w.name], used.rate) }
	rival := s.river
	if rate(s.riverTx).Median() > rate(s.river).Median() {
		rival = s.riverTx
	}
	s.report.Add(report.Measured(s.river.name, "events/s", rate(s.river)), report.Measured(s.riverTx.name, "events/s", rate(s.riverTx)),
		report.Compared(s.workers.name, "events/s", rate(s.workers), rival.name, rate(rival)).RatioAtLeast(1),
		report.Measured(s.workers.name, "events/s", rate(s.workers)).ValueAtLeast(10_000))
	for _, w := range []busWay{s.workers, s.river, s.riverTx} {
		s.report.Add(report.Measured(w.name+"-cpu", "µs/event", each(runs[w.name], used.cpu)))
	}
}

// besideOpen has each way handle a backlog while a transaction that has recorded stays open, and holds what it
// handles after some time against what it does without. By then that snapshot keeps all rows that it has left behind.
func (s *bus) besideOpen(ctx context.Context, alone map[string][]used) error {
	if s.cfg.busOpen == 0 {
		return nil
	}
	for _, w := range []busWay{s.river, s.workers} {
		before, open := each(alone[w.name], used.rate), s.cfg.busOpen
		if !w.ordered {
			open /= busOpenShare
		}
		u, err := s.openLap(ctx, w, before.Median(), seconds(open))
		if err != nil {
			return err
		}
		r := report.Compared(w.name+"-open", "events/s", stats.Series{u.rate()}, w.name, before)
		if w.ordered {
			r = r.RatioAtLeast(0.8)
		}
		s.report.Add(r)
	}
	return nil
}

// openLap is a lap during an open transaction. The process that handles has been at it for some
// time before it is measured; the events are enough for a rate as without the transaction.
func (s *bus) openLap(ctx context.Context, w busWay, rate float64, open time.Duration) (u used, err error) {
	w.job.After, w.job.Measured = open, s.cfg.busEvents
	h, err := s.fill(ctx, w, int(rate*open.Seconds())+2*s.cfg.busEvents, busKeys)
	if err != nil {
		return u, err
	}
	tx, err := s.DB.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return u, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // what it has written is to vanish
	if err := s.rec.Record(ctx, tx, busEvent(0, busKeys)); err != nil {
		return u, err
	}
	start := time.Now()
	u, err = s.handle(ctx, w, h)
	if err != nil {
		return u, err
	}
	all := time.Since(start)
	s.say("%s: %s events/s after %.0f s, %s in all %.0f s, %.1f µs CPU/event", w.name, report.Number(u.rate()), open.Seconds(),
		report.Number(float64(h.n)/all.Seconds()), all.Seconds(), u.cpu())
	s.report.Note("%s-open: measured %.0f s after the transaction began; %d events in all its %.0f s", w.name, open.Seconds(), h.n, all.Seconds())
	return u, nil
}

// hot has workers handle many events of a single key.
func (s *bus) hot(ctx context.Context) error {
	u, err := s.lap(ctx, s.workers, s.cfg.busHot, 1)
	if err != nil {
		return err
	}
	s.report.Add(report.Measured("bus/hot-key", "events/s", stats.Series{u.rate()}))
	return nil
}
