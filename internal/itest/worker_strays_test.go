package itest

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// What a worker has claimed is not left alone until its lease ends if the answer of PostgreSQL was lost,
// and it has not been attempted.
func TestWorkerFindsWhatItHasClaimed(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // it kills connections by their name
	f := newWorkerFixture(t)
	name := "worker-" + uuid.NewString()
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = name })
	goOn := make(chan struct{})
	hold := outbox.HandleNoTx("HELD", func(context.Context, step, outbox.Metadata) error { <-goOn; return nil })
	w := f.worker(db, "bank", outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}, hold, f.effects("COUNTED", nil))
	testenv.Run(t, w.Run)
	defer close(goOn)
	f.commit(step{"a", 1})
	f.await(1)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PROCESSING'`) == 1
	}, testenv.Patience, 10*time.Millisecond)

	f.exec(`INSERT INTO {schema}.event_delivery SELECT d.* FROM {schema}.event_delivery AS held, {schema}.event_delivery AS s, LATERAL jsonb_populate_record(s, jsonb_build_object(
		'id', 1000, 'event_id', gen_random_uuid(), 'order_key', 1000, 'status', 'PROCESSING', 'attempt_count', 1, 'locked_by', held.locked_by,
		'locked_until', now() + interval '1 h', 'processed_at', NULL)) AS d
		WHERE held.action = 'HELD' AND s.action = 'COUNTED'`)
	var killed time.Time
	require.Eventually(t, func() bool {
		if time.Since(killed) > time.Second { // in which a busy machine gets to it
			killed = time.Now()
			f.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, name)
			w.Waker().Wake()
		}
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE id = 1000 AND status = 'DONE' AND attempt_count = 1`) == 1
	}, testenv.Patience, 20*time.Millisecond) // the lease is for an hour
}
