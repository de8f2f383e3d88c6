package outbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// 1, 2, 4 … 300 s, less up to a fifth.
func TestRetryWait(t *testing.T) {
	t.Parallel()
	for i, seconds := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300} {
		most := time.Duration(seconds) * time.Second
		for range 100 {
			wait := retryWait(i + 1)
			require.LessOrEqual(t, wait, most)
			require.GreaterOrEqual(t, wait, most*4/5)
		}
	}
	require.LessOrEqual(t, retryWait(1000), 300*time.Second)
}

func TestRetryDefaults(t *testing.T) {
	t.Parallel()
	cfg := RelayConfig{}.withDefaults()
	require.Equal(t, 5*time.Second, cfg.RetryInterval)
	require.Equal(t, 10, cfg.MaxRetries)
	require.Equal(t, BreakerConfig{Window: 10, MinCalls: 5, FailureRate: 0.5, OpenFor: 30 * time.Second, Trials: 3}, cfg.Breaker)
}
