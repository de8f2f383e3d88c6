package outboxalert_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

// box keeps alerts, unless it fails.
type box struct {
	alerts []outbox.Alert
	err    error
}

func (b *box) Alert(_ context.Context, a outbox.Alert) error {
	if b.err == nil {
		b.alerts = append(b.alerts, a)
	}
	return b.err
}

// While one alerter fails, those that work get each alert once.
func TestAll(t *testing.T) {
	t.Parallel()
	works, fails := &box{}, &box{err: errors.New("no mail today")}
	all := outboxalert.All(works, fails)
	died := outbox.Alert{Kind: outbox.AlertDead, Relay: "default", Died: 1, Dead: []outbox.DeadEvent{{ID: 1}}}
	for range 3 {
		require.ErrorIs(t, all.Alert(t.Context(), died), fails.err)
	}
	require.Len(t, works.alerts, 1)
	died.Died, died.Dead = 2, append(died.Dead, outbox.DeadEvent{ID: 2})
	require.Error(t, all.Alert(t.Context(), died))
	require.Len(t, works.alerts, 2, "another one has died")
	require.Error(t, all.Alert(t.Context(), outbox.Alert{Kind: outbox.AlertDead, Relay: "another"}))
	require.Len(t, works.alerts, 3)
	fails.err = nil
	require.NoError(t, all.Alert(t.Context(), died))
	require.Len(t, works.alerts, 3)
	require.Equal(t, []outbox.Alert{died}, fails.alerts)
	require.NoError(t, all.Alert(t.Context(), died))
	require.Len(t, works.alerts, 4, "a new alert that says the same")

	fails.err = errors.New("no mail today")
	stale := outbox.Alert{Kind: outbox.AlertStale, Relay: "default"}
	require.Error(t, all.Alert(t.Context(), stale))
	stale.Over = true
	require.Error(t, all.Alert(t.Context(), stale))
	require.Len(t, works.alerts, 6)
}

func TestOnly(t *testing.T) {
	t.Parallel()
	kept := &box{}
	only := outboxalert.Only(kept, outbox.AlertStale, outbox.AlertNoLeader)
	for _, kind := range []outbox.AlertKind{outbox.AlertStale, outbox.AlertReport, outbox.AlertNoLeader, outbox.AlertDead} {
		require.NoError(t, only.Alert(t.Context(), outbox.Alert{Kind: kind}))
	}
	require.Len(t, kept.alerts, 2)
}
