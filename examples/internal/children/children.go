// Package children runs more processes of an example: the program itself with other
// arguments. A child ends when its standard input does, so also when its parent is killed.
package children

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// Child is a process that runs.
type Child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	read  chan struct{} // closed when all that it printed was read
}

// Start starts this program with other arguments, and more in its environment. Heard is
// called for each line that it prints, one after the other; what it prints to its standard
// error goes to that of this process.
func Start(args, env []string, heard func(line string)) (*Child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// A signal ends the parent, which then ends its children, when all is done.
	c := &Child{cmd: exec.CommandContext(context.Background(), program, args...), read: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr = os.Stderr
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.read)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			heard(lines.Text())
		}
	}()
	return c, nil
}

// Say writes a line to the standard input of the child.
func (c *Child) Say(line string) error {
	_, err := fmt.Fprintln(c.stdin, line)
	return err
}

// Ended is closed when the child has ended, by itself for example.
func (c *Child) Ended() <-chan struct{} { return c.read }

// Kill ends the child with SIGKILL, as the kernel does that needs memory. What it had printed
// until then was heard.
func (c *Child) Kill() error {
	if err := c.cmd.Process.Kill(); err != nil {
		return err
	}
	<-c.read
	_ = c.cmd.Wait() // that it was killed is no news
	return nil
}

// patience is how long a child may take to end.
const patience = 30 * time.Second

// Stop has the child finish what it is at, and end.
func (c *Child) Stop() error {
	_ = c.stdin.Close() // it has been only a signal
	late := time.AfterFunc(patience, func() { _ = c.cmd.Process.Kill() })
	defer late.Stop()
	<-c.read
	if err := c.cmd.Wait(); err != nil {
		return fmt.Errorf("another process of this program: %w", err)
	}
	return nil
}

// StopAll stops children, of which some may be nil.
func StopAll(all []*Child) (err error) {
	for i, c := range all {
		if c != nil {
			all[i] = nil
			err = errors.Join(err, c.Stop())
		}
	}
	return err
}
