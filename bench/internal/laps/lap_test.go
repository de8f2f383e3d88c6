package laps

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

func TestLapMeasuresWhatIsNotWarmUp(t *testing.T) {
	l := New(100, 10, 200*ms, 300*ms) // 2 and 3 transactions
	l.Committed = []time.Duration{0, 100 * ms, 200 * ms, 300 * ms, 400 * ms}
	for n, took := range []time.Duration{90 * ms, 90 * ms, 1 * ms, 2 * ms, 3 * ms} {
		l.Arrive(100+n, l.Committed[n]+took)
	}
	require.Zero(t, l.Missing)
	for i, want := range []float64{1, 2, 3} {
		require.InDelta(t, want, l.Latencies()[i], 1e-9)
	}
}

func TestLapIgnoresRepeatsAndStrangers(t *testing.T) {
	l := New(100, 10, 0, 200*ms)
	for _, number := range []int{99, 102, 100, 100} {
		l.Arrive(number, time.Duration(number)*ms)
	}
	require.Equal(t, 1, l.Missing)
}

func TestLapMissesWhatIsSetAsideWhenAsked(t *testing.T) {
	l := New(100, 10, 0, 300*ms)
	l.SetAside(1)
	l.SetAside(1)
	l.SetAside(2)
	for n := range 2 {
		l.Arrive(100+n, ms)
	}
	require.Zero(t, l.Missing)
	require.Len(t, l.Latencies(), 1)
	l.Miss(1) // has arrived
	l.Miss(2)
	l.Miss(2)
	require.Equal(t, 1, l.Missing)
	l.Arrive(102, ms)
	require.Zero(t, l.Missing)
	require.Len(t, l.Latencies(), 1)
}

func TestLapInOrder(t *testing.T) {
	const later = 1000 // as many events have some keys twice
	for _, first := range []int{0, 1} {
		l := New(100, later, 0, time.Second)
		for n := range l.Total() {
			l.began[n], l.Committed[n] = time.Duration(2*n), time.Duration(2*n+1)
		}
		for n := range l.Total() {
			l.Arrive(100+(n*(1-2*first)+first*(later-1)), ms) // onwards, or backwards
		}
		if first == 0 {
			require.NoError(t, l.InOrder(orders.New))
		} else {
			require.ErrorContains(t, l.InOrder(orders.New), "recorded later")
		}
	}
}

func TestOrderCheck(t *testing.T) {
	j := OrderCheck{}
	require.NoError(t, j.See("a", 10, 20))
	require.NoError(t, j.See("a", 5, 10), "they overlapped")
	require.NoError(t, j.See("b", 1, 2), "of another key")
	require.Error(t, j.See("a", 5, 9))
}

func TestAchievedRate(t *testing.T) {
	l := New(0, 10, 100*ms, 400*ms)
	l.Committed = []time.Duration{0, 101 * ms, 201 * ms, 301 * ms, 401 * ms}
	require.Equal(t, 10.0, l.Achieved())
	l.Committed[4] = 900 * ms
	require.Equal(t, 5.0, l.Achieved(), "4 transactions in 800 ms")
}
