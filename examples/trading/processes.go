package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"golang.org/x/sync/errgroup"
)

// processes are other processes of this program, which run the workers. They end when their
// standard input does, also when this process is killed.
type processes struct {
	args  []string
	slots []*process
}

type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

// start starts a process in a slot.
func (p *processes) start(slot int) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(context.Background(), program, p.args...) // Ctrl-C closes its input, when all is done
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.slots[slot] = &process{cmd, stdin}
	return nil
}

// replace kills the process in a slot, as the kernel does that needs memory, and starts another.
func (p *processes) replace(slot int) error {
	if err := p.slots[slot].cmd.Process.Kill(); err != nil {
		return err
	}
	_ = p.slots[slot].cmd.Wait() // that it was killed is no news
	return p.start(slot)
}

// stop has all processes finish what they are at, and end.
func (p *processes) stop() (err error) {
	for slot, running := range p.slots {
		if running == nil {
			continue
		}
		p.slots[slot] = nil
		_ = running.stdin.Close() // it has been only a signal
		if bad := running.cmd.Wait(); bad != nil {
			err = errors.Join(err, fmt.Errorf("process of workers: %w", bad))
		}
	}
	return err
}

// work is what such a process does: it runs the workers until its input ends.
func (a *app) work(ctx context.Context, stdin io.Reader) error {
	workers, err := a.workers()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		stop()
	}()
	a.running = workers
	g, ctx := errgroup.WithContext(ctx)
	for _, w := range workers {
		g.Go(func() error { return w.Run(ctx) })
	}
	return g.Wait()
}

// wake has the workers of this process look now for what was committed.
func (a *app) wake() {
	for _, w := range a.running {
		w.Waker().Wake()
	}
}
