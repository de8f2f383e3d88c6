package itest

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// If the transactions of all partitions took all connections of the pool, and each handler
// waited for one more, none would go on before its time is up. The consumers of a process
// share its pool.
func TestPoolSmallerThanPartitions(t *testing.T) {
	t.Parallel()
	for _, concurrency := range []int{0, 8} {
		t.Run(fmt.Sprint("concurrency ", concurrency), func(t *testing.T) {
			t.Parallel()
			testPoolSmallerThanPartitions(t, concurrency)
		})
	}
}

func testPoolSmallerThanPartitions(t *testing.T, concurrency int) {
	const partitions, each = 8, 20
	s := newConsumerFixture(t, partitions)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 4 })
	var calls atomic.Int64
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		calls.Add(1)
		if _, err := db.Exec(ctx, "SELECT pg_sleep(0.002)"); err != nil {
			return err
		}
		return s.count(ctx, tx, e, m)
	})
	s.sendTo(t, partitions, each)
	for i := range 2 {
		group := fmt.Sprint("pool-", i, s.topic)
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, Concurrency: concurrency}}
		c, err := outbox.NewConsumer(db, []kgo.Opt{kgo.SeedBrokers(s.brokers...)}, s.events, group, cfg, h)
		require.NoError(t, err)
		testenv.Run(t, c.Run)
	}
	want := map[string]int{}
	for i := range partitions {
		want[fmt.Sprint("p-", i)] = 2 * each
	}
	require.Eventually(t, func() bool { return fmt.Sprint(s.counts(t)) == fmt.Sprint(want) }, testenv.Patience, 50*time.Millisecond)
	require.EqualValues(t, 2*partitions*each, calls.Load(), "no handler had to be repeated")
}

// A handler that runs for long is logged with its event while it runs, and one that does
// not return makes the consumer unready, and at last dead: only a restart helps.
func TestSlowHandler(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	began, finish := make(chan struct{}, 1), make(chan struct{})
	group := "slow-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{SlowHandler: 200 * time.Millisecond, HandlerTimeout: 2 * time.Second}}
	c := s.plainConsumer(t, log, group, cfg, outbox.Handle("COUNTED", func(_ context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		began <- struct{}{}
		<-finish
		return s.count(background, tx, e, m)
	}))
	require.False(t, c.Health().Works)
	testenv.Run(t, c.Run)
	requireReady(t, c, 1)
	id := uuid.NewString()
	s.send(t, s.saleRecord(id, []byte(`{"product":"p","amount":1}`)))
	<-began
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "handler runs for long") }, time.Second, 10*time.Millisecond)
	for _, part := range []string{"level=WARN", "action=COUNTED", "event_id=" + id, "type=" + saleType, "offset=0"} {
		require.Contains(t, log.String(), part)
	}
	require.True(t, c.Health().Works, "it may be slow")
	requireNoWork(t, c, "COUNTED has not returned")
	require.Eventually(t, func() bool { return !c.Health().Live }, 5*time.Second, 10*time.Millisecond)
	require.InDelta(t, 4, strings.Count(log.String(), "handler runs for long"), 1, "after 0.2, 0.4, 0.8, 1.6 s and so on")
	close(finish)
	requireReady(t, c, 1)
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond, "it commits behind the handler")
}

// A transaction that does not begin, because others have all connections or lock the notes, is
// logged and reported while it waits.
func TestTransactionDoesNotBegin(t *testing.T) {
	t.Parallel()
	for name, hinder := range map[string]func(t *testing.T, s *consumerFixture, db *pgxpool.Pool) (end func()){
		"pool exhausted": func(t *testing.T, _ *consumerFixture, db *pgxpool.Pool) func() {
			conns := make([]*pgxpool.Conn, db.Config().MaxConns)
			for i := range conns {
				var err error
				conns[i], err = db.Acquire(background)
				require.NoError(t, err)
			}
			return func() {
				for _, conn := range conns {
					conn.Release()
				}
			}
		},
		"event_handled locked": func(t *testing.T, s *consumerFixture, _ *pgxpool.Pool) func() {
			tx, err := s.db.Begin(background)
			require.NoError(t, err)
			_, err = tx.Exec(background, s.sql(`LOCK TABLE {s}.event_handled`))
			require.NoError(t, err)
			return func() { _ = tx.Rollback(background) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testTransactionDoesNotBegin(t, hinder)
		})
	}
}

func testTransactionDoesNotBegin(t *testing.T, hinder func(*testing.T, *consumerFixture, *pgxpool.Pool) (end func())) {
	s := newConsumerFixture(t, 1)
	log := new(testenv.Buffer)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 2 })
	group := "waits-" + s.topic
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, SlowHandler: 200 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(log, nil)), From: outbox.FromStart}}
	c, err := outbox.NewConsumer(db, []kgo.Opt{kgo.SeedBrokers(s.brokers...)}, s.events, group, cfg, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	requireReady(t, c, 1)
	end := sync.OnceFunc(hinder(t, s, db))
	defer end()
	s.sendTo(t, 1, 1)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "a transaction does not begin") }, testenv.Patience, 10*time.Millisecond)
	requireNoWork(t, c, "has not begun")
	require.True(t, c.Health().Live, "no restart helps")
	end()
	requireReady(t, c, 1)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 1 }, testenv.Patience, 10*time.Millisecond)
}
