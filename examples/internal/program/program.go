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
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/examples/internal/show"
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
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// Command returns the program, which is not started yet, with more in its environment.
func Command(ctx context.Context, args []string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(append(os.Environ(), is+"=1"), env...)
	return cmd
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

// Tables returns connections that look for tables in the schema of the program.
func (p *Process) Tables(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db, err := show.Connect(context.Background(), testenv.Pool(t, nil).Config().ConnString(), p.Schema, 2)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return db
}

// Change waits until a statement changes a row. The program makes its tables and works meanwhile.
func (p *Process) Change(t *testing.T, sql string) {
	t.Helper()
	db := p.Tables(t)
	require.Eventually(t, func() bool {
		changed, err := db.Exec(context.Background(), sql)
		return err == nil && changed.RowsAffected() == 1
	}, testenv.Patience, 5*time.Millisecond)
}

// AwaitRows waits until a table has more than n rows.
func (p *Process) AwaitRows(t *testing.T, table string, n int) {
	t.Helper()
	db, rows := p.Tables(t), 0
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+table).Scan(&rows)
		return err == nil && rows > n
	}, testenv.Patience, 10*time.Millisecond)
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
