package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/outboxgo/outbox/tools/internal/proc"
)

// runner goes through the phases start, command (or wait), stop. It reads
// signals itself in each phase, because they mean something else in each.
type runner struct {
	opts    *options
	signals <-chan os.Signal
	say     teller
}

// run returns the exit code.
func (r *runner) run(ctx context.Context) int {
	services, sig, err := r.start(ctx)
	code := exitServices
	switch {
	case sig != nil:
		code = exitSignal + int(sig.(syscall.Signal))
		if r.opts.up {
			code = 0
		}
	case err != nil:
		r.say.line("%v", err)
	case r.opts.up:
		code = r.wait(services)
	default:
		code = r.command(services)
	}
	if services != nil {
		if err := r.stop(services); err != nil {
			r.say.line("stop: %v", err)
		}
	}
	return code
}

// start starts the services. A signal breaks it off; then whatever was started
// is stopped or returned.
func (r *runner) start(ctx context.Context) (_ *stack, stoppedBy os.Signal, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	type result struct {
		services *stack
		err      error
	}
	started := make(chan result, 1)
	go func() {
		services, err := startAll(ctx, r.opts, r.say)
		started <- result{services, err}
	}()
	for {
		select {
		case sig := <-r.signals:
			r.say.step("%v, stopping", sig)
			stoppedBy = sig
			cancel(errors.New(sig.String()))
		case result := <-started:
			return result.services, stoppedBy, result.err
		}
	}
}

// wait is what "up" does between start and stop.
func (r *runner) wait(services *stack) (code int) {
	lines := strings.Join(services.env(), "\n") + "\n"
	if err := writeEnvFile(r.opts.envFile, lines); err != nil {
		r.say.line("%v", err)
		return exitServices
	}
	defer removeEnvFile(r.opts.envFile, lines)
	r.say.step("addresses are in %s; Ctrl-C stops", r.opts.envFile)
	quit := make(chan struct{})
	defer close(quit)
	select {
	case <-r.signals:
		return 0
	case err := <-services.watch(quit):
		r.say.line("%v", err)
		return exitServices
	}
}

// writeEnvFile writes the file at once: who sees it sees all of it.
func writeEnvFile(path, lines string) error {
	part := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.WriteFile(part, []byte(lines), 0o600); err != nil {
		return fmt.Errorf("write addresses: %w", err)
	}
	if err := os.Rename(part, path); err != nil {
		os.Remove(part)
		return fmt.Errorf("write addresses: %w", err)
	}
	return nil
}

// removeEnvFile leaves the file alone if another instance has replaced it.
func removeEnvFile(path, lines string) {
	if b, err := os.ReadFile(path); err == nil && string(b) == lines {
		os.Remove(path)
	}
}

// command runs the user's command and returns its exit code.
func (r *runner) command(services *stack) (code int) {
	cmd := exec.Command(r.opts.command[0], r.opts.command[1:]...)
	cmd.Env = append(os.Environ(), services.env()...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	ended, err := proc.Launch(cmd, syscall.SIGTERM)
	if err != nil {
		r.say.line("run the command: %v", err)
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			return exitNotFound
		}
		return exitCannot
	}
	quit := make(chan struct{})
	defer close(quit)
	failed := services.watch(quit)
	for {
		select {
		case sig := <-r.signals:
			if sig == os.Interrupt && inForeground() {
				continue // the terminal has sent it to the command, too
			}
			_ = cmd.Process.Signal(sig) // it may just have ended
		case err := <-failed:
			r.say.warn("%v", err)
		case err := <-ended:
			return r.exitCode(cmd, err)
		}
	}
}

func (r *runner) exitCode(cmd *exec.Cmd, err error) int {
	if cmd.ProcessState == nil {
		r.say.line("wait for the command: %v", err)
		return exitServices
	}
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return cmd.ProcessState.ExitCode()
}

// inForeground reports whether Ctrl-C in the terminal is sent to our process
// group, to which the command belongs.
func inForeground() bool {
	terminal, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer terminal.Close()
	group, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// stop stops the services. Another signal makes it short.
func (r *runner) stop(services *stack) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	stopped := make(chan error, 1)
	go func() { stopped <- services.stop(ctx) }()
	for {
		select {
		case sig := <-r.signals:
			cancel(errors.New(sig.String()))
		case err := <-stopped:
			return err
		}
	}
}
