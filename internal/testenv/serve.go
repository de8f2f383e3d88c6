package testenv

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

// Serve returns the address of a server that passes each connection to f, and closes it. It ends with the test.
func Serve(t testing.TB, f func(net.Conn)) (address string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				f(conn)
				_ = conn.Close()
			}()
		}
	}()
	return l.Addr().String()
}

// Nowhere returns an address of this host at which nothing listens.
func Nowhere(t testing.TB) (address string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}
