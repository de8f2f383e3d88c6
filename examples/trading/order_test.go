package main

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

var anIntent = OrderIntent{
	ID: uuid.MustParse("0190a5c4-7b1e-7c3d-8a2b-1f2e3d4c5b6a"), SignalID: 1,
	Scope: Scope{OwnerID: "ann", StrategyKey: "grid", Market: "KRW-BTC"}, Side: "BUY", Quantity: 2,
}

// An intent gets another attempt only if the exchange has certainly not taken the last one,
// and does not mind another.
func TestNextAttempt(t *testing.T) {
	t.Parallel()
	first, ok := anIntent.Next(Attempt{})
	require.True(t, ok)
	require.Equal(t, Attempt{No: 1, Identifier: anIntent.ID.String() + "-1", State: Prepared}, first)
	for state, want := range map[State]bool{
		Prepared: false, Sent: false, Acked: false, Rejected: false, Unknown: false, NotPlaced: false, Expired: false, Throttled: true,
	} {
		first.State = state
		next, ok := anIntent.Next(first)
		require.Equal(t, want, ok, state)
		if ok {
			require.Equal(t, Attempt{No: 2, Identifier: anIntent.ID.String() + "-2", State: Prepared}, next)
		} else {
			require.Equal(t, first, next)
		}
	}
}

// What is final stays, and nothing is sent twice.
func TestStatesOfAnAttempt(t *testing.T) {
	t.Parallel()
	for to, from := range before {
		for _, state := range from {
			require.Contains(t, []State{Prepared, Sent, Unknown}, state, "to %s", to)
		}
	}
	require.Equal(t, []State{Prepared}, before[Sent])
}

// That the exchange does not have an order means nothing until the order is no longer valid.
func TestTrust(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	a := Attempt{ValidUntil: noon}
	require.Equal(t, Unknown, a.Trust(Answer{State: NotPlaced}, noon).State)
	require.Equal(t, NotPlaced, a.Trust(Answer{State: NotPlaced}, noon.Add(clockSkew)).State)
	require.Equal(t, Answer{State: Acked, OrderID: "1"}, a.Trust(Answer{State: Acked, OrderID: "1"}, noon))
}

// An order that is rejected when it is no longer valid came too late, which is nothing for an operator.
func TestTrustLateRejection(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	a := Attempt{ValidUntil: noon}
	got := Answer{State: Rejected, Reason: "no longer valid"}
	require.Equal(t, got, a.Trust(got, noon.Add(-time.Millisecond)))
	require.Equal(t, Answer{State: NotPlaced, Reason: "no longer valid"}, a.Trust(got, noon))
}

// No order is valid for longer than its signal is worth one.
func TestValidUntil(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for left, valid := range map[time.Duration]time.Duration{time.Minute: orderValid, orderValid: orderValid, time.Second: time.Second} {
		until, ok := OrderIntent{Deadline: noon.Add(left)}.ValidUntil(noon)
		require.True(t, ok)
		require.Equal(t, noon.Add(valid), until)
	}
	for _, left := range []time.Duration{0, -time.Hour} {
		_, ok := OrderIntent{Deadline: noon.Add(left)}.ValidUntil(noon)
		require.False(t, ok)
	}
}

// A command from before there was a deadline is sent.
func TestValidUntilWithoutDeadline(t *testing.T) {
	t.Parallel()
	var old OrderIntent
	require.NoError(t, json.Unmarshal([]byte(`{"orderIntentId": "0190a5c4-7b1e-7c3d-8a2b-1f2e3d4c5b6a", "side": "BUY", "quantity": 2}`), &old))
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	until, ok := old.ValidUntil(noon)
	require.True(t, ok)
	require.Equal(t, noon.Add(orderValid), until)
}
