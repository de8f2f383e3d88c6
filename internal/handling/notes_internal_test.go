package handling

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// Waits in vain are a reason for not being ready only while they go on: a wait that ended long ago is none, even if no
// transaction has been committed since, and waits with long pauses between them are no series.
func TestWaitsInVainEnd(t *testing.T) {
	t.Parallel()
	db, err := pgxpool.New(t.Context(), "host=none")
	require.NoError(t, err)
	t.Cleanup(db.Close)
	synctest.Test(t, func(t *testing.T) {
		const slow = 5 * time.Second
		s := NewNotes(db, "s", "g")
		unready := func() (reason string) {
			s.ReportWaits(slow, func(format string, args ...any) { reason = fmt.Sprintf(format, args...) })
			return reason
		}
		inVain := fmt.Errorf("note: %w", &pg.LockError{Err: &pgconn.PgError{Code: "55P03"}})
		require.Empty(t, unready())
		for range 4 {
			s.noteWait(inVain)
			s.noteWait(errors.New("another failure"))
			time.Sleep(2 * time.Second)
		}
		require.Contains(t, unready(), "has not begun or ended for 8s: another session holds a lock")
		time.Sleep(vainMemory)
		require.Empty(t, unready(), "nothing has waited since")
		s.noteWait(inVain)
		time.Sleep(2 * time.Second)
		require.Empty(t, unready(), "a new series")
		time.Sleep(4 * time.Second)
		require.Contains(t, unready(), "for 6s")
		s.noteWait(nil)
		require.Empty(t, unready())
	})
}

// A call may have any time: bounds that are longer than PostgreSQL has are its longest.
func TestLimitsDoNotOverflow(t *testing.T) {
	t.Parallel()
	for _, call := range []time.Duration{0, time.Second, time.Hour, 1<<63 - 1} {
		limits := LimitsOf(call)
		require.Positive(t, limits.Call)
		require.Greater(t, limits.Whole, limits.Call)
		require.Positive(t, 2*limits.Call)
	}
	require.Equal(t, 61*time.Second, LimitsOf(time.Minute).Call)
}
