package main

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// tinyBus is a bus on which a lap takes no time.
func tinyBus(t *testing.T) *bus {
	cfg := config{
		Addresses: services.Addresses{Postgres: testenv.Pool(t, nil).Config().ConnString(), Brokers: testenv.Brokers(t)}, // nothing goes there
		runs:      1, seconds: 0.5, warm: 0.1, workers: 4, partitions: 1, busEvents: 1000, busHot: 500, busOpen: 0.1,
	}
	s, err := connect(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	b, err := (&bench{Services: s, cfg: cfg, stderr: os.Stderr, report: &report.Report{}}).newBus(t.Context())
	require.NoError(t, err)
	b.river.job.River = riverTuning{Clients: 2, MaxWorkers: 20, Cooldown: time.Millisecond, Conns: 12}
	b.riverTx.job.River = b.river.job.River
	b.riverTx.job.River.InTx = true
	return b
}

// Each way is exact, and one that was not would not get away with it.
func TestLapsOfTheBusAreChecked(t *testing.T) {
	b, ctx := tinyBus(t), context.Background()
	for _, w := range []busWay{b.workers, b.river, b.riverTx} {
		u, err := b.lap(ctx, w, b.cfg.busEvents, 10)
		require.NoError(t, err)
		h := handled{b.next - u.Events, u.Events}
		require.Equal(t, b.cfg.busEvents/w.share, h.n)
		require.Positive(t, u.CPU)
		exec := func(sql string) {
			_, err := b.DB.Exec(ctx, services.InSchema(sql, w.schema), pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
		}
		exec(`DROP TABLE IF EXISTS {schema}.spare; CREATE TABLE {schema}.spare AS SELECT * FROM {schema}.effects`)
		for _, wrong := range []struct{ sql, want string }{
			{`DELETE FROM {schema}.effects WHERE id = 7`, "had"},
			{`INSERT INTO {schema}.effects (key, n) SELECT key, n FROM {schema}.effects WHERE id = 7`, "had"},
			{`UPDATE {schema}.effects SET n = n + 1 WHERE id = 7`, "had"},
			{`UPDATE {schema}.effects SET n = n - 1000000 WHERE id = 7`, "had"},
			{w.wrongRow(), "at the first attempt"},
		} {
			require.NoError(t, b.checkLap(ctx, w, h))
			exec(wrong.sql)
			require.ErrorContains(t, b.checkLap(ctx, w, h), wrong.want)
			exec(`TRUNCATE {schema}.effects; INSERT INTO {schema}.effects SELECT * FROM {schema}.spare`)
		}
	}
}

// wrongRow is a row of the queue that took two attempts.
func (w busWay) wrongRow() string {
	if w.ordered {
		return `UPDATE {schema}.event_delivery SET attempt_count = 2 WHERE id IN (SELECT max(id) FROM {schema}.event_delivery)`
	}
	return `UPDATE {schema}.river_job SET attempt = 2 WHERE id IN (SELECT max(id) FROM {schema}.river_job)`
}

// What is out of order is found where order is promised.
func TestDisorderOnTheBus(t *testing.T) {
	b, ctx := tinyBus(t), context.Background()
	require.NoError(t, b.newEffects(ctx, b.workers.schema))
	insert := func(key string, n int) {
		_, err := b.DB.Exec(ctx, services.InSchema(sqlEffect, b.workers.schema), key, n)
		require.NoError(t, err)
	}
	insert("a", 2)
	insert("b", 1)
	insert("a", 4)
	require.NoError(t, b.checkOrder(ctx, b.workers))
	insert("a", 3)
	require.ErrorContains(t, b.checkOrder(ctx, b.workers), "1 events")
	w := b.workers
	w.ordered = false
	require.NoError(t, b.checkOrder(ctx, w))
}

// A lap for latencies waits for the effects, and is checked.
func TestTimedLapsOfTheBus(t *testing.T) {
	b, ctx := tinyBus(t), context.Background()
	for _, run := range []func(context.Context, int, time.Duration) (*laps.Lap, error){b.workerLap, b.riverLap} {
		l, err := run(ctx, 50, b.lapTime())
		require.NoError(t, err)
		require.Len(t, l.Order, l.Total())
		require.Positive(t, l.Latencies().Median())
	}
}
