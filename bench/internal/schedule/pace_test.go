package schedule

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPaceKeepsItsSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, mu, at := time.Now(), sync.Mutex{}, []time.Duration{}
		require.NoError(t, Pace(t.Context(), 10, 5, 2, func(_ context.Context, n int) error {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Since(start)-Offset(n, 10))
			return nil
		}))
		require.Equal(t, make([]time.Duration, 5), at)
	})
}

func TestPaceEndsWithTheFirstError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		require.ErrorIs(t, Pace(t.Context(), 10, 1000, 4, func(context.Context, int) error { return broken }), broken)
	})
}
