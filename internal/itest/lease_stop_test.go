package itest

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A relay is told to stop when PostgreSQL has given it the lease and the answer is still
// on its way. The next relay must not wait until the lease expires.
func TestStopWhileLeaseIsTaken(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	held := func() (held bool) {
		err := h.db.QueryRow(context.Background(), h.sql(`SELECT EXISTS (SELECT FROM {s}.outbox_lease WHERE expires_at > now())`)).Scan(&held)
		return err == nil && held
	}
	testenv.Direct(t)
	var stopped atomic.Bool
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		dial := cfg.ConnConfig.DialFunc
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &leaseConn{Conn: conn, answer: func() {
				for end := time.Now().Add(time.Second); !stopped.Load() && time.Now().Before(end); time.Sleep(time.Millisecond) {
					if held() {
						stopped.Store(true)
						cancel()
						time.Sleep(100 * time.Millisecond) // time for a cancel of the statement, if there is one
					}
				}
			}}, err
		}
	})
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts(h.brokers), outbox.RelayConfig{Schema: h.schema})
	require.NoError(t, err)
	require.NoError(t, relay.Run(ctx))
	require.True(t, stopped.Load())
	require.False(t, held(), "the relay has stopped, and its lease is held")
}

// leaseConn calls answer before it reads an answer, once the statement that takes the lease
// was sent: to prepare it at first, and then to run it.
type leaseConn struct {
	net.Conn
	answer func()
	sent   atomic.Bool
}

// Write implements net.Conn.
func (c *leaseConn) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("outbox_lease AS l")) {
		c.sent.Store(true)
	}
	return c.Conn.Write(b)
}

// Read implements net.Conn.
func (c *leaseConn) Read(b []byte) (int, error) {
	if c.sent.Load() {
		c.answer()
	}
	return c.Conn.Read(b)
}
