package main

import (
	"encoding/json"
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

func TestHowEventsTravel(t *testing.T) {
	t.Parallel()
	events, err := registry()
	require.NoError(t, err)
	for _, tt := range []struct {
		event      outbox.DomainEvent
		topic, key string
	}{
		{CreateOrderAttempt{anIntent, now()}, "everbit.trade.command", "grid/KRW-BTC"},
		{accepted, "everbit.trade.event", "ann"},
		{overdue, "everbit.trade.event", "ann"},
		{RunBacktest{BacktestID: anIntent.ID, happened: now()}, "everbit.backtest.command", anIntent.ID.String()},
		{BacktestCompleted{BacktestID: anIntent.ID, happened: now()}, "everbit.backtest.event", anIntent.ID.String()},
		{KillSwitchChanged{happened: now()}, "everbit.system.event", "kill-switch"},
	} {
		record := outboxtest.NewRecord(t.Context(), t, events, tt.event)
		require.Equal(t, tt.topic, record.Topic, "%T", tt.event)
		require.Equal(t, tt.key, string(record.Key), "%T", tt.event)
	}
}

// Whose business an event is travels in the payload.
func TestScopeTravels(t *testing.T) {
	t.Parallel()
	payload, err := json.Marshal(CreateOrderAttempt{OrderIntent: anIntent})
	require.NoError(t, err)
	require.JSONEq(t, `{"orderIntentId": "0190a5c4-7b1e-7c3d-8a2b-1f2e3d4c5b6a", "signalId": 1, "ownerId": "ann", "strategyKey": "grid",
		"market": "KRW-BTC", "side": "BUY", "quantity": 2, "deadline": "0001-01-01T00:00:00Z", "occurredAt": "0001-01-01T00:00:00Z"}`, string(payload))
}
