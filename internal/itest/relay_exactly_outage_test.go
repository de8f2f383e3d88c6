package itest

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// Brokers that accept connections and never answer are an outage, and no hang: the relay keeps its lease, although a
// start may take longer than all of its timeouts.
func TestExactlyOnceWithSilentBrokers(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	h, _, cfg := fakeExactly(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { silent.Close() })
	go func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
		}
	}()
	h.brokers = []string{silent.Addr().String()}
	log := &testenv.Buffer{}
	cfg.Lease, cfg.Breaker.OpenFor, cfg.Logger = 2*time.Second, time.Second, slog.New(slog.NewTextHandler(log, nil))
	relay := h.relay(t, cfg)
	testenv.Run(t, relay.Run)
	require.Never(t, func() bool { return !relay.Health().Live }, 30*time.Second, 100*time.Millisecond)
	require.NotContains(t, log.String(), "the lease is given up")
	require.Contains(t, log.String(), "Kafka fails")
}
