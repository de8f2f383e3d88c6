package relay

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/contain"
)

// The hook of the breaker hangs. Neither the goroutine that renews the lease, which asks an open breaker for its state,
// nor that of the Kafka client, which reports outcomes, waits for it. The hook gets the changes in their order.
func TestHookOfTheBreakerDelaysNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		quiet := slog.New(slog.DiscardHandler)
		changes := make(chan string, 10)
		hooks := Hooks{Breaker: func(from, to breaker.State, rate float64) {
			time.Sleep(9 * time.Second)
			changes <- fmt.Sprintf("%v to %v, %v", from, to, rate)
		}}
		callback := contain.NewCallback("Hooks.Breaker", quiet, contain.HookLimits)
		r := &Relay{log: quiet, retryNow: make(chan struct{}, 1), checkNow: make(chan struct{}, 1)}
		r.hooks = hooks.guarded(func(string) func(func()) {
			return func(call func()) { callback.Notify(context.Background(), call) }
		})
		rules := breaker.Rules{Window: 4, FailureRate: 0.5, OpenFor: time.Second, Trials: 3}
		r.breaker = breaker.New(rules, r.breakerChanged)
		r.health = newHealthState(Rules{Breaker: rules}, r.breaker)
		r.health.runBegan()
		r.health.setLeading(true)
		began := time.Now()
		permit := r.breaker.Allow(4)
		for range 4 {
			permit.Report(breaker.Failed)
		}
		require.Zero(t, time.Since(began), "an outcome waits for the hook")
		require.Equal(t, breaker.Open, r.health.report().Breaker)
		time.Sleep(rules.OpenFor)
		began = time.Now()
		require.Equal(t, breaker.HalfOpen, r.health.report().Breaker)
		require.Zero(t, time.Since(began), "the renewal of the lease waits for the hook")
		a := newAcks(r.breaker.Allow(3), make([]kgo.Record, 3), make([]error, 3))
		a.handedOver(3)
		for i := range a.records {
			a.promise(&a.records[i], nil)
		}
		require.Zero(t, time.Since(began), "an acknowledgement waits for the hook")
		open, accepted := a.progress()
		require.Equal(t, [2]int{0, 3}, [2]int{open, accepted})
		for _, want := range []string{"closed to open, 1", "open to half-open, 0", "half-open to closed, 0"} {
			require.Equal(t, want, <-changes)
		}
	})
}
