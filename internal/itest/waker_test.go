package itest

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// newWaker runs a waker that has a pool of its own, as another process would.
func newWaker(t *testing.T, schema string, configure func(*pgxpool.Config)) *outbox.Waker {
	t.Helper()
	w, err := outbox.NewWaker(testenv.Pool(t, configure), outbox.WakerConfig{Schema: schema})
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	return w
}

// quietFor is longer than who leads looks often after an event.
const quietFor = 500 * time.Millisecond

// A process that only records, or a standby, wakes the leader in another process, at once and after
// a silence.
func TestWakeFromOtherProcess(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := outbox.RelayConfig{PollInterval: time.Hour}
	testenv.Run(t, h.relay(t, cfg).Run)
	require.Eventually(t, func() bool { return h.relayStatus(t, "default").Holder != "" }, testenv.Patience, time.Millisecond)
	standby := *h
	standby.db = testenv.Pool(t, nil)
	waiting := standby.relay(t, cfg)
	testenv.Run(t, waiting.Run)
	awaitListener(t, h.db, h.schema, "relay:default")
	version := 0
	for _, waker := range []*outbox.Waker{newWaker(t, h.schema, nil), waiting.Waker()} {
		for _, silence := range []time.Duration{0, time.Millisecond, 200 * time.Millisecond, quietFor, quietFor} {
			time.Sleep(silence)
			version++
			events := numbered("key", version, 1)
			require.NoError(t, waker.InTx(t.Context(), func(tx pgx.Tx) error { return h.record(t.Context(), tx, events...) }))
			requireArrival(t, reader, events...)
		}
	}
}

// listener returns the connection of the process that leads, which has the lock of its name and hears notifications;
// 0 if there is none.
func listener(t *testing.T, db *pgxpool.Pool, schema, name string) (pid int) {
	t.Helper()
	require.NoError(t, db.QueryRow(background, `
		SELECT coalesce(max(l.pid), 0) FROM pg_locks AS l, pg_namespace AS n, hashtextextended($2, n.oid::bigint) AS key
		 WHERE n.nspname = $1 AND l.locktype = 'advisory' AND (l.classid::bigint << 32 | l.objid::bigint) = key`, schema, name).Scan(&pid))
	return pid
}

func awaitListener(t *testing.T, db *pgxpool.Pool, schema, name string) (pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		pid = listener(t, db, schema, name)
		return pid != 0
	}, testenv.Patience, time.Millisecond)
	return pid
}

// One process of a group of workers is woken by others, and when it is gone, another one is.
func TestWorkerIsWokenFromOtherProcess(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f := newWorkerFixture(t)
	start := func(name string) (stop func()) {
		db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = name })
		w := f.worker(db, "group", outbox.WorkerConfig{PollInterval: time.Hour, HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, f.effects("COUNTED", nil))
		return testenv.Run(t, w.Run)
	}
	waker := newWaker(t, f.schema, nil)
	stop := start("first of " + f.schema)
	first := awaitListener(t, f.db, f.schema, "worker:group")
	n := 0
	step1 := func() {
		t.Helper()
		n++
		require.NoError(t, waker.InTx(t.Context(), func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, step{Account: "a", N: n}) }))
		require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) == n }, testenv.Patience, time.Millisecond)
	}
	step1()
	time.Sleep(quietFor)
	step1()
	f.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, "first of "+f.schema)
	require.Eventually(t, func() bool { pid := listener(t, f.db, f.schema, "worker:group"); return pid != 0 && pid != first }, testenv.Patience, time.Millisecond, "it connects again")
	step1()
	stop()
	require.Eventually(t, func() bool { return listener(t, f.db, f.schema, "worker:group") == 0 }, testenv.Patience, time.Millisecond, "PostgreSQL may need a moment")
	start("second of " + f.schema)
	awaitListener(t, f.db, f.schema, "worker:group")
	step1()
}

// A process whose own relay leads wakes a worker, and a relay of another name, that lead in other processes.
func TestLeaderWakesOtherProcesses(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := outbox.RelayConfig{PollInterval: time.Hour}
	own := h.relay(t, cfg)
	testenv.Run(t, own.Run)
	awaitListener(t, h.db, h.schema, "relay:default")
	other := *h
	other.db = testenv.Pool(t, nil)
	otherCfg := cfg
	otherCfg.Name = "other"
	testenv.Run(t, other.relay(t, otherCfg).Run)
	f := &workerFixture{t: t, db: testenv.Pool(t, nil), schema: h.schema}
	f.exec(`CREATE TABLE {schema}.effect (id bigserial, action text, account text, n int)`)
	var err error
	f.events, err = outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account).Topic(h.topic+"-steps"))
	require.NoError(t, err)
	steps, err := outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
	worker, err := outbox.NewWorker(f.db, f.events, "group", f.config(outbox.WorkerConfig{PollInterval: time.Hour, HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}), f.effects("COUNTED", nil))
	require.NoError(t, err)
	testenv.Run(t, worker.Run)
	awaitListener(t, h.db, h.schema, "relay:other")
	awaitListener(t, h.db, h.schema, "worker:group")
	for n := 1; n <= 3; n++ {
		time.Sleep(quietFor)
		events := numbered("key", n, 1)
		require.NoError(t, own.Waker().InTx(t.Context(), func(tx pgx.Tx) error {
			return errors.Join(h.record(t.Context(), tx, events...), steps.Record(t.Context(), tx, step{"a", n}))
		}))
		f.await(n)
		require.Eventually(t, func() bool { return h.relayStatus(t, "other").Pending == 0 }, testenv.Patience, time.Millisecond)
		requireArrival(t, reader, events...)
	}
}

// A process with many wake-ups notifies others of some at once, and then at most once in 250 ms, of the last commit
// too; and not at all if all that it runs leads.
func TestNotificationsAreFew(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	conn, err := h.db.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), "LISTEN "+pgx.Identifier{wakeup.Channel(h.schema)}.Sanitize())
	require.NoError(t, err)
	heard := func(within time.Duration) bool {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		_, err := conn.Conn().WaitForNotification(ctx)
		return err == nil
	}
	waker := newWaker(t, h.schema, nil)
	began, notifications := time.Now(), 0
	for time.Since(began) < time.Second {
		for range 20 { // more than 100 in each interval, however slow the machine is: up to 100 are notified each
			waker.Wake()
		}
		if heard(time.Millisecond) {
			notifications++
		}
	}
	took := time.Since(began)
	require.True(t, heard(testenv.Patience), "of the last one")
	const complete = 100
	require.LessOrEqual(t, notifications, complete+1+int(took/wakeup.Interval))
	require.GreaterOrEqual(t, notifications, 1)
	for heard(2 * wakeup.Interval) { // one more may have been on its way
		continue
	}
	relay := h.relay(t, outbox.RelayConfig{PollInterval: time.Hour})
	testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return relay.Health().Leading }, testenv.Patience, time.Millisecond)
	for range 10 {
		relay.Waker().Wake()
	}
	require.False(t, heard(2*wakeup.Interval), "the leader notifies nobody")
}

// A request that is left when a process stops is served first.
func TestLastWakeIsSent(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	testenv.Run(t, h.relay(t, outbox.RelayConfig{PollInterval: time.Hour}).Run)
	awaitListener(t, h.db, h.schema, "relay:default")
	for n := range 3 {
		time.Sleep(quietFor)
		waker, err := outbox.NewWaker(testenv.Pool(t, nil), outbox.WakerConfig{Schema: h.schema})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		events := numbered("key", n+1, 1)
		require.NoError(t, waker.InTx(ctx, func(tx pgx.Tx) error { return h.record(ctx, tx, events...) }))
		stop()
		require.NoError(t, waker.Run(ctx), "it had no time to begin")
		requireArrival(t, reader, events...)
	}
}

// A waker that has never run is found by its wake-ups: other processes are not notified.
func TestForgottenWaker(t *testing.T) {
	t.Parallel()
	db := testenv.Pool(t, nil)
	synctest.Test(t, func(t *testing.T) {
		var log workerLog
		w, err := outbox.NewWaker(db, outbox.WakerConfig{Schema: "forgotten", Logger: log.logger()})
		require.NoError(t, err)
		for range 100 {
			w.Wake()
			time.Sleep(40 * time.Millisecond)
		}
		require.Empty(t, log.String(), "Run may come later")
		time.Sleep(2 * time.Second)
		for range 3 {
			w.Wake()
		}
		require.Equal(t, 1, log.count("level=WARN"))
		require.Contains(t, log.String(), "call Waker.Run")
	})
}

// What a waker is not given is named, and what a transaction fails with is returned.
func TestWakerErrors(t *testing.T) {
	t.Parallel()
	_, err := outbox.NewWaker(nil, outbox.WakerConfig{Schema: "a\x00"})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	require.ErrorContains(t, err, "field Schema")
	waker, err := outbox.NewWaker(testenv.Pool(t, nil), outbox.WakerConfig{})
	require.NoError(t, err)
	require.ErrorIs(t, waker.InTx(t.Context(), func(pgx.Tx) error { return errTest }), errTest)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	for range 2 {
		go func() { ended <- waker.Run(ctx) }()
	}
	require.ErrorIs(t, <-ended, outbox.ErrRunning)
	stop()
	require.NoError(t, <-ended)
}

// No notification is sent within a transaction that records events: its commit would have to queue for a lock of the
// whole server. The protocol says so.
func TestNotificationsAreOutsideOfTransactions(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	h := newRelayFixture(t)
	var wire wiretap
	waker := newWaker(t, h.schema, wire.tap)
	for n := range 30 {
		require.NoError(t, waker.InTx(t.Context(), func(tx pgx.Tx) error { return h.record(t.Context(), tx, numbered("key", n+1, 1)...) }))
		time.Sleep(wakeup.Interval / 10)
	}
	require.Eventually(t, func() bool {
		wire.mu.Lock()
		defer wire.mu.Unlock()
		return wire.notified > 2
	}, testenv.Patience, time.Millisecond)
	wire.mu.Lock()
	defer wire.mu.Unlock()
	require.GreaterOrEqual(t, wire.transactions, 30)
	require.Zero(t, wire.within)
}

// wiretap reads what clients send: notifications, transactions, and notifications within these.
type wiretap struct {
	mu                             sync.Mutex
	transactions, notified, within int
}

func (w *wiretap) tap(cfg *pgxpool.Config) {
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &tapped{Conn: conn, wire: w, statements: map[string]string{}}, nil
	}
}

// tapped is a connection whose messages to the server are read along.
type tapped struct {
	net.Conn
	wire       *wiretap
	begun      bool // beyond the startup message
	open       bool // a transaction
	statements map[string]string
	rest       []byte
}

func (c *tapped) Write(b []byte) (int, error) {
	c.wire.mu.Lock()
	c.read(b)
	c.wire.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *tapped) read(b []byte) {
	if !c.begun { // the startup message has no type
		c.begun = true
		return
	}
	const head = 5
	c.rest = append(c.rest, b...)
	for len(c.rest) >= head {
		size := 1 + int(c.rest[1])<<24 + int(c.rest[2])<<16 + int(c.rest[3])<<8 + int(c.rest[4])
		if len(c.rest) < size {
			return
		}
		kind, body := c.rest[0], c.rest[head:size]
		switch kind {
		case 'Q':
			c.statement(strings.TrimRight(string(body), "\x00"))
		case 'P':
			var m pgproto3.Parse
			if m.Decode(body) == nil {
				c.statements[m.Name] = m.Query
			}
		case 'B':
			var m pgproto3.Bind
			if m.Decode(body) == nil {
				c.statement(c.statements[m.PreparedStatement])
			}
		}
		c.rest = c.rest[size:]
	}
}

func (c *tapped) statement(sql string) {
	switch sql = strings.ToLower(sql); {
	case strings.HasPrefix(sql, "begin"):
		c.open = true
		c.wire.transactions++
	case strings.HasPrefix(sql, "commit"), strings.HasPrefix(sql, "rollback"):
		c.open = false
	case strings.Contains(sql, "notify"):
		c.wire.notified++
		if c.open {
			c.wire.within++
		}
	}
}
