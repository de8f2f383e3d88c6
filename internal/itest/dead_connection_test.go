package itest

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// deadConn is a connection that dies in silence when it is to send a statement, as behind a firewall that has forgotten
// it: what is sent does not arrive, and nothing comes back.
type deadConn struct {
	net.Conn
	statement string
	arrives   bool // it dies only behind the statement, which is executed
	armed     *atomic.Bool
	dead      atomic.Bool
	silence   net.Conn
}

// Write implements net.Conn.
func (c *deadConn) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.statement) && c.armed.Swap(false) {
		c.dead.Store(true)
	}
	if c.dead.Load() && !c.arrives {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// Read implements net.Conn.
func (c *deadConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.dead.Load() {
		return c.silence.Read(p)
	}
	return n, err
}

// SetDeadline implements net.Conn.
func (c *deadConn) SetDeadline(t time.Time) error {
	_ = c.silence.SetDeadline(t)
	return c.Conn.SetDeadline(t)
}

// Close implements net.Conn.
func (c *deadConn) Close() error {
	_ = c.silence.Close()
	return c.Conn.Close()
}

// deadPool returns a pool whose connections are like conn, which has no connection.
func deadPool(t *testing.T, conn *deadConn) *pgxpool.Pool {
	return testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			dialed, err := new(net.Dialer).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			silence, _ := net.Pipe()
			return &deadConn{Conn: dialed, statement: conn.statement, arrives: conn.arrives, armed: conn.armed, silence: silence}, nil
		}
	})
}

// A worker whose connection dies in silence in its transaction waits for PostgreSQL no longer than its statements may
// take, and for a COMMIT no longer than PostgreSQL runs it. The event is handled once, whether the transaction was
// committed or not.
func TestConnectionDiesInATransaction(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for _, name := range []string{"begin", "commit"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			f.commit(step{"a", 1}, step{"a", 2})
			armed, died, statement := new(atomic.Bool), new(atomic.Bool), "CLOSE outbox_guard"
			if name == "begin" { // the first statement that has the id of the event notes it
				require.NoError(t, f.db.QueryRow(t.Context(), f.sql(`SELECT event_id::text FROM {schema}.outbox ORDER BY id LIMIT 1`)).Scan(&statement))
				armed.Store(true)
			}
			db := deadPool(t, &deadConn{statement: statement, armed: armed})
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, HandlerTimeout: 2 * time.Second}, PollInterval: 50 * time.Millisecond}
			testenv.Run(t, f.worker(db, "bank", cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
				if s.N == 2 && name == "commit" && !died.Swap(true) {
					armed.Store(true)
				}
				return nil
			})).Run)
			require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) == 2 }, 50*time.Second, 50*time.Millisecond)
			f.requireOrder()
			require.False(t, armed.Load())
		})
	}
}

// The answer to a claim is lost in silence, and the claim is tried again on another connection, without payloads. What
// the first try has claimed is released and handled long before its lease ends, and no attempt counts for it.
func TestAnswerToAClaimIsLost(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	f, log, armed := newWorkerFixture(t), new(workerLog), new(atomic.Bool)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}, Lease: time.Hour}
	const rows = 5
	for n := range rows {
		f.commit(step{fmt.Sprint("account ", n), 1})
	}
	f.insertDue(cfg, rows)
	armed.Store(true)
	db := deadPool(t, &deadConn{statement: "\nbank.account.stepped.v1", arrives: true, armed: armed}) // the types of a claim
	testenv.Run(t, f.worker(db, "bank", cfg, f.effects("COUNTED", nil)).Run)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PROCESSING'`, rows)
	require.False(t, armed.Load())
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`) == rows
	}, 40*time.Second, 50*time.Millisecond)
	require.Zero(t, log.count("has expired"), log.String())
}

// silencer makes connections that die in silence when die is called. Later ones live.
type silencer struct {
	mu    sync.Mutex
	conns []*deadConn
}

func (s *silencer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialed, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	silence, _ := net.Pipe()
	conn := &deadConn{Conn: dialed, armed: new(atomic.Bool), silence: silence}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns = append(s.conns, conn)
	return conn, nil
}

func (s *silencer) die() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		conn.dead.Store(true)
	}
}

// end closes all connections, so that the pool does not wait for pings when it is closed.
func (s *silencer) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
}

// The connections of a pool die in silence while they are idle, and a lane needs one for a delivery that is claimed
// already. The pool pings the connection, and waited for the answer for a quarter of an hour.
func TestIdleConnectionsDie(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for _, state := range []string{"active", "left"} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			const conns = 16
			f, cables := newWorkerFixture(t), new(silencer)
			db := testenv.Pool(t, func(cfg *pgxpool.Config) {
				cfg.ConnConfig.DialFunc, cfg.MaxConns = cables.dial, conns
				cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true } // as after a second without use
			})
			t.Cleanup(cables.end)
			die := sync.OnceFunc(func() {
				warm(t, db, conns/2)
				cables.die()
			})
			cfg := outbox.WorkerConfig{PollInterval: time.Second, HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
			w := f.worker(db, "bank", cfg, outbox.OncePer(f.effects("COUNTED", nil), func(s step, _ outbox.Metadata) (string, string) {
				die()
				return "Account", s.Account
			}))
			if state == "left" {
				require.NoError(t, w.Pause())
			}
			testenv.Run(t, w.Run)
			f.commit(step{"a", 1})
			if state == "left" {
				f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING'`, 1)
				f.exec(`UPDATE {schema}.event_subscription SET state = 'left', relay = 'relay'`)
				require.NoError(t, w.Resume())
			}
			require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM {schema}.effect`) == 1 }, 45*time.Second, 50*time.Millisecond)
		})
	}
}

// warm has a pool open connections.
func warm(t *testing.T, db *pgxpool.Pool, conns int) {
	var all []*pgxpool.Conn
	for range conns {
		conn, err := db.Acquire(context.Background())
		if err != nil {
			t.Error(err)
			return
		}
		all = append(all, conn)
	}
	for _, conn := range all {
		conn.Release()
	}
}
