// Package schedule calls a function at a fixed rate that does not wait for the calls.
package schedule

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Pace calls do for the numbers from 0 to total-1, each at its time in a fixed schedule of rate
// calls a second, from as many goroutines as there are workers. The schedule does not wait for
// workers: a call that finds no worker is made late.
func Pace(ctx context.Context, rate, total, workers int, do func(context.Context, int) error) error {
	start := time.Now()
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range workers {
		g.Go(func() error {
			timer := time.NewTimer(0)
			defer timer.Stop()
			for {
				n := int(next.Add(1)) - 1
				if n >= total {
					return nil
				}
				timer.Reset(time.Until(start.Add(Offset(n, rate))))
				select {
				case <-timer.C:
				case <-ctx.Done():
					return context.Cause(ctx)
				}
				if err := do(ctx, n); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// Offset is when call n is due.
func Offset(n, rate int) time.Duration { return time.Duration(n) * time.Second / time.Duration(rate) }

// Sleep waits for d. It returns an error if ctx ends first.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
