package testenv

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// Patience bounds the waits of tests for conditions that normally hold much earlier.
const Patience = time.Minute

// Run starts f and returns a function that cancels its context and waits for it,
// which happens when the test ends at the latest. The test fails if f does not
// return nil within [Patience].
func Run(t testing.TB, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			assert.NoError(t, err)
		case <-time.After(Patience):
			t.Error("Run did not return")
		}
	})
	t.Cleanup(stop)
	return stop
}
