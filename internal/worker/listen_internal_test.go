package worker

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// poolerConn is a connection to a pooler that invents the numbers of server processes.
type poolerConn struct{ net.Conn }

// Read implements net.Conn.
func (c poolerConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if at := bytes.Index(p[:n], []byte{'K', 0, 0, 0, 12}); at >= 0 && at+9 <= n { // BackendKeyData
		p[at+8] ^= 1
	}
	return n, err
}

// A session that looks as if it were behind a pooler is examined again later, because a machine that stood still looks
// the same. So listen goes on until the worker ends.
func TestListenOutlastsPooler(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			return poolerConn{conn}, err
		}
	})
	log := slog.New(slog.DiscardHandler)
	rules := &handling.Rules{Schema: "none", Group: "bank", Log: log}
	r := &run{
		worker: &Worker{db: db, processor: &handling.Processor{Rules: rules, Log: log}, delivery: &delivery.Rules{Rules: rules}},
		engine: &delivery.Run{Dispatcher: &delivery.Dispatcher{}},
	}
	member := wakeup.Of(db, "bank").Join(nil, nil, log)
	t.Cleanup(member.Close)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.listen(ctx, member)
	}()
	require.Eventually(t, func() bool { return pgsession.Of(db).State() == pgsession.Pooled }, testenv.Patience, 10*time.Millisecond)
	select {
	case <-ended:
		t.Error("listen has ended")
	case <-time.After(3 * time.Second):
	}
	cancel()
	<-ended
}
