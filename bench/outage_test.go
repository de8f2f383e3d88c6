package main

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

func TestGate(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	var g gate
	dial := func() (net.Conn, error) { return g.dial(t.Context(), "tcp", listener.Addr().String()) }
	conn, err := dial()
	require.NoError(t, err)
	g.shut()
	_, err = conn.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = dial()
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	g.open()
	conn, err = dial()
	require.NoError(t, err)
	_, err = conn.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, conn.Close())
}

func TestNextAckWaitsForEnoughRecordsAndActsOnce(t *testing.T) {
	var a nextAck
	acked := func(records int) {
		a.OnProduceBatchWritten(kgo.BrokerMetadata{}, "topic", 0, kgo.ProduceBatchMetrics{NumRecords: records})
	}
	acked(5)
	done := 0
	a.set(3, func() { done++ })
	acked(2)
	require.Zero(t, done)
	acked(3)
	acked(3)
	require.Equal(t, 1, done)
}

// Ten minutes are what the defaults are for.
func TestShorterOutagesHaveShorterConfigurations(t *testing.T) {
	config := func(outage time.Duration) outbox.RelayConfig { return (&survivor{job: job{Outage: outage}}).config() }
	for _, long := range []time.Duration{10 * time.Minute, time.Hour} {
		c := config(long)
		require.Equal(t, []time.Duration{10 * time.Second, 5 * time.Second, 30 * time.Second},
			[]time.Duration{c.DeliveryTimeout, c.RetryInterval, c.Breaker.OpenFor})
	}
	c := config(2 * time.Minute)
	require.Equal(t, []time.Duration{2 * time.Second, time.Second, 6 * time.Second},
		[]time.Duration{c.DeliveryTimeout, c.RetryInterval, c.Breaker.OpenFor})
	require.Equal(t, time.Second, config(20*time.Second).DeliveryTimeout)
}

func TestTally(t *testing.T) {
	y := newTally(6, 3) // two writers, three events each
	for _, n := range []int{3, 0, 4, 1, 0} {
		require.NoError(t, y.see(n, "a"))
	}
	require.Equal(t, 1, y.repeats)
	require.ErrorContains(t, y.complete(), "event 2")
	require.NoError(t, y.see(5, "b"))
	require.NoError(t, y.see(2, "b"))
	require.NoError(t, y.complete())

	y = newTally(6, 3)
	require.NoError(t, y.see(4, "a"))
	require.Error(t, y.see(3, "a"), "the same writer wrote it earlier")
	require.Error(t, y.see(6, "a"), "nobody wrote it")
}
