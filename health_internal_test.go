package outbox

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

// A Run that hangs is not live, one that does what takes long is.
func TestHealthOfAHangingRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := RelayConfig{}.withDefaults()
		r := &Relay{
			cfg: cfg, breaker: newBreaker(cfg.Breaker, func(BreakerState, BreakerState) {}),
			postgresOutage: outage.NewLog(slog.Default(), "PostgreSQL"), kafkaOutage: outage.NewLog(slog.Default(), "Kafka"),
		}
		r.vitals.begin()
		r.vitals.lead(true)
		require.True(t, r.Health().Ready)
		time.Sleep(r.hangsAfter())
		require.Equal(t, RelayHealth{Relay: "default", Live: true, Leading: true,
			Reasons: []string{"nothing has moved for 1m46s, although there are events to send"}}, r.Health())
		r.vitals.takesLong("the cursor is moved")
		time.Sleep(time.Hour)
		require.Equal(t, []string{"the cursor is moved, since 1h0m0s"}, r.Health().Reasons)
		require.True(t, r.Health().Live)
		r.vitals.takesLong("")
		time.Sleep(r.hangsAfter() + time.Second)
		require.False(t, r.Health().Live)
		require.Contains(t, r.Health().Reasons, "Run has not gone on for 1m47s")
	})
}
