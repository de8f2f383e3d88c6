package itest

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// commitProxy leads connections to PostgreSQL. When it is armed, the connection of the next COMMIT of handlers dies in
// silence, in both directions: the two ends stay open, and neither learns of the other's end. All others live.
type commitProxy struct {
	target   [2]string // network and address
	executed bool      // the COMMIT still arrives
	armed    atomic.Bool
	dead     atomic.Bool

	listener net.Listener
	running  sync.WaitGroup
	mu       sync.Mutex
	conns    []net.Conn
}

// newCommitProxy returns a proxy, and a pool whose connections lead through it.
func newCommitProxy(t *testing.T, executed bool) (*commitProxy, *pgxpool.Pool) {
	t.Helper()
	p := &commitProxy{executed: executed}
	var err error
	p.listener, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(p.close) // behind the pool
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		p.target[0], p.target[1] = pgconn.NetworkAddress(cfg.ConnConfig.Host, cfg.ConnConfig.Port)
		cfg.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", p.listener.Addr().String())
		}
	})
	p.running.Go(p.accept)
	return p, db
}

func (p *commitProxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(p.target[0], p.target[1])
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		silent := new(atomic.Bool)
		carry := func(from, to net.Conn, up bool) {
			if p.carry(from, to, up, silent); !silent.Load() {
				_ = to.Close()
			}
		}
		p.running.Go(func() { carry(client, server, true) })
		p.running.Go(func() { carry(server, client, false) })
	}
}

// carry passes on what comes from one end to the other, until one of them ends.
func (p *commitProxy) carry(from, to net.Conn, up bool, silent *atomic.Bool) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		passes := !silent.Load()
		if up && passes && bytes.Contains(buffer[:n], []byte("CLOSE outbox_guard")) && p.armed.CompareAndSwap(true, false) {
			silent.Store(true)
			p.dead.Store(true)
			passes = p.executed
		}
		if !passes {
			continue
		}
		if _, err := io.Copy(to, bytes.NewReader(buffer[:n])); err != nil {
			return
		}
	}
}

func (p *commitProxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	for _, conn := range p.conns {
		_ = conn.Close()
	}
	p.mu.Unlock()
	p.running.Wait()
}

// commitIsLost is how long a COMMIT may keep others from being handled, whose connection has died in silence: 20 s, two
// answers of PostgreSQL, and what a busy machine needs.
const commitIsLost = 40 * time.Second

var lostCommits = map[string]struct{ executed bool }{"COMMIT has not arrived": {false}, "COMMIT is executed": {true}}

// The connection of a COMMIT dies in silence behind a proxy. The lane of a worker waits until PostgreSQL has said that
// it does not run the COMMIT, and goes on. It used to wait for as long as ten calls. Meanwhile log and Health say so.
func TestWorkerLosesACommit(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	for name, tt := range lostCommits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, log := newWorkerFixture(t), new(workerLog)
			proxy, db := newCommitProxy(t, tt.executed)
			cfg := outbox.WorkerConfig{PollInterval: 50 * time.Millisecond, HandlerConfig: outbox.HandlerConfig{
				From: outbox.FromStart, Concurrency: 1, SlowHandler: time.Second, Logger: log.logger()}}
			var once sync.Once
			w := f.worker(db, "bank", cfg, f.effects("COUNTED", func(step, outbox.Metadata) error {
				once.Do(func() { proxy.armed.Store(true) })
				return nil
			}))
			testenv.Run(t, w.Run)
			f.commit(step{"a", 1})
			require.Eventually(t, proxy.dead.Load, testenv.Patience, 10*time.Millisecond)
			died := time.Now()
			f.commit(step{"b", 1})
			require.Eventually(t, func() bool {
				h := w.Health()
				return !h.Works && h.Live && strings.Contains(strings.Join(h.Reasons, "; "), "a COMMIT has not returned for")
			}, commitIsLost/2, 10*time.Millisecond)
			require.Eventually(t, func() bool {
				return f.count(`SELECT count(*) FROM {schema}.effect WHERE account = 'b'`) == 1
			}, commitIsLost-time.Since(died), 50*time.Millisecond, log)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 2)
			f.await(2)
			require.Positive(t, log.count("a COMMIT does not return"), log)
			require.Eventually(t, func() bool { return w.Health().Works }, testenv.Patience, 10*time.Millisecond)
		})
	}
}

// The same holds for a partition of a consumer.
func TestConsumerLosesACommit(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	for name, tt := range lostCommits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, log := newParkingFixture(t, 1), new(testenv.Buffer)
			proxy, db := newCommitProxy(t, tt.executed)
			cfg := s.config(t)
			cfg.Schema, cfg.SlowHandler, cfg.Logger = s.schema, time.Second, slog.New(slog.NewTextHandler(log, nil))
			var once sync.Once
			c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events, s.group, cfg,
				s.handler("Handle", "COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error {
					once.Do(func() { proxy.armed.Store(true) })
					return nil
				}))
			require.NoError(t, err)
			testenv.Run(t, c.Run)
			s.send(t, s.sale("a", 1))
			require.Eventually(t, proxy.dead.Load, testenv.Patience, 10*time.Millisecond)
			died := time.Now()
			s.send(t, s.sale("b", 1))
			requireNoWork(t, c, "a COMMIT of "+s.topic)
			require.Eventually(t, func() bool { return len(s.journal(t, "COUNTED", "b")) == 1 }, commitIsLost-time.Since(died), 50*time.Millisecond, log)
			s.awaitJournal(t, "COUNTED", "a", 1)
			s.awaitOffset(t, 0, 2)
			require.Contains(t, log.String(), "a COMMIT does not return")
			requireReady(t, c, 1)
		})
	}
}

// A COMMIT that PostgreSQL runs is not given up, however long PostgreSQL waits for its standby.
func TestLongCommitIsNoLostOne(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	f, log := newWorkerFixture(t), new(workerLog)
	f.lateCommits(26 * time.Second) // two questions and more
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, SlowHandler: time.Second, Logger: log.logger()}}
	var calls atomic.Int64
	f.commit(step{"a", 1})
	f.start(cfg, f.effects("COUNTED", func(step, outbox.Metadata) error { calls.Add(1); return nil }))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 1)
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.effect`))
	require.EqualValues(t, 1, calls.Load())
	require.Positive(t, log.count("a COMMIT does not return"), log)
}
