package testenv

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
)

// LateKafka returns the address of a fake broker that does not run yet, and a function that starts the broker. Until
// then the address refuses connections. The broker has no topics, and ends with the test.
func LateKafka(t testing.TB) (address string, start func(...kfake.Opt) *kfake.Cluster) {
	t.Helper()
	// No other program gets the port, because a connection comes from it.
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}
	conn, err := dialer.DialContext(t.Context(), "tcp", listener.Addr().String())
	require.NoError(t, err)
	reserved := conn.(*net.TCPConn)
	t.Cleanup(func() { _ = reserved.Close() })
	at := reserved.LocalAddr().(*net.TCPAddr)
	return at.String(), func(opts ...kfake.Opt) *kfake.Cluster {
		t.Helper()
		require.NoError(t, reserved.SetLinger(0)) // the port is free at once
		require.NoError(t, reserved.Close())
		kafka, err := kfake.NewCluster(append(opts, kfake.NumBrokers(1), kfake.Ports(at.Port))...)
		require.NoError(t, err)
		t.Cleanup(kafka.Close)
		return kafka
	}
}
