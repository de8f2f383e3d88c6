package consumer

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
)

// A delivery whose dead letter may still reach Kafka is not claimed again before the end of that try.
func TestDeadLetterUnderWayIsAwaited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g deadLetterGates
		err := sendTo(t.Context(), &g, "dlq", deadRow(1), func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		require.ErrorContains(t, err, "no answer")
		wait, ok := handling.WaitOf(err)
		require.True(t, ok)
		require.GreaterOrEqual(t, deadLetterTry+wait, deadLetterDelivery)
		time.Sleep(deadLetterDelivery)
	})
}

// A dead letter that Kafka has acknowledged too late is not sent again. If an operator has requeued the delivery, its
// next death has a dead letter of its own, in this process or another one.
func TestDeathAfterRequeueHasItsDeadLetter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g deadLetterGates
		sent := 0
		late := func(context.Context) error { sent++; time.Sleep(3 * time.Second); return nil }
		inTime := func(context.Context) error { sent++; return nil }
		d := deadRow(1)
		die := func() {
			require.Error(t, sendTo(t.Context(), &g, "dlq", d, late))
			time.Sleep(deadLetterDelivery)
		}
		die()
		require.NoError(t, sendTo(t.Context(), &g, "dlq", d, inTime))
		require.Equal(t, 1, sent, "Kafka has it")

		d = deadRow(2)
		die()
		time.Sleep(time.Minute) // another process ends it, and an operator requeues it
		d.FirstFailed = time.Time{}
		require.NoError(t, sendTo(t.Context(), &g, "dlq", d, inTime))
		require.Equal(t, 3, sent, "the death in the first attempt has a dead letter")

		d = deadRow(3)
		die()
		time.Sleep(time.Minute)
		d.FirstFailed = time.Now()
		require.NoError(t, sendTo(t.Context(), &g, "dlq", d, inTime))
		require.Equal(t, 5, sent, "the death in a later attempt has a dead letter")
	})
}

// While a topic takes nothing, the waits of its deliveries grow with their number, up to a bound. They are short again
// when it takes dead letters.
func TestDeadLetterWaitsGrow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g deadLetterGates
		never := func(ctx context.Context) error { <-ctx.Done(); return errTakesNothing }
		require.Error(t, sendTo(t.Context(), &g, "dlq", deadRow(1), never))
		const rows, window = 100_000, 20 * time.Second
		due := 0
		for id := range int64(rows) {
			err := sendTo(t.Context(), &g, "dlq", deadRow(id+2), never)
			require.ErrorIs(t, err, delivery.ErrNotTried)
			wait, _ := handling.WaitOf(err)
			require.LessOrEqual(t, wait, 5*time.Minute)
			if id == 0 {
				require.LessOrEqual(t, wait, 15*time.Second, "a single delivery waits for a short time")
			}
			if wait <= window {
				due++
			}
		}
		require.Less(t, due, 500, "of %d deliveries are due within %v", rows, window)

		time.Sleep(deadLetterDelivery)
		require.NoError(t, sendTo(t.Context(), &g, "dlq", deadRow(1), func(context.Context) error { return nil }))
		err := sendTo(t.Context(), &g, "dlq", deadRow(2), never)
		require.ErrorContains(t, err, "no answer")
		wait, _ := handling.WaitOf(err)
		require.LessOrEqual(t, wait, 15*time.Second)
		time.Sleep(deadLetterDelivery)
	})
}

// The place of a dead letter that Kafka has acknowledged too late is known, too.
func TestPlaceOfLateDeadLetter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g deadLetterGates
		d := deadRow(1)
		produce := func(context.Context) (string, error) { time.Sleep(3 * time.Second); return "dlq-0-7", nil }
		_, err := g.send(t.Context(), "dlq", d, produce)
		require.ErrorContains(t, err, "no answer")
		time.Sleep(deadLetterDelivery)
		place, err := g.send(t.Context(), "dlq", d, produce)
		require.NoError(t, err)
		require.Equal(t, "dlq-0-7", place)
	})
}
