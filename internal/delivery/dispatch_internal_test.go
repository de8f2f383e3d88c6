package delivery

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
)

// A dispatcher whose lanes are all at work asks PostgreSQL nothing, and so does not know that it
// works again: it said so all through an outage, some times a second.
func TestBusyDispatcherEndsNoOutage(t *testing.T) {
	t.Parallel()
	cfg := &Rules{Rules: &handling.Rules{StopTimeout: 5 * time.Second}, MaxPoll: 100, PollInterval: time.Second, Lease: 30 * time.Second}
	d := &Dispatcher{
		cfg: cfg, outages: outage.NewLogs(slog.New(slog.DiscardHandler)), Claimed: newClaimedSet(), changed: make(chan struct{}, 1), lastFull: time.Now(),
		Kinds: []*LaneKind{{load: map[*lane]int{}}},
	}
	d.outages.Report(handling.OutagePostgres, time.Now(), errors.New("away"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.NoError(t, d.run(ctx))
	require.True(t, d.outages.Failing())
}

// The wait doubles up to the longest, a fifth more or less: of the worker, or of the stream. However long it is, it is
// one.
func TestWorkerRetryWait(t *testing.T) {
	t.Parallel()
	const endless = math.MaxInt64
	cfg := &Rules{
		Rules: &handling.Rules{Retry: handling.RetryPolicy{RetryWait: time.Second, MaxRetryWait: time.Minute}},
		Streams: map[string]handling.RetryPolicy{
			"slow": {RetryWait: time.Minute, MaxRetryWait: 5 * time.Minute}, "above": {RetryWait: time.Hour}, "endless": {RetryWait: endless, MaxRetryWait: endless},
			"nearly endless": {RetryWait: 2 * (endless / 3)},
		},
	}
	for _, tt := range []struct {
		stream  string
		attempt int
		want    time.Duration
	}{
		{"", 1, time.Second}, {"", 2, 2 * time.Second}, {"", 6, 32 * time.Second}, {"", 7, time.Minute}, {"", 1_000_000, time.Minute},
		{"slow", 1, time.Minute}, {"slow", 3, 4 * time.Minute}, {"slow", 4, 5 * time.Minute}, {"above", 1, time.Hour}, {"above", 9, time.Hour},
		{"endless", 3, endless / 2}, {"nearly endless", 1, endless / 2},
	} {
		task := handling.Task{Handler: &handling.Handler{}}
		least, most := time.Duration(endless), time.Duration(0)
		for range 1000 {
			d := task.Retry.Over(cfg.Of(tt.stream)).Next(tt.attempt, errors.New("no"))
			least, most = min(least, d), max(most, d)
		}
		require.True(t, least >= tt.want-tt.want/5 && least <= tt.want-tt.want/7, "%v: %v", tt, least)
		require.True(t, most <= tt.want+tt.want/5 && most >= tt.want+tt.want/7, "%v: %v", tt, most)
	}
}
