package itest

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An event that fails in an outage, and is tried next in the following outage, is not DEAD, although another event has
// succeeded between the two. The second outage takes longer than all attempts.
func TestSecondOutageKillsNothing(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var down atomic.Bool
			down.Store(true)
			tries := make(chan time.Time, 1000)
			o := outages(t, by)
			retries := quickRetries
			retries.MaxRetryWait = time.Minute
			o.start(outbox.HandlerConfig{Retry: retries}, func(s step) error {
				if !down.Load() {
					return nil
				}
				tries <- time.Now()
				return errDown
			})
			awaitTry := func() time.Time {
				select {
				case at := <-tries:
					return at
				case <-time.After(testenv.Patience):
					require.Fail(t, "the event is not tried again", "%d are DEAD", o.dead(t))
				}
				return time.Time{}
			}
			o.record(step{"a", 1})
			first := awaitTry()
			for at := first; at.Sub(first) < 2*time.Second; at = awaitTry() { // it waits as long for its next attempt
			}
			down.Store(false)
			o.record(step{"b", 1})
			require.Eventually(t, func() bool { return o.done("b") == "1" }, testenv.Patience, 5*time.Millisecond)
			down.Store(true)
			require.Empty(t, o.done("a"))
			for range quickRetries.MaxRetries + 2 {
				awaitTry()
			}
			down.Store(false)
			require.Eventually(t, func() bool { return o.done("a") == "1" || o.dead(t) > 0 }, testenv.Patience, 20*time.Millisecond)
			require.Zero(t, o.dead(t), "DEAD because of two outages")
		})
	}
}
