// Package ending lets the tests of an example end its process by a signal.
package ending

import (
	"bytes"
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

// Require sends a signal to cmd, which runs, and requires that it exits with code 0.
func Require(t *testing.T, cmd *exec.Cmd, signal os.Signal) {
	t.Helper()
	require.NoError(t, cmd.Process.Signal(signal))
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	require.NoError(t, cmd.Wait())
}

// RequireWhileStarting starts cmd with the address of a PostgreSQL that does not
// answer, in the environment variable named by postgres, and requires that SIGTERM
// ends it with code 0.
func RequireWhileStarting(t *testing.T, cmd *exec.Cmd, postgres string) {
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
	Require(t, cmd, syscall.SIGTERM)
	require.NoError(t, conn.Close())
}
