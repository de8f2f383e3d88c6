package main

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

const (
	silentMost     = 20.0 // ms from commit to arrival after a silence
	silencesInTurn = 20
	writerRate     = 1000 // transactions per second of those who are measured with wake-ups and without
)

// wakeBench has a relay in one process, and transactions in another: it has a pool of its own, and so its own waker
// and connections.
type wakeBench struct {
	*track
	other *pgxpool.Pool
}

// wake compares latencies from another process with those from the leader's own, and a writer's commits with
// wake-ups with those without.
func (t *track) wake(ctx context.Context) error {
	other, err := services.NewPool(ctx, t.cfg.Postgres, t.cfg.workers+2)
	if err != nil {
		return err
	}
	defer other.Close()
	w := &wakeBench{t, other}
	for _, rate := range []int{200, 1000} {
		if err := t.race(ctx, race{
			name: "wake/" + strconv.Itoa(rate), rate: rate, measured: t.lapTime(), limit: 1.5, tail: 2,
			base: side{"own", t.withRelay}, with: side{"other", w.fromOther},
		}); err != nil {
			return err
		}
	}
	if err := w.afterSilences(ctx); err != nil {
		return err
	}
	return w.writers(ctx)
}

// fromOther is withRelay with transactions of another process.
func (w *wakeBench) fromOther(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	l := w.newLap(rate, measured)
	return l, w.relayedFromOther(ctx, l, w.run, true)
}

// relayedFromOther runs a lap of transactions of another process, which wakes or does not.
func (w *wakeBench) relayedFromOther(ctx context.Context, l *laps.Lap, run func(context.Context, *laps.Lap, laps.Transaction) error, wakes bool) error {
	relay, err := outbox.NewRelay(w.DB, []kgo.Opt{kgo.SeedBrokers(w.cfg.Brokers...)}, outbox.RelayConfig{Schema: w.schema})
	if err != nil {
		return err
	}
	waker, err := outbox.NewWaker(w.other, outbox.WakerConfig{Schema: w.schema})
	if err != nil {
		return err
	}
	wake := waker.Wake
	if !wakes {
		wake = func() {}
	}
	running, stopRelay := runRelay(ctx, relay)
	running, stopWaker := runAside(running, waker.Run)
	err = run(running, l, w.recording(w.other, orders.New, wake))
	return errors.Join(err, stopWaker(), stopRelay())
}

// afterSilences measures events that come one by one, with nothing before them for some time.
func (w *wakeBench) afterSilences(ctx context.Context) error {
	var all stats.Series
	for len(all) < w.cfg.silences {
		var l *laps.Lap
		if err := w.rounds.Run(func() error {
			l = laps.New(w.next, 1, time.Second, time.Duration(min(silencesInTurn, w.cfg.silences-len(all)))*time.Second)
			w.next += l.Total()
			return w.relayedFromOther(ctx, l, w.oneByOne, true)
		}); err != nil {
			return err
		}
		all = append(all, l.Latencies()...)
	}
	for _, p := range []float64{50, 99} {
		r := report.Measured("wake/silence-p"+strconv.FormatFloat(p, 'g', -1, 64), "ms", stats.Series{all.Percentile(p)})
		if p > 50 {
			r = r.ValueAtMost(silentMost)
		}
		w.report.Add(r)
	}
	return nil
}

// oneByOne runs the transactions of a lap with a silence before each of them.
func (w *wakeBench) oneByOne(ctx context.Context, l *laps.Lap, transact laps.Transaction) error {
	silence := seconds(w.cfg.silence)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(l.Total())*(silence+time.Second)+laps.Patience)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	l.Start = time.Now()
	g.Go(func() error { return w.reader.Collect(ctx, l) })
	g.Go(func() error {
		for n := range l.Total() {
			select {
			case <-time.After(silence):
			case <-ctx.Done():
				return ctx.Err()
			}
			l.Begin(n)
			if err := transact(ctx, l.First+n, func() { l.Commit(n) }); err != nil {
				return err
			}
		}
		return nil
	})
	return g.Wait()
}

// writers compares how long transactions take whose process wakes the leader with those that do not.
func (w *wakeBench) writers(ctx context.Context) error {
	var without, with stats.Series
	for round := range w.cfg.runs {
		for _, of := range []struct {
			wakes bool
			to    *stats.Series
		}{{false, &without}, {true, &with}} {
			var l *laps.Lap
			if err := w.rounds.Run(func() error {
				l = w.newLap(writerRate, w.lapTime())
				return w.relayedFromOther(ctx, l, w.run, of.wakes)
			}); err != nil {
				return err
			}
			*of.to = append(*of.to, l.Transactions().Median())
		}
		w.say("%d/%d wake/writer: without %.2f ms, with %.2f ms", round+1, w.cfg.runs, without[round], with[round])
	}
	w.report.Add(report.Measured("wake/writer-without", "ms", without),
		report.Compared("wake/writer", "ms", with, "wake/writer-without", without).RatioAtMost(1.15))
	return nil
}
