package wakeup

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// A hub that has had wake-ups for 5 s and never a user is found, once.
func TestUnusedHub(t *testing.T) {
	t.Parallel()
	db, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nowhere")
	require.NoError(t, err)
	defer db.Close()
	began := time.Now()
	at := func(seconds int) time.Time { return began.Add(time.Duration(seconds) * time.Second) }

	never := Of(db, "never")
	require.False(t, never.unusedAt(at(0)), "Run may come later")
	require.False(t, never.unusedAt(at(5)))
	require.True(t, never.unusedAt(at(6)))
	require.False(t, never.unusedAt(at(7)), "that was said")

	late := Of(db, "late")
	require.False(t, late.unusedAt(at(0)))
	serve(t, late)
	require.False(t, late.unusedAt(at(60)), "it has stopped")

	early := Of(db, "early")
	serve(t, early)
	require.False(t, early.unusedAt(at(0)))
	require.False(t, early.unusedAt(at(60)))
}

// serve uses a hub for a moment.
func serve(t *testing.T, h *Hub) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h.Serve(ctx, slog.New(slog.DiscardHandler))
}

// Few wake-ups are notified each; of many, those behind the first ones only once in an interval.
func TestCompleteNotifications(t *testing.T) {
	t.Parallel()
	s := &sender{more: make(chan struct{}, 1), wanted: map[string]bool{}, sent: map[string]time.Time{}}
	now := time.Now()
	wake := func() (sent, complete bool, pause time.Duration) {
		s.want("c")
		channels, complete, pause := s.take(now)
		return len(channels) == 1, complete, pause
	}
	for range 10 * completeMost { // 333 in a second
		sent, complete, _ := wake()
		require.True(t, sent && complete)
		now = now.Add(3 * time.Millisecond)
	}
	now = now.Add(Interval)
	var completely, once int
	for range 1000 { // in a second
		sent, complete, pause := wake()
		switch {
		case sent && complete:
			completely++
		case sent:
			once++
		default:
			require.LessOrEqual(t, pause, Interval)
		}
		now = now.Add(time.Millisecond)
	}
	require.Equal(t, completeMost, completely)
	require.InDelta(t, 4, once, 1)
	now = now.Add(2 * Interval)
	sent, complete, _ := wake()
	require.True(t, sent && complete, "there are few again")
}
