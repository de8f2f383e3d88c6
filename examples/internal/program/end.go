package program

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Signals are the ways to end an example: Ctrl-C, and what a container's host sends.
var Signals = []os.Signal{os.Interrupt, syscall.SIGTERM}

// patience is how long a process may take to end.
const patience = time.Minute

// RequireEnd sends a signal to cmd, which runs, and requires that it exits with code 0.
func RequireEnd(t *testing.T, cmd *exec.Cmd, signal os.Signal) {
	t.Helper()
	require.NoError(t, cmd.Process.Signal(signal))
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	require.NoError(t, cmd.Wait())
}

// RequireEndWhileStarting starts cmd with the address of a PostgreSQL that does not
// answer, in the environment variable named by postgres, and requires that SIGTERM
// ends it with code 0.
func RequireEndWhileStarting(t *testing.T, cmd *exec.Cmd, postgres string) {
	t.Helper()
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	cmd.Env = append(cmd.Env, postgres+"=postgres://someone@"+silent.Addr().String()+"/x?sslmode=disable")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	defer func() { t.Logf("it printed:\n%s", &out) }()
	require.NoError(t, cmd.Start())
	require.NoError(t, silent.(*net.TCPListener).SetDeadline(time.Now().Add(patience)))
	conn, err := silent.Accept()
	require.NoError(t, err)
	RequireEnd(t, cmd, syscall.SIGTERM)
	require.NoError(t, conn.Close())
}

// TestInterrupted requires that each of the [Signals] ends the program.
//   - start starts it. The signal comes once its table has more than n rows.
//   - It exits with code 0 and drops its schema.
//   - check looks at what it printed.
//
// It also requires that SIGTERM ends a program that waits for PostgreSQL.
func TestInterrupted(
	t *testing.T, start func(t *testing.T) *Process, table string, n int, check func(t *testing.T, p *Process),
) {
	t.Parallel()
	for _, signal := range Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := start(t)
			p.AwaitRows(t, table, n)
			p.Signal(t, signal)
			require.Zero(t, p.Wait(t))
			check(t, p)
			p.RequireNoSchema(t)
		})
	}
	t.Run("while starting", TestInterruptedWhileStarting)
}

// TestInterruptedWhileStarting requires that SIGTERM ends a program that waits for PostgreSQL.
func TestInterruptedWhileStarting(t *testing.T) {
	cmd := Command(context.Background(), nil, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1", "REDIS_URL=")
	RequireEndWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}
