// Package show has what examples share that run their services as processes, kill some of them, and
// compare numbers in the end. Nothing in it is about outbox.
package show

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
)

// Processes are processes by name. It is safe for concurrent use.
type Processes struct {
	mu      sync.Mutex
	running map[string]*Process
	killed  []string
}

// Start starts this program again, with other arguments. Of the same name there is one at a time: end the one
// before first. What it prints goes to the standard error of this process.
func (p *Processes) Start(name string, args ...string) error {
	one, err := StartProcess(args, nil, func(line string) { fmt.Fprintln(os.Stderr, line) })
	if err != nil {
		return fmt.Errorf("start process %s: %w", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == nil {
		p.running = map[string]*Process{}
	}
	p.running[name] = one
	return nil
}

// find returns a process. If it is taken, Stop no longer stops it.
func (p *Processes) find(name string, take bool) (*Process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	one, ok := p.running[name]
	if !ok {
		return nil, fmt.Errorf("no process %s is running", name)
	}
	if take {
		delete(p.running, name)
	}
	return one, nil
}

// Kill kills a process: see [Process.Kill].
func (p *Processes) Kill(name string) error {
	one, err := p.find(name, true)
	if err != nil {
		return err
	}
	return one.Kill()
}

// Replace kills a process and starts another one in its place.
func (p *Processes) Replace(name string, args ...string) error {
	if err := p.Kill(name); err != nil {
		return err
	}
	return p.succeed(name, args)
}

// ReplaceCrashed waits until a process has killed itself, and starts another one in its place. If ctx ends before it
// does, it is stopped: a relay gives its lease back, and the other one has not to wait for its end.
func (p *Processes) ReplaceCrashed(ctx context.Context, name string, args ...string) error {
	crashed, err := p.Await(ctx, name)
	if err == nil && !crashed {
		if err = p.Stop(name); err == nil {
			return p.Start(name, args...)
		}
	}
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.Exited()) {
		return fmt.Errorf("%s: %w", name, err)
	}
	return p.succeed(name, args)
}

// succeed starts a process in place of one that was killed.
func (p *Processes) succeed(name string, args []string) error {
	p.mu.Lock()
	p.killed = append(p.killed, name)
	slices.Sort(p.killed)
	p.mu.Unlock()
	return p.Start(name, args...)
}

// Killed returns the names of processes that were killed and replaced, sorted.
func (p *Processes) Killed() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.killed)
}

// Await waits until a process has ended by itself, and reports whether it has before ctx ended. The error is that
// of the process.
func (p *Processes) Await(ctx context.Context, name string) (ended bool, err error) {
	one, err := p.find(name, false)
	if err != nil {
		return false, err
	}
	select {
	case <-one.ended:
		_, err = p.find(name, true)
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
	stopping := map[string]*Process{}
	for _, name := range names {
		one, bad := p.find(name, true)
		if bad != nil {
			err = errors.Join(err, bad)
			continue
		}
		one.requestStop()
		stopping[name] = one
	}
	for name, one := range stopping {
		if bad := one.Stop(); bad != nil {
			err = errors.Join(err, fmt.Errorf("process %s: %w", name, bad))
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
