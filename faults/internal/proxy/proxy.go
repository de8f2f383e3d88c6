// Package proxy is a TCP proxy on whose connections the network fails as
// networks do: they are cut, also at a statement of PostgreSQL or a request of Kafka or in front of its answer, they
// are slow, or they are open and nothing arrives, in one direction or in both.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Fault is what ails the network. The zero value is one that works.
type Fault struct {
	// Cut resets every connection, and new ones as soon as they are accepted.
	Cut bool
	// HoldUp and HoldDown hold what travels to the server and to the client:
	// neither a byte nor the end of a connection arrives. Connections stay open
	// and new ones are accepted. What was held travels on when the hold is over.
	HoldUp, HoldDown bool
	// Delay is by how much everything arrives later, each way.
	Delay time.Duration
	// Statements, if it is not nil, cuts connections at some of PostgreSQL's statements. New ones are accepted.
	Statements *Statements
	// Requests, if it is not nil, does so at some requests of Kafka.
	Requests *Requests
}

// Proxy leads connections to a server. Make one with [Listen]. Its methods
// may be called from several goroutines.
type Proxy struct {
	listener net.Listener
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	running  sync.WaitGroup

	mu      sync.Mutex
	target  string
	fault   Fault
	changed chan struct{} // closed when what is under mu changes
	links   map[*link]struct{}
}

// Listen starts a proxy on a free port of 127.0.0.1 for the server at target,
// a host and a port. The server need not run yet.
func Listen(target string) (*Proxy, error) {
	listener, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		target: target, listener: listener, ctx: ctx, cancel: cancel,
		changed: make(chan struct{}), links: map[*link]struct{}{},
	}
	p.running.Go(p.accept)
	return p, nil
}

// Addr returns where the proxy listens, a host and a port.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// LeadTo makes new connections lead to the server at target, which has taken the place
// of the former one.
func (p *Proxy) LeadTo(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Set makes the network fail as f says from now on, open connections included.
func (p *Proxy) Set(f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
	p.wake()
	if f.Cut {
		p.reset()
	}
}

// Reset resets all open connections. New ones are as [Proxy.Set] has it.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reset()
}

// Strand leaves those of the open connections that which chooses open for good,
// without a byte or an end that ever arrives, as a firewall does that has
// forgotten them. New ones are as [Proxy.Set] has it. [Proxy.Reset] ends stranded
// ones too.
func (p *Proxy) Strand(which func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.stranded = l.stranded || which()
	}
	p.wake()
}

// Close resets all connections and returns when nothing of the proxy runs.
func (p *Proxy) Close() error {
	p.cancel()
	err := p.listener.Close()
	p.Reset()
	p.running.Wait()
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// wake wakes the goroutines that wait. It is called under mu.
func (p *Proxy) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// reset is called under mu.
func (p *Proxy) reset() {
	for l := range p.links {
		l.reset()
	}
}

// accept ends when the listener is closed; nothing else ends a loopback listener.
func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.serve(conn.(*net.TCPConn)) })
	}
}

func (p *Proxy) serve(client *net.TCPConn) {
	target, cut := p.destination()
	if cut {
		abort(client)
		return
	}
	server, err := new(net.Dialer).DialContext(p.ctx, "tcp", target)
	if err != nil { // the server is down, and so is the connection to it
		abort(client)
		return
	}
	l := &link{
		proxy: p, client: client, server: server.(*net.TCPConn), done: make(chan struct{}),
		frontend: frontend{texts: map[string]string{}},
	}
	p.add(l)
	defer p.remove(l)
	var directions sync.WaitGroup
	directions.Go(func() { l.carry(l.client, l.server, func(f Fault) bool { return f.HoldUp }, l.passUp) })
	directions.Go(func() { l.carry(l.server, l.client, func(f Fault) bool { return f.HoldDown }, l.passDown) })
	directions.Wait()
	l.close()
}

// destination returns where a new connection leads to, or that it is cut.
func (p *Proxy) destination() (target string, cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.target, p.fault.Cut
}

func (p *Proxy) add(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links[l] = struct{}{}
	if p.fault.Cut || p.ctx.Err() != nil { // since it was accepted
		l.reset()
	}
}

func (p *Proxy) remove(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// link is one connection of a client and the one to the server that goes with it.
type link struct {
	proxy          *Proxy
	client, server *net.TCPConn
	once           sync.Once
	done           chan struct{} // closed with the connections
	stranded       bool          // under the proxy's mu
	frontend       frontend      // only for what goes to the server
	asker          client        // only for what goes to the server
	unanswered     atomic.Bool   // the next answer is to be lost
}

func (l *link) close() { l.end(func(conn *net.TCPConn) { _ = conn.Close() }) }
func (l *link) reset() { l.end(abort) }

func (l *link) end(how func(*net.TCPConn)) {
	l.once.Do(func() {
		close(l.done)
		how(l.client)
		how(l.server)
	})
}

// abort closes a connection so that the other end sees a reset. It ignores errors, because the
// connection may be gone already.
func abort(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}

const (
	chunkSize = 32 << 10
	maxChunks = 128 // on their way in one direction; more wait with their sender
)

// chunk is what was read at one time: bytes, or how they ended.
type chunk struct {
	data []byte
	end  error
	at   time.Time
}

// carry passes on what comes from one end to the other, until one of them ends, or pass
// does not let it. It reads ahead: a delay makes everything late, not slow.
func (l *link) carry(from, to *net.TCPConn, held func(Fault) bool, pass func([]byte) bool) {
	chunks := make(chan chunk, maxChunks)
	var reader sync.WaitGroup
	reader.Go(func() { l.read(from, chunks) })
	defer reader.Wait()
	for {
		var c chunk
		select {
		case c = <-chunks:
		case <-l.done:
			return
		}
		switch {
		case !l.await(c.at, held):
			return
		case errors.Is(c.end, io.EOF):
			_ = to.CloseWrite() // where that fails the other direction ends too
			return
		case c.end != nil, !pass(c.data):
			l.reset()
			return
		}
		if _, err := to.Write(c.data); err != nil {
			l.reset()
			return
		}
	}
}

// read reads until from ends.
func (l *link) read(from *net.TCPConn, chunks chan<- chunk) {
	for {
		buffer := make([]byte, chunkSize)
		n, err := from.Read(buffer)
		if n > 0 && !l.queue(chunks, chunk{data: buffer[:n], at: time.Now()}) {
			return
		}
		if err != nil {
			l.queue(chunks, chunk{end: err, at: time.Now()})
			return
		}
	}
}

func (l *link) queue(chunks chan<- chunk, c chunk) bool {
	select {
	case chunks <- c:
		return true
	case <-l.done:
		return false
	}
}

// await waits until what was read at a time may arrive. It returns false when
// the connection ends first.
func (l *link) await(at time.Time, held func(Fault) bool) bool {
	for {
		fault, stranded, changed := l.look()
		var due <-chan time.Time
		if !stranded && !held(fault) {
			wait := time.Until(at.Add(fault.Delay))
			if wait <= 0 {
				return true
			}
			due = time.After(wait)
		}
		select {
		case <-due:
		case <-changed:
		case <-l.done:
			return false
		}
	}
}

func (l *link) look() (f Fault, stranded bool, changed <-chan struct{}) {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	return l.proxy.fault, l.stranded, l.proxy.changed
}
