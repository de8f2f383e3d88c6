package relay

import (
	"log/slog"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

// The waits before retries double, up to the longest, less up to a fifth: 1, 2, 4 … 300 s
// by default.
func TestRetryWait(t *testing.T) {
	t.Parallel()
	rules := rulesWith(5000)
	for i, seconds := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300} {
		most := time.Duration(seconds) * time.Second
		for range 100 {
			wait := rules.WaitBefore(i + 1)
			require.LessOrEqual(t, wait, most)
			require.GreaterOrEqual(t, wait, most*4/5)
		}
	}
	require.LessOrEqual(t, rules.WaitBefore(1000), 300*time.Second)

	rules.RetryWait, rules.MaxRetryWait = 10*time.Millisecond, time.Hour
	require.InDelta(t, 9*time.Millisecond, rules.WaitBefore(1), float64(time.Millisecond))
	require.GreaterOrEqual(t, rules.WaitBefore(30), time.Hour*4/5, "small steps lead there, too")
	rules.MaxRetryWait = math.MaxInt64
	require.Positive(t, rules.WaitBefore(1_000_000))
	rules.RetryWait, rules.MaxRetryWait = 1, 1
	require.LessOrEqual(t, rules.WaitBefore(3), time.Duration(1))
}

// A bad place is forgotten if nothing waits for it, and if somebody has looked: what waits
// for a place that another retrier has claimed was not asked for.
func TestForgetEmptyPlaces(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewRetrier(RetrierParts{Bad: NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler)))})
		r.Bad.Load([]cursor.BadPartition{{Name: "claimed"}, {Name: "empty"}, {Name: "waiting"}})
		looked, waiting := []string{"empty", "waiting"}, []cursor.FailedRow{{Place: "waiting"}}
		names := func() (names []string) {
			for _, bad := range r.Bad.All() {
				names = append(names, bad.Name)
			}
			return names
		}
		r.ForgetEmpty(looked, waiting)
		require.Len(t, names(), 3, "the session may be about to write a row")
		time.Sleep(EmptyAfter + 1)
		r.ForgetEmpty(looked, waiting)
		require.Equal(t, []string{"claimed", "waiting"}, names())
	})
}
