package proc_test

import (
	"context"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/proc"
)

func shell(script string) proc.Command {
	return proc.Command{Path: "/bin/sh", Args: []string{"-c", script}}
}

func TestErrorHoldsTheLastLines(t *testing.T) {
	t.Parallel()
	err := proc.Run(t.Context(), shell("seq 1 5000; echo the reason >&2; exit 3"))
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 3, exit.ExitCode())
	require.ErrorContains(t, err, "\n5000\nthe reason")
	require.NotContains(t, err.Error(), "\n3000\n")
	require.NoError(t, proc.Run(t.Context(), shell("true")))
	require.Error(t, proc.Run(t.Context(), proc.Command{Path: "/no/such/program"}))
}

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	require.ErrorIs(t, proc.Run(ctx, shell("exec sleep 60")), context.Canceled)
}

// A child that keeps the output open would otherwise be waited for.
func TestKillEndsChildren(t *testing.T) {
	t.Parallel()
	p, err := proc.Start(shell("sleep 60 & sleep 60 & wait"))
	require.NoError(t, err)
	time.Sleep(50 * time.Millisecond) // for the children; with fewer the test is only weaker
	require.NoError(t, p.Kill())
	require.Error(t, p.Err())
	require.NoError(t, p.Kill(), "twice")
	require.NoError(t, p.Signal(syscall.SIGTERM), "too late")
}

func TestStopKillsWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	p, err := proc.Start(shell("trap '' TERM; echo ready; while :; do sleep 60; done"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.Tail() == "ready" }, 10*time.Second, time.Millisecond)
	require.NoError(t, p.Err(), "it runs")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Stop(ctx, syscall.SIGTERM), context.DeadlineExceeded)
	<-p.Done()
}
