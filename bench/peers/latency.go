package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

// latency lets all peers take turns at each rate.
func (b *bench) latency(ctx context.Context) error {
	for _, rate := range b.cfg.rates {
		if err := b.latencyAt(ctx, rate); err != nil {
			return fmt.Errorf("%d transactions/s: %w", rate, err)
		}
	}
	return nil
}

func (b *bench) latencyAt(ctx context.Context, rate int) (err error) {
	all, closeAll, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	runs, why := map[string][]*laps.Lap{}, map[string]string{}
	for round := range b.cfg.runs + 1 { // the first one is for warming up
		for _, r := range all {
			if why[r.name] != "" {
				continue
			}
			var l *laps.Lap
			err := b.rounds.Run(func() (err error) {
				l, err = b.latencyLap(ctx, r, rate, seconds(b.cfg.warm), seconds(b.cfg.seconds/float64(b.cfg.runs)))
				return err
			})
			if errors.Is(err, errBehind) {
				why[r.name] = fmt.Sprintf("fell behind %d transactions/s: events were missing %v after the schedule", rate, laps.Patience)
				b.say("%d/%d latency/%d %s FAILED: %s", round, b.cfg.runs, rate, r.name, why[r.name])
				continue
			}
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			if round > 0 {
				runs[r.name] = append(runs[r.name], l)
			}
			b.say("%d/%d latency/%d %s: p50 %.2f p99 %.2f ms, arrivals %.0f/s, %.0f µs CPU/tx", round, b.cfg.runs, rate, r.name,
				l.Latencies().Median(), l.Latencies().Percentile(99), arrivals(l), l.MachineCPU())
		}
	}
	for _, r := range all {
		if why[r.name] == "" {
			why[r.name] = behind(rate, runs[r.name])
		}
	}
	b.reportLatency(rate, all, runs, why)
	return nil
}

// latencyLap runs one turn.
func (b *bench) latencyLap(ctx context.Context, r *racer, rate int, warm, measured time.Duration) (l *laps.Lap, err error) {
	stop, err := b.started(ctx, r)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	return b.lap(ctx, r, rate, warm, measured)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// arrivals returns the rate at which the measured events have arrived.
func arrivals(l *laps.Lap) float64 {
	measured := l.Arrived[l.Warm:]
	begin := time.Duration(l.Warm) * time.Second / time.Duration(l.Rate)
	due := time.Duration(len(measured)) * time.Second / time.Duration(l.Rate)
	return float64(len(measured)) / max(due, slices.Max(measured)-begin).Seconds()
}

// behind returns why a peer has not kept the schedule in half of its laps, or "". What was
// measured then is the latency at another rate.
func behind(rate int, all []*laps.Lap) string {
	for _, of := range []struct {
		what string
		rate float64
	}{{"committed", each(all, (*laps.Lap).Achieved).Median()}, {"relayed", each(all, arrivals).Median()}} {
		if of.rate < laps.EnoughOfRate*float64(rate) {
			return fmt.Sprintf("fell behind: %s %.0f of %d transactions/s", of.what, of.rate, rate)
		}
	}
	return ""
}

// reportLatency reports all peers, and compares ours with those that kept the schedule.
func (b *bench) reportLatency(rate int, all []*racer, runs map[string][]*laps.Lap, why map[string]string) {
	type quantity struct {
		name, unit string
		of         func(*laps.Lap) float64
		limited    bool
	}
	percentile := func(p float64) func(*laps.Lap) float64 {
		return func(l *laps.Lap) float64 { return l.Latencies().Percentile(p) }
	}
	quantities := []quantity{
		{"p50", "ms", percentile(50), true}, {"p99", "ms", percentile(99), true}, {"cpu", "µs/tx", (*laps.Lap).MachineCPU, false},
	}
	name := func(peer, what string) string { return fmt.Sprintf("latency/%d/%s-%s", rate, peer, what) }
	for _, r := range all {
		if why[r.name] != "" {
			b.report.Add(report.Failed(fmt.Sprintf("latency/%d/%s", rate, r.name), why[r.name]))
			continue
		}
		for _, q := range quantities {
			b.report.Add(report.Measured(name(r.name, q.name), q.unit, each(runs[r.name], q.of)))
		}
	}
	for _, r := range all {
		if isOurs(r.name) || why[r.name] != "" || why[ours] != "" {
			continue
		}
		for _, q := range quantities {
			against := name(r.name, q.name)
			result := report.Compared(name(ours, q.name), q.unit, each(runs[ours], q.of), against, each(runs[r.name], q.of))
			if q.limited {
				result = result.RatioAtMost(1)
			}
			b.report.Add(result)
		}
	}
}

// isOurs reports whether a peer is our library, wherever its relay runs.
func isOurs(name string) bool { return name == ours || strings.HasPrefix(name, ours+"-") }

// each reads one quantity from all laps.
func each(all []*laps.Lap, quantity func(*laps.Lap) float64) stats.Series {
	values := make(stats.Series, len(all))
	for i, l := range all {
		values[i] = quantity(l)
	}
	return values
}
