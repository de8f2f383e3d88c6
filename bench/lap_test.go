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

func TestLapJudgesWhatIsNotWarmUp(t *testing.T) {
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
