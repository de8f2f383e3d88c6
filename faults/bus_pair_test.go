package faults

import (
	"context"
	"encoding/json"
	"flag"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

var pairRuns = flag.Int("faults.pairs", 0, "how often TestFailingGroup measures a group with and without one beside it that fails; 0 means to look only whether it goes on")

// pairResult is what TestFailingGroup prints: how long it took from commit to handler, as the median of
// its runs.
type pairResult struct {
	Runs  int     `json:"runs"`
	Rate  int     `json:"events_per_second"`
	Alone float64 `json:"p99_alone_ms"`
	Calm  float64 `json:"p99_beside_working_ms"`
	Both  float64 `json:"p99_beside_failing_ms"`
	Ratio float64 `json:"ratio"`         // to alone
	Costs float64 `json:"ratio_working"` // of a second group that does not fail, to alone
}

// A group whose handlers fail for ever does not hold up another one on the same events.
func TestFailingGroup(t *testing.T) {
	testenv.Long(t)
	if *pairRuns == 0 {
		t.Parallel()
		requirePair(t, 50, 2*time.Second, fails)
		return
	}
	// Not parallel: it measures.
	const rate, lasts = 200, 10 * time.Second
	var alone, calm, both []time.Duration
	for range *pairRuns { // interleaved, so that what else the machine does meets both
		alone = append(alone, requirePair(t, rate, lasts, nil))
		calm = append(calm, requirePair(t, rate, lasts, works))
		both = append(both, requirePair(t, rate, lasts, fails))
		t.Logf("p99 alone %v, beside a group that works %v, beside one that fails %v", alone[len(alone)-1], calm[len(calm)-1], both[len(both)-1])
	}
	median := func(all []time.Duration) float64 {
		slices.Sort(all)
		return float64(all[len(all)/2].Microseconds()) / 1000
	}
	v := pairResult{Runs: *pairRuns, Rate: rate, Alone: median(alone), Calm: median(calm), Both: median(both)}
	v.Ratio, v.Costs = v.Both/v.Alone, v.Calm/v.Alone
	line, err := json.Marshal(v)
	require.NoError(t, err)
	t.Logf("%s", line)
	require.LessOrEqual(t, v.Ratio, 1.2)
}

// besideHandler is what the handler of a second group does.
type besideHandler = func(context.Context, pgx.Tx, itemSold, outbox.Metadata) error

var (
	works besideHandler = func(context.Context, pgx.Tx, itemSold, outbox.Metadata) error { return nil }
	fails besideHandler = func(context.Context, pgx.Tx, itemSold, outbox.Metadata) error { return errFailing }
)

// requirePair requires that a group handles everything, alongside another one or alone, and returns
// the 99th percentile of the time from commit to handler.
func requirePair(t *testing.T, rate int, lasts time.Duration, beside besideHandler) time.Duration {
	t.Helper()
	db := testenv.OtherDatabase(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{}))
	events, err := busEvents()
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	total := int(lasts.Seconds() * float64(rate))
	handled, committed := make([]time.Time, total), make([]time.Time, total)
	var mu sync.Mutex
	var all sync.WaitGroup
	all.Add(total)
	wake := []func(){startPaired(t, db, events, "stock", outbox.Handle("COUNTED", func(_ context.Context, _ pgx.Tx, e itemSold, _ outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		if handled[e.Version].IsZero() {
			handled[e.Version] = time.Now()
			all.Done()
		}
		return nil
	}))}
	if beside != nil {
		wake = append(wake, startPaired(t, db, events, busFailing, outbox.Handle("COUNTED", beside)))
	}
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for n := range total {
		<-tick.C
		require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
			return rec.Record(t.Context(), tx, itemSold{Item: n % items, Version: int64(n)})
		}))
		committed[n] = time.Now()
		for _, w := range wake {
			w()
		}
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(testenv.Patience):
		require.Fail(t, "not everything is handled")
	}
	took := make([]time.Duration, total)
	for n := range took {
		took[n] = max(0, handled[n].Sub(committed[n]))
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}

// startPaired runs a worker of a group with a pool of its own, and returns its Wake.
func startPaired(t *testing.T, like *pgxpool.Pool, events *outbox.Registry, group string, handler outbox.Handler) (wake func()) {
	t.Helper()
	db := openPool(t, like.Config())
	w, err := outbox.NewWorker(db, events, group, outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{
		Retry: outbox.RetryPolicy{MaxRetries: 1 << 20, RetryWait: time.Second}, Logger: slog.New(slog.DiscardHandler),
		From: outbox.FromStart,
	}}, handler)
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	return w.Waker().Wake
}
