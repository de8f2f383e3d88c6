package proxy_test

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

func TestBytesAndEndsPass(t *testing.T) {
	t.Parallel()
	_, client, server := connect(t)
	large := make([]byte, 10<<20) // more than sockets and proxy hold
	go func() {
		_, _ = client.Write(large) // a failure shows as bytes that are missing
		_ = client.CloseWrite()
	}()
	got, err := io.ReadAll(server)
	require.NoError(t, err)
	require.Len(t, got, len(large))
	say(t, server, "after its end")
	requireHears(t, client, "after its end")
	require.NoError(t, server.Close())
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func TestCut(t *testing.T) {
	t.Parallel()
	p, accept := listen(t)
	client := dial(t, p)
	server := accept()
	requirePasses(t, client, server)
	p.Set(proxy.Fault{Cut: true})
	requireReset(t, client)
	requireReset(t, server)
	requireNoConnection(t, p)
	p.Set(proxy.Fault{})
	requirePasses(t, dial(t, p), accept())
}

func TestHold(t *testing.T) {
	t.Parallel()
	for name, held := range map[string]struct {
		fault    proxy.Fault
		up, down bool
	}{
		"up":   {fault: proxy.Fault{HoldUp: true}, up: true},
		"down": {fault: proxy.Fault{HoldDown: true}, down: true},
		"both": {fault: proxy.Fault{HoldUp: true, HoldDown: true}, up: true, down: true},
	} {
		t.Run(name, func(t *testing.T) {
			p, client, server := connect(t)
			p.Set(held.fault)
			say(t, client, "to the server")
			say(t, server, "to the client")
			hears := func(held bool, conn *net.TCPConn, text string) {
				if held {
					requireSilence(t, conn)
				} else {
					requireHears(t, conn, text)
				}
			}
			hears(held.up, server, "to the server")
			hears(held.down, client, "to the client")
			p.Set(proxy.Fault{})
			if held.up {
				requireHears(t, server, "to the server")
			}
			if held.down {
				requireHears(t, client, "to the client")
			}
		})
	}
}

// The end of a connection is held as bytes are: a server behind a partition does
// not learn that its client has died.
func TestHoldHidesTheEnd(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*net.TCPConn){
		"close": func(conn *net.TCPConn) { require.NoError(t, conn.Close()) },
		"reset": func(conn *net.TCPConn) { require.NoError(t, errors.Join(conn.SetLinger(0), conn.Close())) },
	} {
		t.Run(name, func(t *testing.T) {
			p, client, server := connect(t)
			p.Set(proxy.Fault{HoldUp: true})
			end(client)
			requireSilence(t, server)
			p.Set(proxy.Fault{})
			require.NoError(t, server.SetReadDeadline(time.Now().Add(testenv.Patience)))
			_, err := server.Read(make([]byte, 1))
			require.True(t, errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET), "%v", err)
		})
	}
}

func TestHoldThenReset(t *testing.T) {
	t.Parallel()
	p, client, server := connect(t)
	p.Set(proxy.Fault{HoldUp: true, HoldDown: true})
	say(t, client, "never arrives")
	requireSilence(t, server)
	p.Reset()
	p.Set(proxy.Fault{})
	requireReset(t, client)
	requireReset(t, server)
}

// What follows closely arrives as closely, only later.
func TestDelay(t *testing.T) {
	// Not parallel: it measures delays.
	p, client, server := connect(t)
	const delay, times = 100 * time.Millisecond, 20
	p.Set(proxy.Fault{Delay: delay})
	start := time.Now()
	for range times {
		say(t, client, "word")
	}
	requireHears(t, server, "word")
	require.GreaterOrEqual(t, time.Since(start), delay)
	for range times - 1 {
		requireHears(t, server, "word")
	}
	require.Less(t, time.Since(start), times*delay, "delays add up")
}

func TestStrand(t *testing.T) {
	t.Parallel()
	p, accept := listen(t)
	client := dial(t, p)
	stranded := accept()
	requirePasses(t, client, stranded)
	p.Strand(func() bool { return true })
	other, spared := dial(t, p), accept()
	requirePasses(t, other, spared)
	p.Strand(func() bool { return false })
	requirePasses(t, other, spared)
	say(t, client, "lost")
	say(t, stranded, "lost")
	requireSilence(t, stranded)
	requireSilence(t, client)
	requirePasses(t, dial(t, p), accept())
	p.Reset()
	requireReset(t, client)
}

func TestLeadTo(t *testing.T) {
	t.Parallel()
	p, before, former := connect(t)
	other, accept := listen(t)
	p.LeadTo(other.Addr())
	requirePasses(t, dial(t, p), accept())
	requirePasses(t, before, former)
	other.Set(proxy.Fault{HoldUp: true}) // one behind the other, as in front of a server
	client := dial(t, p)
	server := accept()
	say(t, client, "held")
	requireSilence(t, server)
	other.Set(proxy.Fault{})
	requireHears(t, server, "held")
}

func TestServerDown(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	p, err := proxy.Listen(listener.Addr().String())
	require.NoError(t, err)
	requireNoConnection(t, p)
	require.NoError(t, p.Close())
}

func TestCloseWhileAllWait(t *testing.T) {
	t.Parallel()
	p, client, server := connect(t)
	p.Set(proxy.Fault{HoldUp: true, HoldDown: true})
	var stuck sync.WaitGroup
	stuck.Go(func() { _, _ = client.Write(make([]byte, 64<<20)) }) // ends with the reset
	say(t, server, "waits")
	require.NoError(t, p.Close())
	stuck.Wait()
	requireReset(t, server)
}

// listen starts a server behind a proxy. accept returns its next connection.
func listen(t *testing.T) (p *proxy.Proxy, accept func() *net.TCPConn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	p, err = proxy.Listen(listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close() }) // a test may have closed it
	return p, func() *net.TCPConn {
		conn, err := listener.Accept()
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn.(*net.TCPConn)
	}
}

// connect returns the two ends of a connection through a proxy.
func connect(t *testing.T) (p *proxy.Proxy, client, server *net.TCPConn) {
	t.Helper()
	p, accept := listen(t)
	client, server = dial(t, p), accept()
	requirePasses(t, client, server)
	return p, client, server
}

func dial(t *testing.T, p *proxy.Proxy) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn.(*net.TCPConn)
}

func say(t *testing.T, conn *net.TCPConn, text string) {
	t.Helper()
	_, err := conn.Write([]byte(text))
	require.NoError(t, err)
}

func requireHears(t *testing.T, conn *net.TCPConn, text string) {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(testenv.Patience)))
	got := make([]byte, len(text))
	_, err := io.ReadFull(conn, got)
	require.NoError(t, err)
	require.Equal(t, text, string(got))
}

func requirePasses(t *testing.T, client, server *net.TCPConn) {
	t.Helper()
	say(t, client, "question")
	requireHears(t, server, "question")
	say(t, server, "answer")
	requireHears(t, client, "answer")
}

// requireSilence finds out what is wrong within 50 ms or not at all.
func requireSilence(t *testing.T, conn *net.TCPConn) {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err := conn.Read(make([]byte, 1))
	var timeout net.Error
	require.True(t, errors.As(err, &timeout) && timeout.Timeout(), "%v", err)
}

func requireReset(t *testing.T, conn *net.TCPConn) {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(testenv.Patience)))
	_, err := io.Copy(io.Discard, conn)
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

// requireNoConnection requires that a new connection is reset at once.
func requireNoConnection(t *testing.T, p *proxy.Proxy) {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err == nil {
		defer func() { _ = conn.Close() }()
		_, err = conn.Read(make([]byte, 1))
	}
	require.ErrorIs(t, err, syscall.ECONNRESET)
}
