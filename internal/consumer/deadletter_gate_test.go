package consumer

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
)

var errTakesNothing = errors.New("not enough replicas")

// deadRow returns a delivery that fails for the first time now.
func deadRow(id int64) *delivery.Delivery {
	return &delivery.Delivery{Ref: delivery.Ref{ID: id}, FirstFailed: time.Now()}
}

// sendTo is send of a gate for a produce that knows no place.
func sendTo(ctx context.Context, g *deadLetterGates, topic string, d *delivery.Delivery, produce func(context.Context) error) error {
	_, err := g.send(ctx, topic, d, func(ctx context.Context) (string, error) { return "", produce(ctx) })
	return err
}

// While a topic takes nothing, one dead letter at a time is tried, each for two seconds at most. Other topics go on.
func TestDeadLetterGate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g deadLetterGates
		var tries atomic.Int64
		takes := make(chan struct{})
		produce := func(ctx context.Context) error {
			tries.Add(1)
			select {
			case <-takes:
				return nil
			case <-ctx.Done():
				return errTakesNothing
			}
		}
		send := func(topic string, id int64) (took time.Duration, err error) {
			began := time.Now()
			err = sendTo(t.Context(), &g, topic, deadRow(id), produce)
			return time.Since(began), err
		}
		took, err := send("bad", 1)
		require.ErrorContains(t, err, "no answer within 2s")
		require.Equal(t, deadLetterTry, took)

		for _, id := range []int64{1, 2, 3} { // 1 is still being sent, and the others wait for its answer
			took, err = send("bad", id)
			require.ErrorIs(t, err, delivery.ErrNotTried)
			require.Zero(t, took)
		}
		require.NoError(t, sendTo(t.Context(), &g, "good", deadRow(4), func(context.Context) error { return nil }))
		require.Equal(t, int64(1), tries.Load())

		time.Sleep(deadLetterDelivery)
		took, err = send("bad", 2) // the first one has failed, so another one is tried
		require.ErrorContains(t, err, "no answer within 2s")
		require.Equal(t, deadLetterTry, took)
		_, err = send("bad", 1)
		require.ErrorIs(t, err, delivery.ErrNotTried)

		close(takes)
		synctest.Wait()
		for _, id := range []int64{1, 2, 3} {
			took, err = send("bad", id)
			require.NoError(t, err)
			require.Zero(t, took)
		}
		require.Equal(t, int64(4), tries.Load(), "Kafka has acknowledged the dead letter of 2, it is not sent again")
	})
}

// What is no answer of the topic keeps its gate as it is: a stop, and the time between two memberships.
func TestDeadLetterGateStaysOpen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g deadLetterGates
		ctx, stop := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, stop)
		require.ErrorIs(t, sendTo(ctx, &g, "dlq", deadRow(1), func(context.Context) error { time.Sleep(3 * time.Second); return nil }), context.Canceled)
		require.ErrorIs(t, sendTo(t.Context(), &g, "dlq", deadRow(2), func(context.Context) error { return errNoMember }), errNoMember)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		g.mu.Lock()
		defer g.mu.Unlock()
		require.False(t, g.topics["dlq"].closed)
		require.Contains(t, g.topics["dlq"].accepted, int64(1))
	})
}
