package itest

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// statementLog counts the statements of a pool by their text.
type statementLog struct {
	mu    sync.Mutex
	texts map[string]int
}

func (s *statementLog) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.texts == nil {
		s.texts = map[string]int{}
	}
	s.texts[strings.Join(strings.Fields(text), " ")]++
}

// since returns what was counted since the last call.
func (s *statementLog) since() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	texts := s.texts
	s.texts = nil
	return texts
}

func (s *statementLog) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.note(d.SQL)
	return ctx
}
func (*statementLog) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (*statementLog) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (s *statementLog) TraceBatchQuery(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchQueryData) {
	s.note(d.SQL)
}
func (*statementLog) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// A quiet leader runs its polls, renewals and rounds of retries, and a quiet member of a group its polls, rounds of the
// take-over and counts. None runs a statement for what it says of itself: the renewals carry it, each third of a lease.
func TestQuietLeaderRunsNoMoreStatements(t *testing.T) {
	// Not parallel: windows open while other transactions end.
	testenv.Direct(t)
	s := newConsumerFixture(t, 1)
	const lease = 9 * time.Second
	quiet := slog.New(slog.DiscardHandler)
	pools := map[string]*statementLog{"relay": {}, "consumer": {}, "worker": {}}
	pool := func(part string) *pgxpool.Pool {
		return testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = pools[part] })
	}
	relay, err := outbox.NewRelay(pool("relay"), testenv.KafkaOpts(s.brokers), outbox.RelayConfig{Schema: s.schema, DeliveryTimeout: time.Second, Lease: lease, Logger: quiet})
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(pool("consumer"), testenv.KafkaOpts(s.brokers), s.events, "c-"+s.topic, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: quiet, From: outbox.FromStart},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	worker, err := outbox.NewWorker(pool("worker"), s.events, "w-"+s.topic, outbox.WorkerConfig{
		Lease: lease, HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: quiet},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	testenv.Run(t, consumer.Run)
	testenv.Run(t, worker.Run)
	awaitHealth(t, relay, true, true)
	requireReady(t, consumer, 1)
	require.Eventually(t, func() bool { // the leader and the members have said how they are, and say it again at a renewal
		return s.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE state ->> 'epoch' = epoch::text AND state ->> 'works' = 'true'`) == 1 &&
			s.countWhere(t, `SELECT count(*) FROM {s}.event_member WHERE works`) == 2
	}, testenv.Patience, 50*time.Millisecond)
	for _, l := range pools {
		l.since()
	}
	began := time.Now()
	time.Sleep(2 * lease / 3)
	renewals := int(time.Since(began)/(lease/3)) + 1
	known := []string{"WITH ids AS MATERIALIZED", "WITH RECURSIVE names AS", "WITH page AS MATERIALIZED", "set_config(", "outbox_move_due("} // polls, rounds of retries, settings, looks at delayed events
	for part, l := range pools {
		leases, members := 0, 0
		for text, n := range l.since() {
			switch {
			case strings.Contains(text, "outbox_lease SET expires_at"):
				leases += n
			case strings.Contains(text, "event_member AS m (consumer_group"):
				members += n
			case part == "relay":
				require.True(t, slices.ContainsFunc(known, func(part string) bool { return strings.Contains(text, part) }), "%d times: %s", n, text)
			}
		}
		require.LessOrEqual(t, leases, renewals, part)
		require.LessOrEqual(t, members, renewals, part)
		require.True(t, leases+members > 0 || part == "consumer", part) // a consumer renews more seldom
	}
}
