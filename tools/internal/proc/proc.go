// Package proc starts server processes so that they can be stopped again,
// whatever happens to the program that started them.
//
//   - Each process leads a process group of its own: Ctrl-C in a terminal
//     reaches only the program in front, which then stops its servers in order.
//   - On Linux the kernel signals the process when its starter dies, even by
//     SIGKILL.
//   - The last lines it printed are kept, to be part of an error.
package proc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// Command says what to start. Path is required.
type Command struct {
	Path string
	Args []string
	Dir  string
	// Env is the whole environment. Nil means that of this process.
	Env []string
	// Credential is the user to run as. Nil means the present one.
	Credential *syscall.Credential
	// Log also receives what the process prints. Nil means no log.
	Log io.Writer
	// OnOrphan is the signal that the process gets when this program dies
	// first (Linux only). Zero means SIGKILL.
	OnOrphan syscall.Signal
}

// Process is a started [Command].
type Process struct {
	name string
	os   *os.Process // knows when the id is no longer its own
	tail *tail
	done chan struct{}
	err  error // written before done is closed
}

// Start starts c.
func Start(c Command) (*Process, error) {
	p := &Process{name: filepath.Base(c.Path), tail: &tail{}, done: make(chan struct{})}
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Dir, cmd.Env = c.Dir, c.Env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.Credential}
	var out io.Writer = p.tail
	if c.Log != nil {
		out = io.MultiWriter(p.tail, c.Log)
	}
	// One writer that is no file makes one pipe, and Wait then returns once
	// every process that inherited it has ended: all of a server's children.
	cmd.Stdout, cmd.Stderr = out, out

	ended, err := Launch(cmd, cmp.Or(c.OnOrphan, syscall.SIGKILL))
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	p.os = cmd.Process
	go func() {
		p.err = <-ended
		close(p.done)
	}()
	return p, nil
}

// Launch starts cmd and sends the result of its Wait method. On Linux the
// process gets the signal onOrphan when this program dies first.
func Launch(cmd *exec.Cmd, onOrphan syscall.Signal) (ended <-chan error, err error) {
	signalOrphan(cmd, onOrphan)
	started, waited := make(chan error), make(chan error, 1)
	go func() {
		// Linux sends the signal when the starting thread ends, not the
		// program. This goroutine keeps its thread until the process is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			waited <- cmd.Wait()
		}
	}()
	return waited, <-started
}

// Run starts c and waits until it ends. When ctx ends first it gets SIGTERM, and
// its process group is killed 5 s later. The error holds the last lines it
// printed.
func Run(ctx context.Context, c Command) error {
	p, err := Start(c)
	if err != nil {
		return err
	}
	select {
	case <-p.done:
		return p.Err()
	case <-ctx.Done():
	}
	// Only the leader: it knows best how to end its helpers.
	_ = p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(cleanupWait):
		_ = syscall.Kill(-p.PID(), syscall.SIGKILL)
		<-p.done
	}
	return fmt.Errorf("run %s: %w", p.name, context.Cause(ctx))
}

// cleanupWait is how long a process that is told to end may clean up.
const cleanupWait = 5 * time.Second

// PID returns the process id. It stays the same after the end.
func (p *Process) PID() int { return p.os.Pid }

// Done is closed when the process and all its children have ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns nil while the process runs and after it ended with code 0, else
// how it ended and the last lines it printed.
func (p *Process) Err() error {
	select {
	case <-p.done:
	default:
		return nil
	}
	if p.err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w\n%s", p.name, p.err, p.tail)
}

// Await calls ready until it returns nil, with a pause between the calls. It fails when the process ends or ctx
// does. The error calls the process what, and holds the error of ready and the last lines of the process.
func (p *Process) Await(ctx context.Context, what string, pause time.Duration, ready func(context.Context) error) error {
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return errors.Join(fmt.Errorf("%s ended instead of starting", what), p.Err())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (%w); its log ends with:\n%s", what, context.Cause(ctx), err, p.tail)
		case <-time.After(pause):
		}
	}
}

// Tail returns the last lines that the process printed.
func (p *Process) Tail() string { return p.tail.String() }

// Stop sends sig and waits until the process has ended. When ctx ends first,
// the process and its children are killed and Stop returns the ctx's error.
func (p *Process) Stop(ctx context.Context, sig syscall.Signal) error {
	if err := p.Signal(sig); err != nil {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("stop %s: killed: %w", p.name, context.Cause(ctx)), p.Kill())
	}
}

// Abort sends sig to a process that is of no use, and kills it 5 s later.
func (p *Process) Abort(sig syscall.Signal) error {
	_ = p.Signal(sig)
	select {
	case <-p.done:
		return nil
	case <-time.After(cleanupWait):
		return p.Kill()
	}
}

// killWait is ample for the kernel to end processes that got SIGKILL.
const killWait = 20 * time.Second

// Kill ends the process and its children at once, as a crash would, and waits
// until they are gone.
func (p *Process) Kill() error {
	// A stopped parent neither forks nor reaps. So the list is complete, and an
	// id in it cannot pass to a stranger before it is killed.
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	family := append(children(p.PID()), p.PID())
	if p.ended() {
		return nil
	}
	for _, pid := range family {
		_ = syscall.Kill(pid, syscall.SIGKILL) // gone already is fine
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(killWait):
		return fmt.Errorf("kill %s: processes %v still hold its output after %v", p.name, family, killWait)
	}
}

// Signal sends sig to the process. One that has ended is no error.
func (p *Process) Signal(sig syscall.Signal) error {
	if err := p.os.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %v to %d: %w", sig, p.PID(), err)
	}
	return nil
}

func (p *Process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}
