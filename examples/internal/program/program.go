// Package program runs an example in its tests as a process of its own: the test binary, built as it is, with
// the race detector or without.
package program

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// is says in the environment of a process that it is the program.
const is = "OUTBOX_TEST_IS_PROGRAM"

// Main runs the tests, or main if this process is the program.
func Main(m *testing.M, main func()) {
	if os.Getenv(is) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// Command returns the program, which is not started yet, with more in its environment.
func Command(ctx context.Context, args []string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(append(os.Environ(), is+"=1"), env...)
	return cmd
}

// RequireUsage requires what the program prints for some arguments, and its exit code.
func RequireUsage(t *testing.T, args string, env []string, code int, stdout, stderr string) {
	t.Helper()
	cmd := Command(t.Context(), strings.Fields(args), env...)
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	_ = cmd.Run() // the exit code says it
	require.Equal(t, code, cmd.ProcessState.ExitCode())
	require.Contains(t, out.String(), stdout)
	require.Contains(t, err.String(), stderr)
}

// Process is the program while it runs.
type Process struct {
	Schema string       // its own
	Stdout Output       // complete when Wait has returned
	Stderr bytes.Buffer // to be read when Wait has returned

	cmd    *exec.Cmd
	copied chan struct{}
}

// Output is what a program prints, to be read while it runs.
type Output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *Output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

// String returns what was printed until now.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

var schemaLine = regexp.MustCompile(`schema ([a-z]+_[0-9a-f]+)`)

// Start starts the program with the address of PostgreSQL, and returns when it has named its schema.
func Start(t *testing.T, args []string, env ...string) *Process {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	p := &Process{copied: make(chan struct{})}
	p.cmd = Command(ctx, args, append(env, "OUTBOX_POSTGRES_URL="+testenv.Pool(t, nil).Config().ConnString())...)
	p.cmd.Stderr = &p.Stderr
	pipe, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	lines := bufio.NewReader(io.TeeReader(pipe, &p.Stdout))
	for p.Schema == "" {
		line, err := lines.ReadString('\n')
		if found := schemaLine.FindStringSubmatch(line); found != nil {
			p.Schema = found[1]
		} else if err != nil {
			break
		}
	}
	go func() {
		defer close(p.copied)
		_, _ = io.Copy(io.Discard, lines)
	}()
	if p.Schema == "" {
		t.Fatalf("the program ended early: exit code %d\n%s", p.Wait(t), p.Stderr.String())
	}
	return p
}

// Signal sends a signal to the program.
func (p *Process) Signal(t *testing.T, signal os.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(signal))
}

// Wait returns the exit code. What the program printed goes to the test's log.
func (p *Process) Wait(t *testing.T) int {
	t.Helper()
	<-p.copied
	_ = p.cmd.Wait() // the exit code says it
	t.Logf("%s%s", p.Stdout.String(), p.Stderr.String())
	return p.cmd.ProcessState.ExitCode()
}

// RequireNoSchema requires that the program has cleaned up.
func (p *Process) RequireNoSchema(t *testing.T) {
	t.Helper()
	var there bool
	err := testenv.Pool(t, nil).QueryRow(context.Background(),
		`SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, p.Schema).Scan(&there)
	require.NoError(t, err)
	require.False(t, there, "schema %s was left behind", p.Schema)
}
