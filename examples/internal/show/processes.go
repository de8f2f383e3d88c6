// Package show has what examples share that run their services as processes, kill some of them, and
// compare numbers in the end. Nothing in it is about outbox.
package show

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
)

// Processes are other processes of this program, by name. They end when their standard input does, also
// when this process is killed. It is safe for concurrent use.
type Processes struct {
	mu      sync.Mutex
	running map[string]*process
}

type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
	err   error // once it has ended
}

// Start starts this program again, with other arguments. Of the same name there is one at a time: end the one
// before first.
func (p *Processes) Start(name string, args ...string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(context.Background(), program, args...) // Ctrl-C closes its input, when all is done
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	started := &process{cmd: cmd, stdin: stdin, ended: make(chan struct{})}
	go func() {
		defer close(started.ended)
		started.err = cmd.Wait()
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == nil {
		p.running = map[string]*process{}
	}
	p.running[name] = started
	return nil
}

// take removes a process from those that Stop stops.
func (p *Processes) take(name string) (*process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	one, ok := p.running[name]
	if !ok {
		return nil, fmt.Errorf("no process %s is running", name)
	}
	delete(p.running, name)
	return one, nil
}

// Kill kills a process, as the kernel does that needs memory. If it has ended before, the error is its own.
func (p *Processes) Kill(name string) error {
	one, err := p.take(name)
	if err != nil {
		return err
	}
	err = one.cmd.Process.Kill()
	<-one.ended
	if errors.Is(err, os.ErrProcessDone) {
		return one.err
	}
	return err
}

// Await waits until a process has ended by itself, and reports whether it has before ctx ended. The error is that
// of the process.
func (p *Processes) Await(ctx context.Context, name string) (ended bool, err error) {
	p.mu.Lock()
	one, ok := p.running[name]
	p.mu.Unlock()
	if !ok {
		return false, fmt.Errorf("no process %s is running", name)
	}
	select {
	case <-one.ended:
		_, err = p.take(name)
		return true, errors.Join(one.err, err)
	case <-ctx.Done():
		return false, nil
	}
}

// Stop has processes finish what they are at, and end: all of them, if none is named. They do so at the same time.
func (p *Processes) Stop(names ...string) (err error) {
	if len(names) == 0 {
		names = p.names()
	}
	stopping := map[string]*process{}
	for _, name := range names {
		one, bad := p.take(name)
		if bad != nil {
			err = errors.Join(err, fmt.Errorf("process %s: %w", name, bad))
			continue
		}
		_ = one.stdin.Close() // it has been only a signal
		stopping[name] = one
	}
	for name, one := range stopping {
		<-one.ended
		if one.err != nil {
			err = errors.Join(err, fmt.Errorf("process %s: %w", name, one.err))
		}
	}
	return err
}

func (p *Processes) names() (names []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name := range p.running {
		names = append(names, name)
	}
	return names
}

// UntilEnd returns a context for such a process that ends with its standard input. A signal does not end it:
// Ctrl-C reaches all processes of a terminal, and they are needed until all is done.
func UntilEnd(ctx context.Context, stdin io.Reader) (life context.Context, stop context.CancelFunc) {
	life, stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		stop()
	}()
	return life, stop
}
