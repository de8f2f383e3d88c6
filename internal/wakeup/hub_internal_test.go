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
