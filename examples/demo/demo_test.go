package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// asDemo makes the test binary be the demo, so that the tests run the program as
// a process of its own, built as they are, with the race detector or without.
const asDemo = "OUTBOX_TEST_AS_DEMO"

func TestMain(m *testing.M) {
	if os.Getenv(asDemo) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// process is a demo that runs.
type process struct {
	cmd    *exec.Cmd
	schema string // its own
	stdout output // complete when wait has returned
	stderr bytes.Buffer
	copied chan struct{}
}

// output is what a process prints, to be read while it runs.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

var schemaLine = regexp.MustCompile(`schema (demo_[0-9a-f]+)`)

// startDemo starts a demo and returns when it has named its schema.
func startDemo(t *testing.T, args ...string) *process {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	p := &process{cmd: exec.CommandContext(ctx, os.Args[0], args...), copied: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asDemo+"=1",
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
		t.Fatalf("the demo ended early: exit code %d\n%s", p.wait(t), p.stderr.String())
	}
	return p
}

// wait returns the exit code. What the demo printed goes to the test's log.
func (p *process) wait(t *testing.T) int {
	t.Helper()
	<-p.copied
	_ = p.cmd.Wait() // the exit code says it
	t.Logf("%s%s", p.stdout.String(), p.stderr.String())
	return p.cmd.ProcessState.ExitCode()
}

// requireRow finds a row of the summary, whatever the space between its columns.
func (p *process) requireRow(t *testing.T, name, pattern string) {
	t.Helper()
	require.Regexp(t, `(?m)^  `+name+` +`+pattern, p.stdout.String())
}

func requireNoSchema(t *testing.T, schema string) {
	t.Helper()
	var there bool
	err := testenv.Pool(t, nil).QueryRow(context.Background(),
		`SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, schema).Scan(&there)
	require.NoError(t, err)
	require.False(t, there, "schema %s was left behind", schema)
}

func TestDemo(t *testing.T) {
	// Not parallel: the demo measures latencies.
	p := startDemo(t, "-orders=400", "-rate=400")
	require.Zero(t, p.wait(t))
	p.requireRow(t, "missing", `0$`)
	p.requireRow(t, "never committed", `0$`)
	p.requireRow(t, "out of order", `0$`)
	p.requireRow(t, "latency", `p50 .* ms, p99 .* ms, max .* ms`)
	require.Contains(t, p.stdout.String(), "order 1 commits after")
	p.requireRow(t, "health", "the relay is live and ready$")
	p.requireRow(t, "failed event", "event-1: message_too_large")
	p.requireRow(t, "dead delivery", `delivery-\d+: CONFIRM_ORDER of group mail; .*the customer has no address`)
	p.requireRow(t, "outage", `Kafka is cut off; after .* s the relay is live and not ready: .*(the circuit breaker is open|Kafka fails)`)
	require.Regexp(t, `Kafka is back; after .* s the order that was placed meanwhile is sent, and the relay is live and ready\n`, p.stdout.String())
	require.Contains(t, p.stdout.String(), "make demo ARGS=-keep")
	require.NotContains(t, p.stdout.String(), "\x1b", "colour where nobody looks")
	requireNoSchema(t, p.schema)
}

// The operators' page is open while the demo runs, and with -keep until Ctrl-C; only to
// who names this machine by its address.
func TestDemoKeepsThePage(t *testing.T) {
	t.Parallel()
	p := startDemo(t, "-orders=100", "-rate=0", "-keep")
	require.NotContains(t, p.stdout.String(), "-keep keeps it open")
	var page string
	require.Eventually(t, func() bool {
		found := regexp.MustCompile(`page stays at (\S+)`).FindStringSubmatch(p.stdout.String())
		if found != nil {
			page = found[1]
		}
		return page != ""
	}, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, http.StatusOK, status(t, page, ""))
	require.Equal(t, http.StatusOK, status(t, page+"failed", ""))
	db := testenv.Pool(t, nil)
	for table, want := range map[string]string{"outbox_failed": "message_too_large", "event_delivery": "DEAD"} {
		var row string
		require.NoError(t, db.QueryRow(context.Background(), `SELECT t::text FROM `+pgx.Identifier{p.schema, table}.Sanitize()+` AS t WHERE t::text LIKE '%'||$1||'%'`, want).Scan(&row))
	}
	require.Equal(t, http.StatusUnauthorized, status(t, page, "rebound.example"))
	require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
	require.Zero(t, p.wait(t))
	requireNoSchema(t, p.schema)
}

// status asks for a page under another name of its host.
func status(t *testing.T, page, host string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, page, http.NoBody)
	require.NoError(t, err)
	r.Host = cmp.Or(host, r.Host)
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	return response.StatusCode
}

func TestDemoAsFastAsPossible(t *testing.T) {
	t.Parallel()
	p := startDemo(t, "-orders=400", "-rate=0", "-shoppers=30", "-calm")
	require.Zero(t, p.wait(t))
	p.requireRow(t, "missing", `0$`)
	p.requireRow(t, "latency", `not measured`)
}

// A line of the journal whose event nobody recorded is what an event looks like
// that got lost on the way.
func TestDemoMissesAnEvent(t *testing.T) {
	// Not parallel: the line must be there before the demo has ended.
	p := startDemo(t, "-orders=800", "-rate=400", "-patience=1s", "-calm")
	db := testenv.Pool(t, nil)
	journal := pgx.Identifier{p.schema, "journal"}.Sanitize()
	require.Eventually(t, func() bool { // the demo makes its tables meanwhile
		_, err := db.Exec(context.Background(), `INSERT INTO `+journal+` (order_id, event_type, key) VALUES (1000000, 'lost', '1')`)
		return err == nil
	}, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.wait(t))
	p.requireRow(t, "missing", `1$`)
	p.requireRow(t, "never committed", `0$`)
	require.Contains(t, p.stdout.String(), "What arrived is not what committed.")
	requireNoSchema(t, p.schema)
}

// A signal closes the shop; what was sold is delivered and compared.
func TestDemoInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startDemo(t, "-orders=1000000", "-rate=200")
			db := testenv.Pool(t, nil)
			orders := pgx.Identifier{p.schema, "orders"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+orders).Scan(&n)
				return err == nil && n > 50
			}, 30*time.Second, 10*time.Millisecond)
			require.NoError(t, p.cmd.Process.Signal(signal))
			require.Zero(t, p.wait(t))
			p.requireRow(t, "missing", `0$`)
			requireNoSchema(t, p.schema)
		})
	}
}

func TestDemoInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asDemo+"=1", "OUTBOX_KAFKA_BROKERS=127.0.0.1:1")
	ending.RequireWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}

func TestAllEventsAreRegistered(t *testing.T) {
	t.Parallel()
	events, err := registry()
	require.NoError(t, err)
	outboxtest.RequireAllRegistered(t, events, "./...")
}

var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "-h", exitRight, "-shoppers", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-orderz=1", exitUsage, "", "-orderz"},
	{"not a flag", "postgres://h/d", "b:1", "orders", exitUsage, "", `"orders" is not a flag`},
	{"no orders", "postgres://h/d", "b:1", "-orders=0", exitUsage, "", "-orders"},
	{"negative rate", "postgres://h/d", "b:1", "-rate=-1", exitUsage, "", "-rate"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "-quiet", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], strings.Fields(tt.args)...)
			cmd.Env = append(os.Environ(), asDemo+"=1", "OUTBOX_POSTGRES_URL="+tt.postgres, "OUTBOX_KAFKA_BROKERS="+tt.brokers)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // the exit code says it
			require.Equal(t, tt.code, cmd.ProcessState.ExitCode())
			require.Contains(t, stdout.String(), tt.stdout)
			require.Contains(t, stderr.String(), tt.stderr)
		})
	}
}
