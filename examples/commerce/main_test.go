package main

import (
	"bufio"
	"bytes"
	"context"
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

// asCommerce makes the test binary be the program, so that the tests run it as a
// process of its own, built as they are, with the race detector or without.
const asCommerce = "OUTBOX_TEST_AS_COMMERCE"

func TestMain(m *testing.M) {
	if os.Getenv(asCommerce) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// process is a program that runs.
type process struct {
	cmd    *exec.Cmd
	schema string       // its own
	stdout bytes.Buffer // complete when wait has returned
	stderr bytes.Buffer
	copied chan struct{}
}

var schemaLine = regexp.MustCompile(`schema (commerce_[0-9a-f]+)`)

// startCommerce starts the program, with the Redis that it brings, and returns when
// it has named its schema.
func startCommerce(t *testing.T, args ...string) *process {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	p := &process{cmd: exec.CommandContext(ctx, os.Args[0], args...), copied: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asCommerce+"=1", "REDIS_URL=",
		"OUTBOX_POSTGRES_URL="+testenv.Pool(t, nil).Config().ConnString(),
		"OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
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
func (p *process) wait(t *testing.T) int {
	t.Helper()
	<-p.copied
	_ = p.cmd.Wait() // the exit code says it
	t.Logf("%s%s", p.stdout.String(), p.stderr.String())
	return p.cmd.ProcessState.ExitCode()
}

// requireNoSchema looks whether the program has cleaned up.
func (p *process) requireNoSchema(t *testing.T) {
	t.Helper()
	var there bool
	err := testenv.Pool(t, nil).QueryRow(context.Background(),
		`SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, p.schema).Scan(&there)
	require.NoError(t, err)
	require.False(t, there, "schema %s was left behind", p.schema)
}

// Everything is published twice and some orders are announced twice besides. What is
// counted is what committed, and there were repeats to skip.
func TestCommerce(t *testing.T) {
	// Not parallel: the program warns where it is slow.
	p := startCommerce(t, "-visits=200", "-patience=60s")
	require.Zero(t, p.wait(t))
	out := p.stdout.String()
	require.Regexp(t, `(?m)^ +SALES_COUNT_INCREASED +[1-9]\d* +[1-9]\d*$`, out)
	require.Regexp(t, `(?m)^ +VIEW_COUNT_INCREASED +[1-9]\d* +[1-9]\d*$`, out)
	require.Regexp(t, `(?m)^ +LIKE_COUNT_DECREASED +[1-9]\d* +-$`, out)
	require.Regexp(t, `(?m) deleted$`, out)
	require.NotContains(t, out, "wrong")
	require.Empty(t, p.stderr.String(), "no warning in a run without problems")
	p.requireNoSchema(t)
}

// A like whose event nobody recorded is what an event looks like that got lost.
func TestCommerceMissesALike(t *testing.T) {
	// Not parallel: the like must be there before the program has ended.
	p := startCommerce(t, "-visits=50", "-patience=2s")
	db := testenv.Pool(t, nil)
	likes := pgx.Identifier{p.schema, "likes"}.Sanitize()
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		_, err := db.Exec(context.Background(), `INSERT INTO `+likes+` (product_id, user_id) VALUES (1, 1000000)`)
		return err == nil
	}, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.wait(t))
	require.Regexp(t, `(?m)^ +1 .* wrong$`, p.stdout.String())
	require.NotRegexp(t, `(?m)^ +2 .* wrong$`, p.stdout.String())
	require.Contains(t, p.stdout.String(), "What was counted is not what committed.")
	p.requireNoSchema(t)
}

// A signal closes the shop; what was sold is counted and compared.
func TestCommerceInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startCommerce(t, "-visits=1000000", "-patience=60s")
			db := testenv.Pool(t, nil)
			orders := pgx.Identifier{p.schema, "orders"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+orders).Scan(&n)
				return err == nil && n > 50
			}, 30*time.Second, 10*time.Millisecond)
			require.NoError(t, p.cmd.Process.Signal(signal))
			require.Zero(t, p.wait(t))
			p.requireNoSchema(t)
		})
	}
}

func TestCommerceInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asCommerce+"=1", "OUTBOX_KAFKA_BROKERS=127.0.0.1:1", "REDIS_URL=")
	ending.RequireWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "--help", exitRight, "-visits", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-visitz=1", exitUsage, "", "-visitz"},
	{"not a flag", "postgres://h/d", "b:1", "visits", exitUsage, "", `"visits" is not a flag`},
	{"no visits", "postgres://h/d", "b:1", "-visits=0", exitUsage, "", "-visits"},
	{"no patience", "postgres://h/d", "b:1", "-patience=0s", exitUsage, "", "-patience"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], strings.Fields(tt.args)...)
			cmd.Env = append(os.Environ(), asCommerce+"=1", "REDIS_URL=",
				"OUTBOX_POSTGRES_URL="+tt.postgres, "OUTBOX_KAFKA_BROKERS="+tt.brokers)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // the exit code says it
			require.Equal(t, tt.code, cmd.ProcessState.ExitCode())
			require.Contains(t, stdout.String(), tt.stdout)
			require.Contains(t, stderr.String(), tt.stderr)
		})
	}
}

// Redis is asked for before anything is begun. A server that is not there is told.
func TestRedisURL(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{"http://localhost": "REDIS_URL", "redis://127.0.0.1:1": "connect to Redis"} {
		_, _, err := openRedis(t.Context(), url)
		require.ErrorContains(t, err, want, url)
	}
}
