package itest

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// icebox dials connections that freeze together, as those of a process that gets SIGSTOP: then they neither read nor
// write, and PostgreSQL does not see that they are closed.
type icebox struct {
	frozen atomic.Bool
	thawed chan struct{}

	before string      // the text of a statement: the connection that is to send it freezes
	all    bool        // and so do the others
	armed  atomic.Bool // that is to happen
}

func newIcebox() *icebox { return &icebox{thawed: make(chan struct{})} }

// freeze freezes the connections until the test ends.
func (b *icebox) freeze(t *testing.T) {
	b.frozen.Store(true)
	t.Cleanup(func() { close(b.thawed) })
}

// arm has a connection freeze that is to send the statement.
func (b *icebox) arm(t *testing.T) {
	b.armed.Store(true)
	t.Cleanup(func() { close(b.thawed) })
}

func (b *icebox) wait() {
	if b.frozen.Load() {
		<-b.thawed
	}
}

func (b *icebox) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if b.before == "" || b.all {
		b.wait()
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &frozenConn{Conn: conn, box: b}, nil
}

func (b *icebox) pool(t *testing.T) *pgxpool.Pool {
	return testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DialFunc = b.dial })
}

type frozenConn struct {
	net.Conn
	box   *icebox
	alone atomic.Bool // frozen
}

func (c *frozenConn) wait() {
	if c.alone.Load() {
		<-c.box.thawed
	} else if c.box.before == "" || c.box.all {
		c.box.wait()
	}
}

// Read implements net.Conn.
func (c *frozenConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.wait()
	return n, err
}

// Write implements net.Conn.
func (c *frozenConn) Write(p []byte) (int, error) {
	if c.box.before != "" && strings.Contains(string(p), c.box.before) && c.box.armed.Swap(false) {
		c.alone.Store(true)
		c.box.frozen.Store(true)
	}
	c.wait()
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *frozenConn) Close() error {
	c.wait()
	return c.Conn.Close()
}

// A pool with one connection suffices, also under another isolation level.
func TestPoolOfOne(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a setting of the session
	const events = 200
	one := func(t *testing.T) *pgxpool.Pool {
		return testenv.Pool(t, func(cfg *pgxpool.Config) {
			cfg.MaxConns = 1
			cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "repeatable read"
		})
	}
	t.Run("worker", func(t *testing.T) {
		t.Parallel()
		f := newWorkerFixture(t)
		cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
		testenv.Run(t, f.worker(one(t), "bank", cfg, f.effects("COUNTED", nil)).Run)
		for n := range events {
			f.commit(step{fmt.Sprint("a", n%20), n/20 + 1})
		}
		require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) == events }, 20*time.Second, 10*time.Millisecond)
		f.requireOrder()
	})
	t.Run("consumer", func(t *testing.T) {
		t.Parallel()
		s := newConsumerFixture(t, 4)
		s.db = one(t)
		testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count)).Run)
		admin := testenv.Pool(t, nil)
		for n := range events {
			r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p%d","amount":1}`, n%20))
			r.Partition, r.Key = int32(n%4), fmt.Append(nil, n%20)
			s.send(t, r)
		}
		require.Eventually(t, func() bool {
			var n int
			return admin.QueryRow(background, s.sql(`SELECT coalesce(sum(n), 0) FROM {s}.counts`)).Scan(&n) == nil && n == events
		}, 20*time.Second, 50*time.Millisecond)
	})
}

// A handler's settings end with its transaction, and so do its locks.
func TestHandlerSettingsEnd(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f := newWorkerFixture(t)
	f.exec(`CREATE FUNCTION {schema}.hidden() RETURNS text LANGUAGE sql AS $$ SELECT set_config('app.tenant', 'hidden', false) $$`)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.MaxConns = 2
		cfg.ConnConfig.RuntimeParams["application_name"] = "shop"
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET search_path = pg_catalog; SET TimeZone = 'Asia/Tokyo'`)
			return err
		}
	})
	const settings = `SELECT concat_ws('|', current_setting('search_path'), current_setting('statement_timeout'), current_setting('TimeZone'), current_setting('application_name'),
		nullif(current_setting('app.tenant', true), ''), current_setting('lock_timeout'), (SELECT nullif(count(*), 0) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 1 AND objid = 4711))`
	var found testenv.Kept[string]
	see := func(ctx context.Context, tx pgx.Tx) error {
		var is string
		err := tx.QueryRow(ctx, settings).Scan(&is)
		found.Add(is)
		return err
	}
	sets := []string{`SET statement_timeout = '7s'`, `SELECT set_config('search_path', 'pg_temp', false)`, `SET TimeZone = 'UTC'`, `SET application_name = 'x'`,
		f.sql(`SELECT {schema}.hidden()`), `SELECT pg_advisory_lock(4711)`, `SET lock_timeout = '3s'`, `SELECT 1`}
	errs := map[int]error{2: errTest}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	cfg.Retry.MaxRetries, cfg.Retry.MaxOutage = -1, -1
	w := f.worker(db, "bank", cfg, outbox.Handle("SET", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
		if err := see(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sets[s.N-1]); err != nil {
			return err
		}
		return errs[s.N%4]
	}))
	testenv.Run(t, w.Run)
	for n := range sets {
		for range 4 {
			f.commit(step{uuid.NewString(), n + 1})
			f.commit(step{uuid.NewString(), n + 1})
		}
	}
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, 8*len(sets))
	for _, is := range found.All() {
		require.Equal(t, "pg_catalog|0|Asia/Tokyo|shop|0", is)
	}
	for range 2 {
		var is string
		require.NoError(t, db.QueryRow(background, settings).Scan(&is))
		require.Equal(t, "pg_catalog|0|Asia/Tokyo|shop|0", is, "of the pool")
	}
}

// A worker that is frozen inside the transaction of its handler, or in front of its COMMIT, holds up only the events of
// this transaction, and these no longer than a call may take.
func TestFrozenWorkerHoldsUpNobody(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a pooler would not keep the session
	for name, c := range map[string]struct {
		before string
		most   time.Duration
	}{
		"inside its handler":     {"", 25 * time.Second},
		"in front of its COMMIT": {"CLOSE outbox_guard", 40 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			box, entered, hold := newIcebox(), make(chan struct{}), make(chan struct{})
			box.before, box.all = c.before, true
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, HandlerTimeout: 6 * time.Second}, Lease: 2 * time.Second, PollInterval: 50 * time.Millisecond}
			cfg.Retry.MaxRetries, cfg.Retry.MaxOutage = -1, -1
			frozen := f.worker(box.pool(t), "bank", cfg, f.effects("COUNTED", func(step, outbox.Metadata) error {
				if c.before != "" {
					return nil
				}
				close(entered)
				<-hold
				return errors.New("frozen")
			}))
			testenv.Run(t, frozen.Run)
			if c.before != "" {
				box.arm(t)
			}
			f.commit(step{"frozen", 1})
			if c.before == "" {
				<-entered
				box.freeze(t)
				t.Cleanup(func() { close(hold) })
			} else {
				require.Eventually(t, box.frozen.Load, testenv.Patience, time.Millisecond)
			}
			log := new(workerLog)
			cfg.Logger = log.logger()
			var workers []*outbox.Worker
			for range 2 {
				w, _ := f.start(cfg, f.effects("COUNTED", nil))
				workers = append(workers, w)
			}
			began := time.Now()
			const accounts, steps = 70, 10 // as many keys as there are locks
			for n := 1; n <= steps; n++ {
				for a := range accounts {
					f.commit(step{fmt.Sprint("a", a), n})
				}
			}
			require.Eventually(t, func() bool {
				return f.count(`SELECT count(*) FROM {schema}.effect WHERE account <> 'frozen'`) == accounts*steps
			}, c.most, 10*time.Millisecond)
			t.Log("the others took", time.Since(began))
			f.eventually(`SELECT count(*) FROM {schema}.effect`, accounts*steps+1)
			t.Log("all took", time.Since(began))
			require.Less(t, time.Since(began), c.most)
			require.Zero(t, log.count("PostgreSQL fails"), log.String())
			require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`))
			for _, w := range workers {
				require.Eventually(t, func() bool { return w.Health().Works }, testenv.Patience, 10*time.Millisecond, "%v", w.Health().Reasons)
			}
		})
	}
}

// Health and log name the session that holds the lock of the fan-out, which any role may take. It is no outage of
// PostgreSQL.
func TestHolderOfLockIsNamed(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f := newWorkerFixture(t)
	log := new(workerLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}, PollInterval: 50 * time.Millisecond}
	w, _ := f.start(cfg, f.effects("COUNTED", nil))
	f.commit(step{"a", 1})
	f.await(1)
	stranger, err := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "stranger" }).Acquire(background)
	require.NoError(t, err)
	defer stranger.Release()
	sum := sha256.Sum256([]byte("outbox.event_subscription." + f.schema + ".bank"))
	lock := int64(binary.BigEndian.Uint64(sum[:8]))
	_, err = stranger.Exec(background, `SELECT pg_advisory_lock($1)`, lock)
	require.NoError(t, err)
	f.commit(step{"a", 2})
	require.Eventually(t, func() bool {
		h := w.Health()
		return !h.Works && strings.Contains(strings.Join(h.Reasons, "\n"), `application "stranger"`)
	}, testenv.Patience, 50*time.Millisecond, "%v", w.Health().Reasons)
	t.Log(w.Health().Reasons)
	require.Contains(t, log.String(), "application=stranger")
	require.NotContains(t, log.String(), "PostgreSQL fails")
	_, err = stranger.Exec(background, `SELECT pg_advisory_unlock($1)`, lock)
	require.NoError(t, err)
	f.await(2)
	require.Eventually(t, func() bool { return w.Health().Works }, testenv.Patience, 10*time.Millisecond)
}

// The clock of the database is set back by an hour after PostgreSQL has started. What a worker had that is gone is
// taken over, whether it was claimed before or after that. What was due before is handled at once, and what had to wait
// waits no longer than it had to, whether its worker starts then or runs on.
func TestWorkerClockSetBack(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // search_path
	f := newWorkerFixture(t)
	clock := pgx.Identifier{f.schema + " clock"}.Sanitize()
	f.exec(`CREATE SCHEMA ` + clock)
	t.Cleanup(func() { f.exec(`DROP SCHEMA ` + clock + ` CASCADE`) })
	for _, name := range []string{"clock_timestamp", "now"} {
		f.exec(`CREATE FUNCTION ` + clock + `.` + name + `() RETURNS timestamptz LANGUAGE sql AS $$ SELECT pg_catalog.` + name + `() - interval '1 hour' $$`)
	}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["search_path"] = clock + `, pg_catalog` })
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Lease: 2 * time.Second, PollInterval: 50 * time.Millisecond}
	f.commit(step{"before", 1}, step{"after", 1}, step{"due", 1}, step{"waits", 1})
	stop := testenv.Run(t, f.worker(db, "bank", cfg, f.effects("COUNTED", func(step, outbox.Metadata) error { return errTest })).Run)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE attempt_count > 0`, 4)
	stop()
	f.exec(`UPDATE {schema}.event_delivery SET status = 'PROCESSING', locked_by = 'gone/1', updated_at = clock_timestamp(),
		locked_until = clock_timestamp() + interval '2 s' - CASE aggregate_id WHEN 'before' THEN interval '0' ELSE interval '1 hour' END
		WHERE aggregate_id IN ('before', 'after')`)
	f.exec(`UPDATE {schema}.event_delivery SET updated_at = clock_timestamp(),
		next_retry_at = clock_timestamp() + CASE aggregate_id WHEN 'due' THEN interval '0' ELSE interval '30 min' END WHERE aggregate_id IN ('due', 'waits')`)
	testenv.Run(t, f.worker(db, "bank", cfg, f.effects("COUNTED", nil)).Run)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE locked_by = 'gone/1'`) == 0
	}, 20*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'due' AND status = 'DONE'`) == 1
	}, 20*time.Second, 10*time.Millisecond)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'waits' AND status = 'PENDING'
		AND next_retry_at BETWEEN clock_timestamp() - interval '31 min' AND clock_timestamp() - interval '29 min'`, 1)

	// It is set back by another hour.
	for _, name := range []string{"clock_timestamp", "now"} {
		f.exec(`CREATE OR REPLACE FUNCTION ` + clock + `.` + name + `() RETURNS timestamptz LANGUAGE sql AS $$ SELECT pg_catalog.` + name + `() - interval '2 hours' $$`)
	}
	f.exec(`UPDATE {schema}.event_delivery SET updated_at = clock_timestamp() - interval '1 hour', next_retry_at = clock_timestamp() - interval '1 hour' WHERE aggregate_id = 'waits'`)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE aggregate_id = 'waits' AND status = 'DONE'`) == 1
	}, 20*time.Second, 10*time.Millisecond)
}

// One transaction of a consumer is cut off in front of its COMMIT, when it has locked the keys of its events. The
// others go on, and park what fails.
func TestConsumerBesideFrozenTransaction(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	s := newParkingFixture(t, 2)
	box := newIcebox()
	box.before = "CLOSE outbox_guard"
	s.db = box.pool(t)
	cfg, log := s.config(t), new(workerLog)
	cfg.Logger = log.logger()
	var failed atomic.Bool
	handler := s.handler("Handle", "SOLD", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if e.Amount == 2 && !failed.Swap(true) {
			return errPlay
		}
		return nil
	})
	c := s.groupConsumer(t, s.group, cfg, handler)
	testenv.Run(t, c.Run)
	box.arm(t)
	first := s.sale("same", 1)
	s.send(t, first)
	require.Eventually(t, box.frozen.Load, testenv.Patience, time.Millisecond)
	began := time.Now()
	for n := 2; n <= 50; n++ {
		r := s.sale("same", n)
		r.Partition = 1
		s.send(t, r)
	}
	require.Eventually(t, func() bool { return len(s.journal(t, "SOLD", "same")) >= 49 }, 30*time.Second, 10*time.Millisecond)
	t.Log("the others took", time.Since(began))
	require.NotContains(t, log.String(), "PostgreSQL fails")
	require.Contains(t, log.String(), "holds")
}

// The same for the locks of all keys of a consumer group. No event is handled, so the consumer is not ready.
func TestHolderOfKeysIsNamed(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	s := newParkingFixture(t, 1)
	cfg, log := s.config(t), new(workerLog)
	cfg.Logger, cfg.SlowHandler = log.logger(), time.Second
	c := s.groupConsumer(t, s.group, cfg, s.handler("Handle", "SOLD", nil))
	testenv.Run(t, c.Run)
	requireReady(t, c, 1)
	stranger, err := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "stranger" }).Begin(background)
	require.NoError(t, err)
	defer func() { _ = stranger.Rollback(background) }()
	_, err = stranger.Exec(background, s.sql(`SELECT {s}.outbox_lock_keys($1, ARRAY(SELECT generate_series(1, 10000)::bigint))`), s.group)
	require.NoError(t, err)
	s.send(t, s.sale("a", 1))
	requireNoWork(t, c, `application "stranger"`)
	require.Contains(t, log.String(), "application=stranger")
	require.NotContains(t, log.String(), "PostgreSQL fails")
	require.NoError(t, stranger.Rollback(background))
	require.Eventually(t, func() bool { return len(s.journal(t, "SOLD", "a")) == 1 }, testenv.Patience, 10*time.Millisecond)
	requireReady(t, c, 1)
}
