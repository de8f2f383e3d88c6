package itest

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An event fails once, another one succeeds, and then what the handler needs is away for longer than all attempts take,
// twice in the same way. The event is not DEAD: what has succeeded after its first failure lies before the outage.
func TestBlipBeforeAnOutageKillsNothing(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"consumer", "worker", "consumer in place"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var down atomic.Bool
			down.Store(true)
			tries := make(chan struct{}, 1000)
			o := outages(t, by)
			retries := outbox.RetryPolicy{MaxRetries: 3, RetryWait: 300 * time.Millisecond, MaxRetryWait: 600 * time.Millisecond}
			o.start(outbox.HandlerConfig{Retry: retries}, func(s step) error {
				if s.Account != "a" || !down.Load() {
					return nil
				}
				tries <- struct{}{}
				return errDown
			})
			awaitTry := func() {
				select {
				case <-tries:
				case <-time.After(testenv.Patience):
					require.Fail(t, "the event is not tried again", "%d are DEAD", o.dead(t))
				}
			}
			o.record(step{"a", 1})
			awaitTry()
			for n, done := range []string{"1", "1 2"} {
				o.record(step{"b", n + 1}) // what was away is there for a moment
				require.Eventually(t, func() bool { return o.done("b") == done }, testenv.Patience, 5*time.Millisecond)
				for range retries.MaxRetries + 2 {
					awaitTry()
				}
			}
			down.Store(false)
			require.Eventually(t, func() bool { return o.done("a") == "1" || o.dead(t) > 0 }, testenv.Patience, 20*time.Millisecond)
			require.Zero(t, o.dead(t), "DEAD because of an outage")
		})
	}
}
