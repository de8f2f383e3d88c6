package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

// fillPerTx is how many events of a backlog a transaction records.
const fillPerTx = 1000

// drain lets each peer relay a backlog, in turns.
func (b *bench) drain(ctx context.Context) (err error) {
	all, closeAll, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	for _, r := range all {
		if err := b.firstDrain(ctx, r); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	rates, why := map[string]stats.Series{}, map[string]string{}
	for round := range b.cfg.runs {
		for _, r := range all {
			if why[r.name] != "" {
				continue
			}
			n := max(minEvents, b.cfg.events/r.share)
			var rate float64
			err := b.rounds.Run(func() (err error) { rate, err = b.drainOne(ctx, r, n); return err })
			if errors.Is(err, errBehind) {
				why[r.name] = fmt.Sprintf("%d events were not relayed within %g s", n, b.cfg.drainPeriod)
				b.say("%d/%d drain/%s FAILED: %s", round+1, b.cfg.runs, r.name, why[r.name])
				continue
			}
			if errors.Is(err, errOneFetch) {
				why[r.name] = fmt.Sprintf("%v: %d are too few for a rate", err, n)
				continue
			}
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			rates[r.name] = append(rates[r.name], rate)
			b.say("%d/%d drain/%s: %s events/s", round+1, b.cfg.runs, r.name, report.Number(rate))
		}
	}
	b.reportDrain(all, rates, why)
	return nil
}

// warmUpRate and warmUpTime are those of the transactions that each peer relays before anything is measured: until
// their JVMs have compiled what small requests need, broker and Connect take four times as much of the processors.
const (
	warmUpRate = 500
	warmUpTime = 15 * time.Second
)

// warmUp lets each peer relay backlogs and single events in tables that are not measured: a broker and a
// worker of Connect that have just started take several times as long.
func (b *bench) warmUp(ctx context.Context) (err error) {
	b.say("warm-up")
	all, closeAll, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	for range b.cfg.warmUps {
		for _, r := range all {
			if err := b.firstDrain(ctx, r); err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
		}
	}
	for _, r := range all {
		if _, err := b.latencyLap(ctx, r, warmUpRate, 0, warmUpTime); err != nil && !errors.Is(err, errBehind) {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

// warmShare is the share of a backlog that is relayed for warming up: one of so many events.
const warmShare = 10

// firstDrain lets a peer relay an event, and then a small backlog: a connector begins to
// read where it was when it was started first. How quick that is does not matter.
func (b *bench) firstDrain(ctx context.Context, r *racer) error {
	stop, err := b.started(ctx, r)
	if err == nil {
		err = stop()
	}
	if err != nil {
		return err
	}
	_, err = b.drainOne(ctx, r, max(minEvents, b.cfg.events/r.share/warmShare))
	if errors.Is(err, errOneFetch) || errors.Is(err, errBehind) {
		return nil
	}
	return err
}

// drainOne records n events, starts to relay, and returns the rate of arrivals behind the
// first ones. Every event must arrive.
func (b *bench) drainOne(ctx context.Context, r *racer, n int) (rate float64, err error) {
	first := b.next
	b.next += n
	for done := 0; done < n; done += fillPerTx {
		events := make([]orders.Placed, min(fillPerTx, n-done))
		for i := range events {
			events[i] = orders.New(first + done + i)
		}
		if err := r.fill(ctx, events); err != nil {
			return 0, fmt.Errorf("record a backlog: %w", err)
		}
	}
	for _, sql := range []string{`ANALYZE`, `CHECKPOINT`} {
		if _, err := b.DB.Exec(ctx, sql); err != nil {
			return 0, fmt.Errorf("%s: %w", sql, err)
		}
	}
	limited, cancel := context.WithTimeout(ctx, time.Duration(b.cfg.drainPeriod*float64(time.Second)))
	defer cancel()
	stop, err := r.relay(ctx)
	if err != nil {
		return 0, err
	}
	rate, err = b.arriveAll(limited, first, n)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = errBehind
	}
	return rate, errors.Join(err, stop())
}

// arriveAll reads the topic until n events from number first on have arrived, and returns
// the rate: events per second after the first fetch.
func (b *bench) arriveAll(ctx context.Context, first, n int) (rate float64, err error) {
	seen, missing := make([]bool, n), n
	var start, last time.Time
	early := 0 // events of the first fetch
	for missing > 0 {
		fetches := b.reader.Client.PollFetches(ctx)
		at := time.Now()
		if err := fetches.Err(); err != nil {
			return 0, fmt.Errorf("read topic with %d events missing: %w", missing, err)
		}
		before := missing
		for record := range fetches.RecordsAll() {
			number, err := orders.Number(record.Value)
			if err != nil {
				return 0, err
			}
			if i := number - first; i >= 0 && i < n && !seen[i] {
				seen[i] = true
				missing--
			}
		}
		switch arrived := before - missing; {
		case arrived == 0: // of a backlog that was abandoned
		case start.IsZero():
			start, early = at, arrived
		default:
			last = at
		}
	}
	if early == n {
		return 0, errOneFetch
	}
	return float64(n-early) / last.Sub(start).Seconds(), nil
}

// errOneFetch says that there is no rate.
var errOneFetch = errors.New("all events arrived in one fetch")

// reportDrain reports all peers, and holds our rate against theirs.
func (b *bench) reportDrain(all []*racer, rates map[string]stats.Series, why map[string]string) {
	for _, r := range all {
		if why[r.name] != "" {
			b.report.Add(report.Failed("drain/"+r.name, why[r.name]))
			continue
		}
		b.report.Add(report.Measured("drain/"+r.name, "events/s", rates[r.name]))
	}
	for _, r := range all {
		if isOurs(r.name) || why[r.name] != "" || why[ours] != "" {
			continue
		}
		b.report.Add(report.Compared("drain/"+ours, "events/s", rates[ours], "drain/"+r.name, rates[r.name]).RatioAtLeast(r.drain))
	}
}
