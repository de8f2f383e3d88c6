package main

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

func TestLapMeasuresWhatIsNotWarmUp(t *testing.T) {
	l := newLap(100, 10, 200*ms, 300*ms) // 2 and 3 transactions
	l.committed = []time.Duration{0, 100 * ms, 200 * ms, 300 * ms, 400 * ms}
	for n, took := range []time.Duration{90 * ms, 90 * ms, 1 * ms, 2 * ms, 3 * ms} {
		l.arrive(100+n, l.committed[n]+took)
	}
	require.Zero(t, l.missing)
	for i, want := range []float64{1, 2, 3} {
		require.InDelta(t, want, l.latencies()[i], 1e-9)
	}
}

func TestLapIgnoresRepeatsAndStrangers(t *testing.T) {
	l := newLap(100, 10, 0, 200*ms)
	for _, number := range []int{99, 102, 100, 100} {
		l.arrive(number, time.Duration(number)*ms)
	}
	require.Equal(t, 1, l.missing)
}

func TestLapMissesWhatIsSetAsideWhenAsked(t *testing.T) {
	l := newLap(100, 10, 0, 300*ms)
	l.setAside(1)
	l.setAside(1)
	l.setAside(2)
	for n := range 2 {
		l.arrive(100+n, ms)
	}
	require.Zero(t, l.missing)
	require.Len(t, l.latencies(), 1)
	l.miss(1) // has arrived
	l.miss(2)
	l.miss(2)
	require.Equal(t, 1, l.missing)
	l.arrive(102, ms)
	require.Zero(t, l.missing)
	require.Len(t, l.latencies(), 1)
}

func TestLapInOrder(t *testing.T) {
	const later = 1000 // as many events have some keys twice
	for _, first := range []int{0, 1} {
		l := newLap(100, later, 0, time.Second)
		for n := range l.total() {
			l.began[n], l.committed[n] = time.Duration(2*n), time.Duration(2*n+1)
		}
		for n := range l.total() {
			l.arrive(100+(n*(1-2*first)+first*(later-1)), ms) // onwards, or backwards
		}
		if first == 0 {
			require.NoError(t, l.inOrder(newEvent))
		} else {
			require.ErrorContains(t, l.inOrder(newEvent), "recorded later")
		}
	}
}

func TestOrderCheck(t *testing.T) {
	j := orderCheck{}
	require.NoError(t, j.see("a", 10, 20))
	require.NoError(t, j.see("a", 5, 10), "they overlapped")
	require.NoError(t, j.see("b", 1, 2), "of another key")
	require.Error(t, j.see("a", 5, 9))
}

func TestPoisonsAreOneAmongSoMany(t *testing.T) {
	l := newLap(100, 10, 300*ms, 2*time.Second) // 3 and 20 transactions
	poisons := l.poison(10)
	require.Equal(t, map[int]bool{0: true, 8: true, 18: true}, poisons)
	for n := range poisons {
		require.Contains(t, l.aside, n)
	}
	require.Equal(t, 23-len(l.aside), l.missing)
}

func TestAchievedRate(t *testing.T) {
	l := newLap(0, 10, 100*ms, 400*ms)
	l.committed = []time.Duration{0, 101 * ms, 201 * ms, 301 * ms, 401 * ms}
	require.Equal(t, 10.0, l.achieved())
	l.committed[4] = 900 * ms
	require.Equal(t, 5.0, l.achieved(), "4 transactions in 800 ms")
}

func TestPaceKeepsItsSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, mu, at := time.Now(), sync.Mutex{}, []time.Duration{}
		require.NoError(t, pace(t.Context(), 10, 5, 2, func(_ context.Context, n int) error {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Since(start)-offset(n, 10))
			return nil
		}))
		require.Equal(t, make([]time.Duration, 5), at)
	})
}

func TestPaceEndsWithTheFirstError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		require.ErrorIs(t, pace(t.Context(), 10, 1000, 4, func(context.Context, int) error { return broken }), broken)
	})
}

func TestEventNumber(t *testing.T) {
	for _, payload := range []string{`{"n": 42, "note": "1,2"}`, `{"n":42,"note":"1,2"}`} {
		n, err := eventNumber([]byte(payload))
		require.NoError(t, err)
		require.Equal(t, 42, n)
	}
	_, err := eventNumber([]byte(`{"order":"n"}`))
	require.Error(t, err)
}
