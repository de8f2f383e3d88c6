package itest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// oddTimes are those that PostgreSQL stores, and a CloudEvent cannot have.
var oddTimes = []string{"infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "294276-12-31"}

// A row with a time that RFC 3339 cannot write is for an operator. The relay goes on, and so does retention with an
// archive, whichever way the pool runs queries.
func TestOddTimes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			reader := h.follow(t)
			h.db = testenv.PoolIn(t, mode)
			for _, at := range oddTimes {
				h.commit(t, numbered(at, 1, 2)...)
				testenv.UpdateEvents(t, h.db, h.sql(`UPDATE {s}.outbox SET occurred_at = $1::text::timestamptz WHERE aggregate_id = $1 AND payload->>'version' = '1'`), at)
			}
			good := numbered("good", 1, 3)
			h.commit(t, good...)

			var mu sync.Mutex
			archived := map[string]time.Time{}
			cfg := quick
			cfg.Retention = outbox.RetentionConfig{PublishedFor: time.Second, CursorsFor: 500 * time.Millisecond, Archive: func(_ context.Context, _ pgx.Tx, rows []outbox.ArchivedEvent) error {
				mu.Lock()
				defer mu.Unlock()
				for _, row := range rows {
					if _, ok := archived[row.AggregateID]; !ok {
						archived[row.AggregateID] = row.OccurredAt.UTC()
					}
				}
				return nil
			}}
			testenv.Run(t, h.relay(t, cfg).Run)
			requireArrival(t, reader, good...)
			require.Eventually(t, func() bool {
				return h.countWhere(t, `SELECT count(*) FROM {s}.outbox_failed WHERE error_class = 'invalid_event' AND last_error LIKE '%occurred_at%'`) == len(oddTimes)
			}, testenv.Patience, 20*time.Millisecond)
			require.Eventually(t, func() bool { return h.count(t, "outbox") == 0 }, testenv.Patience, 20*time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			require.Len(t, archived, len(oddTimes)+1)
			for _, at := range oddTimes {
				require.Contains(t, []int{1, 9999}, archived[at].Year(), at)
			}
		})
	}
}

// The deliveries of a worker have a time that it can read.
func TestOddTimesOfWorkers(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	for _, at := range oddTimes {
		f.commit(step{at, 1})
		testenv.UpdateEvents(t, f.db, `UPDATE "`+f.schema+`".outbox SET occurred_at = $1::text::timestamptz WHERE aggregate_id = $1`, at)
	}
	f.commit(step{"good", 1})
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}, f.effects("COUNTED", nil))
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'undecodable'`) == len(oddTimes)
	}, testenv.Patience, 20*time.Millisecond)
	f.await(1)
}
