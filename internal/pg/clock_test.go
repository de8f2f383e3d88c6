package pg_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// The clock of the database goes on from what was read, whatever this host shows.
func TestClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		database := began.Add(-6 * time.Minute)
		clock := pg.ClockAt(database)
		time.Sleep(time.Second)
		require.True(t, clock.IsRead())
		require.Equal(t, database.Add(time.Second), clock.Now())
		require.Equal(t, database.Add(-time.Minute), clock.At(began.Add(-time.Minute)))
		require.Equal(t, time.Minute+time.Second, clock.Since(database.Add(-time.Minute)))
		require.Zero(t, clock.Since(database.Add(time.Minute)), "it is yet to come")
		require.Zero(t, clock.Since(time.Time{}))
		require.Zero(t, clock.At(time.Time{}))
		require.False(t, pg.Clock{}.IsRead())
		require.Equal(t, time.Now(), pg.Clock{}.Now())
	})
}
