package main

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
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

// A command that waits behind the kill switch until its signal is worth nothing is not sent to the exchange when the
// switch is turned back. One that is still worth something is.
func TestWorthlessCommandsAreNotSent(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.Accept))
	workers, err := f.workers()
	require.NoError(t, err)
	require.NoError(t, workers[0].Pause(tradeCommand))
	testenv.Run(t, workers[0].Run)
	decide := func(signal int64, worth time.Duration) (intent uuid.UUID) {
		intent = uuid.New()
		b := bot{f.db, f.bus, worth}
		require.NoError(t, b.decide(t.Context(), Signal{ID: signal, Scope: anIntent.Scope, Side: "BUY", Quantity: 2}, intent))
		return intent
	}
	decide(1, 50*time.Millisecond)
	worth := decide(2, time.Minute)
	time.Sleep(100 * time.Millisecond)
	require.NoError(t, workers[0].Resume(tradeCommand))
	require.Eventually(t, func() bool { return f.states(t) == "ACKED" }, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return strings.Contains(f.print(t), "1 have expired and were not sent to the exchange") }, testenv.Patience, 50*time.Millisecond)
	require.Len(t, f.outside.Orders(), 1)
	var intent uuid.UUID
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT order_intent_id FROM order_attempt`).Scan(&intent))
	require.Equal(t, worth, intent)
}

// An exchange that has an order and does not answer questions for longer than commandRetries last makes no command
// DEAD.
func TestWorkersAskUntilTheOutcomeIsKnown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, onFirst(simulator.FailTaken))
	var questions atomic.Int64
	address, closeServer, err := serve(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && questions.Add(1) <= commandRetries+2 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		f.outside.ServeHTTP(w, r)
	}))
	require.NoError(t, err)
	t.Cleanup(closeServer)
	f.exchange = address
	workers, err := f.workers()
	require.NoError(t, err)
	f.decide(t)
	testenv.Run(t, workers[0].Run)
	var status string
	require.Eventually(t, func() bool {
		err := f.db.QueryRow(t.Context(), `SELECT status FROM event_delivery WHERE consumer_group = $1 AND status IN ('DONE', 'DEAD')`, orderExecutor).Scan(&status)
		return err == nil
	}, testenv.Patience, 20*time.Millisecond)
	require.Equal(t, "DONE", status)
	require.Equal(t, "ACKED", f.states(t))
	require.Greater(t, questions.Load(), int64(commandRetries+2))
}
