package main

import (
	"context"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

// A backtest that was cut off begins again. One that is done does not.
func TestBacktest(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	require.NoError(t, f.backtests().order(t.Context(), anIntent.Scope, 1000))
	record := outboxtest.NewRecord(t.Context(), t, f.events, recorded[RunBacktest](t, f)[0])
	killed, kill := context.WithCancel(t.Context())
	defer kill()
	ended := make(chan error, 1)
	go func() { ended <- f.groups[backtesting].Deliver(killed, record) }()
	require.Eventually(t, func() bool {
		var started bool
		return f.db.QueryRow(t.Context(), `SELECT starts = 1 FROM backtest`).Scan(&started) == nil && started
	}, testenv.Patience, 5*time.Millisecond)
	kill()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Empty(t, recorded[BacktestCompleted](t, f))

	require.NoError(t, f.deliver(t, backtesting, record))
	require.NoError(t, f.deliver(t, backtesting, record), "a repeat")
	require.Len(t, recorded[BacktestCompleted](t, f), 1)
	var starts int
	var result int64
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT starts, result FROM backtest`).Scan(&starts, &result))
	require.Equal(t, 2, starts)
	require.Equal(t, recorded[BacktestCompleted](t, f)[0].Result, result)
}
