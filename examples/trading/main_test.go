package main

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// seed repeats a run of the tests. A run prints its own.
var seed = flag.Uint64("seed", 0, "of the bots and the exchange in TestTrading; 0 is by chance")

// asTrading makes the test binary be the program, so that the tests run it as processes of
// its own, built as they are, with the race detector or without.
const asTrading = "OUTBOX_TEST_AS_TRADING"

func TestMain(m *testing.M) {
	if os.Getenv(asTrading) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// program is one that runs.
type program struct {
	cmd    *exec.Cmd
	schema string       // its own
	stdout bytes.Buffer // complete when wait has returned
	stderr bytes.Buffer
	copied chan struct{}
}

var schemaLine = regexp.MustCompile(`schema (trading_[0-9a-f]+)`)

// startTrading starts the program, and returns when it has named its schema.
func startTrading(t *testing.T, args ...string) *program {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	p := &program{cmd: exec.CommandContext(ctx, os.Args[0], args...), copied: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asTrading+"=1", "OUTBOX_POSTGRES_URL="+testenv.Pool(t, nil).Config().ConnString())
	p.cmd.Stderr = &p.stderr
	pipe, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	lines := bufio.NewReader(io.TeeReader(pipe, &p.stdout))
	for p.schema == "" {
		line, err := lines.ReadString('\n')
		if found := schemaLine.FindStringSubmatch(line); found != nil {
			p.schema = found[1]
		} else if err != nil {
			break
		}
	}
	go func() {
		defer close(p.copied)
		_, _ = io.Copy(io.Discard, lines)
	}()
	if p.schema == "" {
		t.Fatalf("the program ended early: exit code %d\n%s", p.wait(t), p.stderr.String())
	}
	return p
}

// wait returns the exit code. What the program printed goes to the test's log.
func (p *program) wait(t *testing.T) int {
	t.Helper()
	<-p.copied
	_ = p.cmd.Wait() // the exit code says it
	t.Logf("%s%s", p.stdout.String(), p.stderr.String())
	return p.cmd.ProcessState.ExitCode()
}

// requireNoSchema looks whether the program has cleaned up.
func (p *program) requireNoSchema(t *testing.T) {
	t.Helper()
	var there bool
	err := testenv.Pool(t, nil).QueryRow(context.Background(),
		`SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, p.schema).Scan(&there)
	require.NoError(t, err)
	require.False(t, there, "schema %s was left behind", p.schema)
}

// Processes are killed in the middle, and all equations hold. The seed is in the log.
func TestTrading(t *testing.T) {
	// Not parallel: processes are to be killed while they are busy.
	p := startTrading(t, "-orders=300", "-rate=60", "-kills=4", "-backtests=4", "-backtest=4s", "-lease=1s", "-patience=60s", fmt.Sprintf("-seed=%d", *seed))
	require.Zero(t, p.wait(t))
	out := p.stdout.String()
	require.Contains(t, out, "4 processes killed")
	require.Regexp(t, `attempts: [1-9]\d* ACKED, [1-9]\d* REJECTED, [1-9]\d* THROTTLED and made again, [1-9]\d* NOT_PLACED`, out)
	require.Regexp(t, `[1-9]\d* commands waited while the kill switch was on`, out)
	require.NotContains(t, out, "wrong")
	require.Empty(t, p.stderr.String())
	p.requireNoSchema(t)
}

// Without a kill nothing is done twice: leases are renewed while backtests run, which take
// four times as long.
func TestTradingWithoutKills(t *testing.T) {
	// Not parallel: leases are short.
	p := startTrading(t, "-orders=50", "-kills=0", "-backtests=4", "-backtest=4s", "-lease=1s", "-patience=60s")
	require.Zero(t, p.wait(t))
	require.Regexp(t, `(?m)^ +0 +backtests begun again +=`, p.stdout.String())
	p.requireNoSchema(t)
}

// An attempt that says ACKED, and of which the exchange knows nothing, is found.
func TestTradingFindsAWrongAttempt(t *testing.T) {
	t.Parallel()
	p := startTrading(t, "-orders=50", "-processes=1", "-kills=0", "-backtests=0", "-patience=5s")
	db := testenv.Pool(t, nil)
	in := func(table string) string { return pgx.Identifier{p.schema, table}.Sanitize() }
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		changed, err := db.Exec(context.Background(), `INSERT INTO `+in("order_attempt")+` (order_intent_id, attempt_no, identifier, state)
			SELECT id, 99, 'nowhere', 'ACKED' FROM `+in("order_intent")+` LIMIT 1`)
		return err == nil && changed.RowsAffected() == 1
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.wait(t))
	require.Regexp(t, `(?m)orders at the exchange .* wrong$`, p.stdout.String())
	require.Contains(t, p.stdout.String(), "The numbers do not add up.")
	p.requireNoSchema(t)
}

// A signal ends what the bots do. What was decided is done and compared.
func TestTradingInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startTrading(t, "-orders=1000000", "-processes=1", "-kills=1", "-backtests=1", "-backtest=1s", "-patience=60s")
			db := testenv.Pool(t, nil)
			attempts := pgx.Identifier{p.schema, "order_attempt"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+attempts).Scan(&n)
				return err == nil && n > 10
			}, testenv.Patience, 10*time.Millisecond)
			require.NoError(t, p.cmd.Process.Signal(signal))
			require.Zero(t, p.wait(t))
			p.requireNoSchema(t)
		})
	}
}

func TestTradingInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asTrading+"=1")
	ending.RequireWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, args string
	code                 int
	stdout, stderr       string
}{
	{"help", "", "--help", exitRight, "-orders", ""},
	{"no PostgreSQL", "", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"unknown flag", "postgres://h/d", "-order=1", exitUsage, "", "-order"},
	{"not a flag", "postgres://h/d", "orders", exitUsage, "", `"orders" is not a flag`},
	{"no orders", "postgres://h/d", "-orders=0", exitUsage, "", "-orders"},
	{"fewer than no kills", "postgres://h/d", "-kills=-1", exitUsage, "", "-kills"},
	{"workers without a schema", "postgres://h/d", "-exchange=http://h", exitUsage, "", "-schema"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "", exitWrong, "", "connect"},
	{"nobody answers workers", "postgres://127.0.0.1:1/d", "-exchange=http://h -schema=s", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], strings.Fields(tt.args)...)
			cmd.Env = append(os.Environ(), asTrading+"=1", "OUTBOX_POSTGRES_URL="+tt.postgres)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // the exit code says it
			require.Equal(t, tt.code, cmd.ProcessState.ExitCode())
			require.Contains(t, stdout.String(), tt.stdout)
			require.Contains(t, stderr.String(), tt.stderr)
		})
	}
}
