package main

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox/examples/trading/simulator"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// What a bot decides ends as a push. While the process has paused the stream of commands, it
// places no order, and the other groups go on.
func TestWorkers(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	workers, err := f.workers()
	require.NoError(t, err)
	f.running = workers
	executors := workers[0]
	require.Equal(t, orderExecutor, executors.Group())
	require.NoError(t, executors.Pause(tradeCommand))
	for _, w := range workers {
		testenv.Run(t, w.Run)
	}
	f.decide(t)
	require.NoError(t, f.backtests().order(t.Context(), anIntent.Scope, 20))
	f.wake()
	require.Eventually(t, func() bool { return len(recorded[BacktestCompleted](t, f)) == 1 }, testenv.Patience, 10*time.Millisecond)
	require.Empty(t, f.states(t))

	require.NoError(t, executors.Resume(tradeCommand))
	require.Eventually(t, func() bool {
		events, _ := f.outside.Pushed()
		return len(events) == 1
	}, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, "ACKED", f.states(t))
}
