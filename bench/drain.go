package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/report"
)

// warmUp produces until the broker's JVM has compiled what it needs: a cold one
// takes four times as long. It does so once.
func (b *bench) warmUp(ctx context.Context) error {
	const most, enough, better = 20, 3, 1.05
	if b.warm {
		return nil
	}
	s, err := b.stock(ctx, b.cfg.backlog/10)
	if err != nil {
		return err
	}
	best, stable := 0.0, 0
	for i := 0; i < most && stable < enough; i++ {
		u, err := b.runChild(ctx, job{Work: "produce"}, s)
		if err != nil {
			return err
		}
		b.say("warm-up: %s records/s", report.Number(u.rate()))
		stable++
		if u.rate() > best*better {
			stable = 0
		}
		best = max(best, u.rate())
	}
	b.warm = true
	return nil
}

// drain compares the relay with the bare pipe, and both with their halves.
func (b *bench) drain(ctx context.Context) error {
	s, err := b.stock(ctx, b.cfg.events)
	if err != nil {
		return err
	}
	if err := b.noteSizes(ctx, s); err != nil {
		return err
	}
	batch, err := b.bestBatch(ctx, s)
	if err != nil {
		return err
	}
	runs, err := b.inTurns(ctx, []contestant{
		{"drain/read", s, job{Work: "read", Batch: batch}},
		{"drain/produce", s, job{Work: "produce"}},
		{"drain/pipe", s, job{Work: "pipe", Batch: batch}},
		{"drain/pipe-prefetch", s, job{Work: "pipe", Batch: batch, Prefetch: true}},
		{"drain/relay", s, job{Work: "relay"}},
	})
	if err != nil {
		return err
	}
	b.reportDrain(runs)
	return nil
}

// bestBatch tries sizes for the bare pipe, so that the relay does not compete
// with a bad one.
func (b *bench) bestBatch(ctx context.Context, s *stock) (size int, err error) {
	best := 0.0
	for _, batch := range []int{1000, 2500, 5000} {
		u, err := b.runChild(ctx, job{Work: "pipe", Batch: batch}, s)
		if err != nil {
			return 0, err
		}
		b.say("bare pipe in batches of %d: %s events/s", batch, report.Number(u.rate()))
		if u.rate() > best {
			best, size = u.rate(), batch
		}
	}
	b.report.Note("bare pipe: batches of %d", size)
	return size, nil
}

// contestant is a job on a stock, with a name.
type contestant struct {
	name  string
	stock *stock
	job   job
}

// inTurns lets the contestants run one after the other, several times.
func (b *bench) inTurns(ctx context.Context, all []contestant) (map[string][]used, error) {
	runs := map[string][]used{}
	for n := range b.cfg.runs {
		for _, c := range all {
			var u used
			if err := b.rounds.Run(func() (err error) { u, err = b.compete(ctx, round{n, b.cfg.runs}, c); return err }); err != nil {
				return nil, err
			}
			runs[c.name] = append(runs[c.name], u)
		}
	}
	return runs, nil
}

// round is one of several.
type round struct{ n, of int }

// String counts from one.
func (r round) String() string { return fmt.Sprintf("%d/%d", r.n+1, r.of) }

// compete lets a contestant run. A relay gets a new name, and so starts before
// the first event.
func (b *bench) compete(ctx context.Context, r round, c contestant) (used, error) {
	if c.job.Work == "relay" {
		c.job.Relay = c.stock.relayName()
	}
	u, err := b.runChild(ctx, c.job, c.stock)
	if err == nil {
		b.say("%s %s: %s events/s, %.1f µs CPU/event, heap %.0f MiB", r, c.name, report.Number(u.rate()), u.cpu(), u.peak())
	}
	return u, err
}

// errLate says that a contestant was not done in time.
var errLate = errors.New("not done in time")

// competeWithin is compete with a limit. It returns errLate when that is over.
func (b *bench) competeWithin(ctx context.Context, limit time.Duration, r round, c contestant) (used, error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	u, err := b.compete(limited, r, c)
	if err == nil || limited.Err() == nil || ctx.Err() != nil {
		return u, err
	}
	b.say("%s %s FAILED: not done within %v", r, c.name, limit)
	b.report.Add(report.Failed(c.name, fmt.Sprintf("not done within %v", limit)))
	return u, errors.Join(errLate, b.EmptyTopic(ctx))
}

func (b *bench) reportDrain(runs map[string][]used) {
	relay, pipe, ahead := runs["drain/relay"], runs["drain/pipe"], runs["drain/pipe-prefetch"]
	rate := func(name string) report.Result { return report.Measured(name, "events/s", each(runs[name], used.rate)) }
	b.report.Add(rate("drain/read"), rate("drain/produce"), rate("drain/pipe"), rate("drain/pipe-prefetch"),
		report.Compared("drain/relay", "events/s", each(relay, used.rate), "drain/pipe", each(pipe, used.rate)).RatioAtLeast(0.8),
		report.Compared("drain/relay", "events/s", each(relay, used.rate), "drain/pipe-prefetch", each(ahead, used.rate)))
	for _, q := range []struct {
		name, unit string
		of         func(used) float64
	}{{"cpu", "µs/event", used.cpu}, {"allocs", "allocs/event", used.allocs}, {"bytes", "bytes/event", used.bytes}} {
		against := fmt.Sprintf("drain/pipe-%s", q.name)
		r := report.Compared("drain/relay-"+q.name, q.unit, each(relay, q.of), against, each(pipe, q.of))
		if q.name == "cpu" {
			r = r.ValueAtMost(6)
		}
		b.report.Add(report.Measured(against, q.unit, each(pipe, q.of)), r)
	}
}

// backlog compares what an event costs in a large backlog and in a small one.
func (b *bench) backlog(ctx context.Context) error {
	small, err := b.stock(ctx, b.cfg.backlog/10)
	if err != nil {
		return err
	}
	large, err := b.stock(ctx, b.cfg.backlog)
	if err != nil {
		return err
	}
	runs, err := b.inTurns(ctx, []contestant{
		{"backlog/small", small, job{Work: "relay"}},
		{"backlog/large", large, job{Work: "relay"}},
	})
	if err != nil {
		return err
	}
	for _, q := range []struct {
		name string
		of   func(used) float64
	}{{"time", used.micros}, {"cpu", used.cpu}} {
		few, many := each(runs["backlog/small"], q.of), each(runs["backlog/large"], q.of)
		against := fmt.Sprintf("backlog/%d-%s", small.events, q.name)
		b.report.Add(report.Measured(against, "µs/event", few),
			report.Compared(fmt.Sprintf("backlog/%d-%s", large.events, q.name), "µs/event", many, against, few).RatioAtMost(1.2))
	}
	return nil
}
