package main

import (
	"context"
	"net"
	"os"
	"sync"
	"syscall"
)

// gate is what the connections of a relay to Kafka lead through. While it is
// shut, Kafka is away: open connections break, and new ones are refused.
type gate struct {
	mu     sync.Mutex
	isShut bool
	conns  []net.Conn // some of them may be closed
}

// dial is for [kgo.Dialer].
func (g *gate) dial(ctx context.Context, network, host string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, host)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.isShut {
		_ = conn.Close() // nothing was sent
		return nil, &net.OpError{Op: "dial", Net: network, Addr: conn.RemoteAddr(), Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	g.conns = append(g.conns, conn)
	return conn, nil
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.isShut = true
	for _, conn := range g.conns {
		_ = conn.Close() // the client may have done so before
	}
	g.conns = nil
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.isShut = false
}
