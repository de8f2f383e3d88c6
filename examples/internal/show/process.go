package show

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"time"
)

// Process is another process of this program. It ends when its standard input does, so also when this process is
// killed.
type Process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{}
	err   error // once it has ended
}

// StartProcess starts this program again, with other arguments and more in its environment. Heard is called for each
// line that it prints, one after the other; what it prints to its standard error goes to that of this process.
func StartProcess(args, env []string, heard func(line string)) (*Process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &Process{cmd: exec.CommandContext(context.Background(), program, args...), ended: make(chan struct{})} // Ctrl-C closes its input, when all is done
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = os.Stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			heard(lines.Text())
		}
		p.err = p.cmd.Wait()
	}()
	return p, nil
}

// Say writes a line to the standard input of the process.
func (p *Process) Say(line string) error {
	_, err := fmt.Fprintln(p.stdin, line)
	return err
}

// Ended is closed when the process has ended, by itself for example. What it had printed until then was heard.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Kill kills the process, as the kernel does that needs memory. If it has ended before, the error is its own.
func (p *Process) Kill() error {
	err := p.cmd.Process.Kill()
	<-p.ended
	if errors.Is(err, os.ErrProcessDone) {
		return p.err
	}
	return err
}

// patience is how long a process may take to end.
const patience = 30 * time.Second

// requestStop asks the process to end.
func (p *Process) requestStop() { _ = p.stdin.Close() } // it has been only a signal

// Stop has the process finish what it is at, and end.
func (p *Process) Stop() error {
	p.requestStop()
	late := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	<-p.ended
	return p.err
}

// Log returns the logger of a process: it prints to its standard error, or nothing.
func Log(verbose bool) *slog.Logger {
	if !verbose {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}

// SayTo returns a function that prints lines, for concurrent use. A process uses it to report to the process
// that has started it.
func SayTo(w io.Writer) func(line ...any) {
	var mu sync.Mutex
	return func(line ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(w, line...)
	}
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
