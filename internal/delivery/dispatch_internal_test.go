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
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A dispatcher whose lanes are all busy sends nothing to PostgreSQL, so it does not learn whether
// PostgreSQL works again. It must not log the end of an outage then.
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

// A lock that another session holds on a row, which this process has claimed without knowing it, keeps the process
// neither from other such rows nor from claiming. The locked row is released when the lock is gone.
func TestLockedUnknownClaimStopsNoClaims(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	_, err := db.Exec(t.Context(), pg.InSchema(`
		INSERT INTO {schema}.event_delivery (consumer_group, action, stream, position, status, attempt_count, max_attempts, next_retry_at, locked_by, locked_until, order_key, event_id, event_type, source, aggregate_type, aggregate_id, content_type, size, occurred_at, recorded_at, created_at, updated_at, payload)
		SELECT 'g', 'a', 's', n, 'PROCESSING', 1, 5, now(), 'w/7', now() + interval '1 h', 1000 + n, gen_random_uuid(), 't.t.t.v1', 'shop', 'T', n::text, 'application/json', 2, now(), now(), now(), now(), '{}'
		  FROM generate_series(1, 3) AS n`, schema))
	require.NoError(t, err)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	_, err = tx.Exec(t.Context(), pg.InSchema(`SELECT FROM {schema}.event_delivery WHERE position = 2 FOR UPDATE`, schema))
	require.NoError(t, err)

	taken, log := 0, slog.New(slog.DiscardHandler)
	d := &Dispatcher{
		cfg: &Rules{Rules: &handling.Rules{StopTimeout: 5 * time.Second}, PollInterval: time.Second, Lease: 600 * time.Millisecond}, outages: outage.NewLogs(log), log: log,
		store: NewStore(db, schema, "g", "w", time.Minute), Claimed: newClaimedSet(), changed: make(chan struct{}, 1),
		TakeNew: func(context.Context) (more, answered bool, err error) { taken++; return false, true, nil },
	}
	poll := func(want string) {
		t.Helper()
		began := time.Now()
		_, err := d.poll(t.Context())
		require.NoError(t, err)
		require.Less(t, time.Since(began), 2*time.Second, "it waited for the lock")
		var states string
		require.NoError(t, db.QueryRow(t.Context(), pg.InSchema(`SELECT string_agg(status, ' ' ORDER BY position) FROM {schema}.event_delivery`, schema)).Scan(&states))
		require.Equal(t, want, states)
	}
	d.signalUnknown()
	poll("PENDING PROCESSING PENDING")
	require.Equal(t, 1, taken)
	poll("PENDING PROCESSING PENDING")
	require.NoError(t, tx.Rollback(t.Context()))
	poll("PENDING PROCESSING PENDING") // its time has not come
	require.False(t, d.nextDue.IsZero())
	time.Sleep(time.Until(d.nextDue))
	poll("PENDING PENDING PENDING")
	require.Equal(t, 4, taken)
}

// The wait doubles up to the longest wait of the worker or of the stream, with a random fifth more or less.
// A wait of any length does not overflow.
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

// The policy of a handler precedes the policy of its stream, and the policy of a stream precedes that of
// the worker. A policy with a MaxRetries does not use the RetriesFor behind it.
func TestWorkerRetries(t *testing.T) {
	t.Parallel()
	allow := func(n int) func(error) int { return func(error) int { return n } }
	cfg := &Rules{
		Rules: &handling.Rules{
			Retry: handling.RetryPolicy{MaxRetries: 1, RetriesFor: allow(2), RetryWait: time.Second}, Log: slog.New(slog.DiscardHandler),
		},
		Streams: map[string]handling.RetryPolicy{
			"waits": {RetryWait: time.Minute}, "number": {MaxRetries: 3}, "never": {MaxRetries: -1}, "error": {RetriesFor: allow(4)},
			"both": {MaxRetries: 3, RetriesFor: allow(4)},
		},
	}
	processor := handling.NewProcessor(*cfg.Rules, handling.Routes{}, nil)
	for _, tt := range []struct {
		stream           string
		handler          handling.RetryPolicy
		retries, forGone int
	}{
		{"", handling.RetryPolicy{}, 2, 1},
		{"waits", handling.RetryPolicy{}, 2, 1},
		{"number", handling.RetryPolicy{}, 3, 3},
		{"never", handling.RetryPolicy{}, -1, -1},
		{"error", handling.RetryPolicy{}, 4, 1},
		{"both", handling.RetryPolicy{}, 4, 3},
		{"both", handling.RetryPolicy{RetryWait: time.Hour}, 4, 3},
		{"both", handling.RetryPolicy{MaxRetries: 5}, 5, 3},
		{"number", handling.RetryPolicy{RetriesFor: allow(6)}, 6, 3},
	} {
		retries := processor.Retries(tt.handler.Over(cfg.Of(tt.stream)), errors.New("no"), func(ask func()) { ask() })
		require.Equal(t, tt.retries, retries, "%+v", tt)
		require.Equal(t, tt.forGone, cfg.Of(tt.stream).MaxRetries, "%+v", tt)
	}
}
