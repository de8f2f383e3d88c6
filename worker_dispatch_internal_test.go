package outbox

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

// A dispatcher whose lanes are all at work asks PostgreSQL nothing, and so does not know that it
// works again: it said so all through an outage, some times a second.
func TestBusyDispatcherEndsNoOutage(t *testing.T) {
	t.Parallel()
	cfg := WorkerConfig{}.withDefaults()
	d := &dispatcher{
		cfg: &cfg, outages: outage.NewLogs(slog.New(slog.DiscardHandler)), hands: newHands(), freeNow: make(chan struct{}, 1), poll: time.Now(),
		kinds: []*laneKind{{load: map[*lane]int{}}},
	}
	d.outages.Report(outagePostgres, time.Now(), errors.New("away"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.NoError(t, d.run(ctx))
	require.True(t, d.outages.Failing())
}
