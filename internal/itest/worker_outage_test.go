package itest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// reachable makes a pool whose connections fail while it is false.
func reachable(t *testing.T, conns int32) (db *pgxpool.Pool, set func(bool)) {
	var unavailable atomic.Bool
	db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.MaxConns = conns
		cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			if unavailable.Load() {
				return true, errors.New("PostgreSQL is unavailable")
			}
			return true, nil
		}
	})
	return db, func(yes bool) { unavailable.Store(!yes) }
}

// In an outage no worker can renew what it has. Those that come back first must not take the others for gone: what
// these have would count an attempt each, and be DEAD after some outages.
func TestWorkersOutliveLongOutage(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newWorkerFixture(t)
	const lease, workers, accounts = 5 * time.Second, 4, 40
	db, set := reachable(t, 12*workers)
	release, log := make(chan struct{}), new(workerLog)
	push := outbox.HandleNoTx("PUSHED", func(ctx context.Context, _ step, _ outbox.Metadata) error {
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	for range workers {
		testenv.Run(t, f.worker(db, "bank", outbox.WorkerConfig{Lease: lease, HandlerConfig: outbox.HandlerConfig{Logger: log.logger(), From: outbox.FromStart, Concurrency: accounts / workers}}, push).Run)
	}
	for a := range accounts {
		f.commit(step{fmt.Sprint("a", a), 1})
	}
	processing := func() bool {
		return f.count(`SELECT count(DISTINCT locked_by) FROM {schema}.event_delivery WHERE status = 'PROCESSING' AND locked_until > clock_timestamp()`) >= workers
	}
	require.Eventually(t, processing, testenv.Patience, 10*time.Millisecond)
	set(false)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE locked_until > clock_timestamp()`, 0)
	time.Sleep(lease / 10)
	set(true)
	require.Eventually(t, processing, testenv.Patience, 10*time.Millisecond)
	close(release)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, accounts)
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE last_error_code = 'stale'`), log.String())
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE attempt_count > 1`))
}

// A stop does not wait for what cleans: a deletion that is under way is rolled back, and another process may clean
// at once.
func TestWorkerStopsWhileItCleans(t *testing.T) {
	t.Parallel()
	for _, held := range []string{"by a lock", "by an archive", "by an archive that ignores its context", "by a lock, and its handler hangs"} {
		t.Run(held, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			release, archiving, hanging := make(chan struct{}), make(chan struct{}, 100), make(chan struct{})
			t.Cleanup(func() { close(release) })
			cfg := tidyWorker()
			cfg.StopTimeout = 2 * time.Second
			if strings.Contains(held, "archive") {
				cfg.Retention.Archive = func(ctx context.Context, _ pgx.Tx, _ []outbox.ArchivedEvent) error {
					archiving <- struct{}{}
					if strings.Contains(held, "ignores") {
						<-release
						return nil
					}
					<-ctx.Done()
					return ctx.Err()
				}
			}
			_, stop := f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
				if s.Account == "hangs" {
					close(hanging)
					<-release
				}
				return nil
			}))
			f.commit(step{"a", 1}, step{"b", 1})
			f.await(2)
			if strings.Contains(held, "hangs") {
				f.commit(step{"hangs", 1})
				<-hanging
			}
			const lease = `SELECT count(*) FROM {schema}.outbox_lease WHERE name = 'worker:bank' AND expires_at > clock_timestamp()`
			f.eventually(lease, 1)
			other, err := f.db.Begin(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, other.Rollback(context.Background())) }()
			blocked := func() bool { return len(archiving) > 0 }
			if strings.Contains(held, "lock") {
				_, err = other.Exec(t.Context(), f.sql(`SELECT FROM {schema}.outbox FOR KEY SHARE`)) // forbids to delete, and not to change
				require.NoError(t, err)
				var pid int
				require.NoError(t, other.QueryRow(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid))
				blocked = func() bool {
					return f.count(`SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))`, pid) > 0
				}
			}
			f.age()
			require.Eventually(t, blocked, testenv.Patience, time.Millisecond)
			began := time.Now()
			stop()
			require.Less(t, time.Since(began), cfg.StopTimeout+500*time.Millisecond)
			require.Zero(t, f.count(lease))
			require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.outbox WHERE aggregate_id <> 'hangs'`))
		})
	}
}

// A worker of a group that has left outbox, with all topics paused, asks PostgreSQL for nothing but the state of its
// group. It notices by that that an outage has ended.
func TestOutageOfAPausedGroupEnds(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f, cable := newWorkerFixture(t), new(brokenDialer)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DialFunc = cable.dial })
	const poll = time.Second
	cfg := outbox.WorkerConfig{PollInterval: poll, Lease: 3 * time.Second, HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	w := f.worker(db, "bank", cfg, f.effects("COUNTED", nil))
	require.NoError(t, w.Pause())
	testenv.Run(t, w.Run)
	f.eventually(`SELECT count(*) FROM {schema}.event_subscription`, 1)
	f.exec(`UPDATE {schema}.event_subscription SET state = 'left', relay = 'relay'`)
	fails := func() bool {
		return slices.ContainsFunc(w.Health().Outages, func(o outbox.Outage) bool { return o.What == "PostgreSQL" })
	}
	require.Eventually(t, func() bool { return strings.Contains(fmt.Sprint(w.Health().Reasons), "was moved to Kafka") }, testenv.Patience, 10*time.Millisecond)
	cable.breakAll()
	require.Eventually(t, fails, testenv.Patience, 10*time.Millisecond)
	cable.broken.Store(false)
	require.Eventually(t, func() bool { return !fails() }, 15*poll, 10*time.Millisecond)
}

// Another session locks the table of deliveries. That is no outage of PostgreSQL, and nothing reports one.
func TestLockOfDeliveriesIsNoOutage(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	log := new(workerLog)
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}}
	c := s.consumer(t, cfg, outbox.Handle("COUNTED", s.count))
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return c.Health().Partitions > 0 }, testenv.Patience, 10*time.Millisecond)
	lock, err := s.db.Begin(background)
	require.NoError(t, err)
	defer lock.Rollback(background)
	_, err = lock.Exec(background, s.sql(`LOCK TABLE {s}.event_delivery`))
	require.NoError(t, err)
	time.Sleep(20 * time.Second) // more than a poll for dead letters, and the longest wait for a lock
	require.NotContains(t, log.String(), "PostgreSQL fails")
	require.NoError(t, lock.Rollback(background))
}
