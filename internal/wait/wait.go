// Package wait holds what a goroutine does while it has nothing to do: it sleeps,
// waits for a wake request, or backs off before another try.
package wait

import (
	"context"
	"math/rand/v2"
	"time"
)

// Sleep waits for d or until ctx ends.
func Sleep(ctx context.Context, d time.Duration) { Await(ctx, ctx, nil, d) }

// Await waits for d, for a wake request, or until ctx or held ends. It reports
// whether a wake request came. A nil wake never comes.
func Await(ctx, held context.Context, wake <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-wake:
		return true
	case <-timer.C:
	case <-ctx.Done():
	case <-held.Done():
	}
	return false
}

// Signal leaves a wake request in a channel that holds one. It never blocks: if a
// request is there already, that one serves both.
func Signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// Backoff counts the failures of something that is tried until it works.
// The zero value is ready. It belongs to one goroutine.
type Backoff struct{ tries int }

// The first and the longest wait of [Backoff.Next].
const (
	MinBackoff = 100 * time.Millisecond
	MaxBackoff = 5 * time.Second
)

// Next returns the wait before the next try. It doubles from 100 ms to 5 s, less up
// to a half, so that many processes do not come back at the same moment.
func (b *Backoff) Next() time.Duration {
	d := Exponential(MinBackoff, MaxBackoff, b.tries)
	b.tries++
	return d - rand.N(d/2)
}

// Reset begins again with the shortest wait.
func (b *Backoff) Reset() { b.tries = 0 }

// Exponential returns shortest doubled n times, but at most longest.
func Exponential(shortest, longest time.Duration, n int) time.Duration {
	for ; n > 0 && shortest > 0 && shortest < longest; n-- {
		if shortest > longest/2 {
			return longest // doubled, it might overflow
		}
		shortest *= 2
	}
	return min(shortest, longest)
}
