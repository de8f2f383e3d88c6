package main

import (
	"testing"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

var accepted = OrderAccepted{OrderIntent: anIntent, Identifier: anIntent.ID.String() + "-1", OrderID: "order-1", happened: now()}

var overdue = OrderOverdue{OrderIntent: anIntent, Identifier: anIntent.ID.String() + "-1", happened: now()}

func TestOwnerIsNotifiedOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	for i, e := range []outbox.DomainEvent{accepted, overdue} {
		require.NoError(t, outboxtest.DeliverTwice(t.Context(), t, f.groups[notifications], f.events, e))
		events, again := f.outside.Pushed()
		require.Len(t, events, i+1)
		require.Zero(t, again)
	}
	f.requirePushed(t, true)
}

// A push that fails may have arrived. It is not repeated, and the log says that it is open.
func TestPushThatFails(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	meta := outbox.Metadata{ID: uuid.NewString()}
	require.ErrorContains(t, notification{f.db, "http://127.0.0.1:1", newHTTP(pushTimeout)}.orderAccepted(t.Context(), accepted, meta), "push: ")
	require.NoError(t, notification{f.db, f.exchange, newHTTP(pushTimeout)}.orderAccepted(t.Context(), accepted, meta), "a repeat")
	events, _ := f.outside.Pushed()
	require.Empty(t, events)
	f.requirePushed(t, false)
}

func (f *fixture) requirePushed(t *testing.T, want bool) {
	t.Helper()
	var got bool
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT bool_and(pushed_at IS NOT NULL) FROM notification_log`).Scan(&got))
	require.Equal(t, want, got)
}
