package laps

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/bench/internal/processors"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"golang.org/x/sync/errgroup"
)

// Patience is how long events may take that do not arrive.
const Patience = 30 * time.Second

// EnoughOfRate is the share of its rate that a lap achieves whose schedule was kept.
const EnoughOfRate = 0.95

// Transaction is how a transaction's event gets to Kafka. It returns when the
// transaction has committed, and says so to committed at once.
type Transaction func(ctx context.Context, n int, committed func()) error

// Run runs a lap with so many workers, which commit at the same time, and waits until its events have arrived, which
// collect finds out.
func Run(ctx context.Context, l *Lap, workers int, collect func(context.Context, *Lap) error, transact Transaction) error {
	ctx, cancel := context.WithTimeout(ctx, schedule.Offset(l.Total(), l.Rate)+Patience)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	before := processors.Read()
	l.Start = time.Now()
	g.Go(func() error { return collect(ctx, l) })
	g.Go(func() error {
		return schedule.Pace(ctx, l.Rate, l.Total(), workers, func(ctx context.Context, n int) error {
			l.Begin(n)
			return transact(ctx, l.First+n, func() { l.Commit(n) })
		})
	})
	err := g.Wait()
	l.processors = processors.Read().Since(before)
	return err
}
