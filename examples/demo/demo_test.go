package main

import (
	"cmp"
	"context"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { program.Main(m, main) }

// startDemo starts a demo and returns when it has named its schema.
func startDemo(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return program.Start(t, args, "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// requireRow finds a row of the summary, whatever the space between its columns.
func requireRow(t *testing.T, p *program.Process, name, pattern string) {
	t.Helper()
	require.Regexp(t, `(?m)^  `+name+` +`+pattern, p.Stdout.String())
}

func TestDemo(t *testing.T) {
	// Not parallel: the demo measures latencies.
	p := startDemo(t, "-orders=400", "-rate=400")
	require.Zero(t, p.Wait(t))
	requireRow(t, p, "missing", `0$`)
	requireRow(t, p, "never committed", `0$`)
	requireRow(t, p, "out of order", `0$`)
	requireRow(t, p, "latency", `p50 .* ms, p99 .* ms, max .* ms`)
	require.Contains(t, p.Stdout.String(), "order 1 commits after")
	requireRow(t, p, "health", "the relay is live and ready$")
	requireRow(t, p, "failed event", "event-1: message_too_large")
	requireRow(t, p, "dead delivery", `delivery-\d+: CONFIRM_ORDER of group mail; .*the customer has no address`)
	requireRow(t, p, "outage", `Kafka is cut off; after .* s the relay is live and not ready: .*(the circuit breaker is open|Kafka fails)`)
	require.Regexp(t, `Kafka is back; after .* s the order that was placed meanwhile is sent, and the relay is live and ready\n`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "make demo ARGS=-keep")
	require.NotContains(t, p.Stdout.String(), "\x1b", "colour where nobody looks")
	p.RequireNoSchema(t)
}

// The operators' page is open while the demo runs, and with -keep until Ctrl-C; only to
// who names this machine by its address.
func TestDemoKeepsThePage(t *testing.T) {
	t.Parallel()
	p := startDemo(t, "-orders=100", "-rate=0", "-keep")
	require.NotContains(t, p.Stdout.String(), "-keep keeps it open")
	var page string
	require.Eventually(t, func() bool {
		found := regexp.MustCompile(`page stays at (\S+)`).FindStringSubmatch(p.Stdout.String())
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
		require.NoError(t, db.QueryRow(context.Background(), `SELECT t::text FROM `+pgx.Identifier{p.Schema, table}.Sanitize()+` AS t WHERE t::text LIKE '%'||$1||'%'`, want).Scan(&row))
	}
	require.Equal(t, http.StatusUnauthorized, status(t, page, "rebound.example"))
	p.Signal(t, os.Interrupt)
	require.Zero(t, p.Wait(t))
	p.RequireNoSchema(t)
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
	require.Zero(t, p.Wait(t))
	requireRow(t, p, "missing", `0$`)
	requireRow(t, p, "latency", `not measured`)
}

// A line of the journal whose event nobody recorded is what an event looks like
// that got lost on the way.
func TestDemoMissesAnEvent(t *testing.T) {
	// Not parallel: the line must be there before the demo has ended.
	p := startDemo(t, "-orders=800", "-rate=400", "-patience=1s", "-calm")
	db := testenv.Pool(t, nil)
	journal := pgx.Identifier{p.Schema, "journal"}.Sanitize()
	require.Eventually(t, func() bool { // the demo makes its tables meanwhile
		_, err := db.Exec(context.Background(), `INSERT INTO `+journal+` (order_id, event_type, key) VALUES (1000000, 'lost', '1')`)
		return err == nil
	}, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.Wait(t))
	requireRow(t, p, "missing", `1$`)
	requireRow(t, p, "never committed", `0$`)
	require.Contains(t, p.Stdout.String(), "What arrived is not what committed.")
	p.RequireNoSchema(t)
}

// A signal closes the shop; what was sold is delivered and compared.
func TestDemoInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startDemo(t, "-orders=1000000", "-rate=200")
			db := testenv.Pool(t, nil)
			orders := pgx.Identifier{p.Schema, "orders"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+orders).Scan(&n)
				return err == nil && n > 50
			}, 30*time.Second, 10*time.Millisecond)
			p.Signal(t, signal)
			require.Zero(t, p.Wait(t))
			requireRow(t, p, "missing", `0$`)
			p.RequireNoSchema(t)
		})
	}
}

func TestDemoInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := program.Command(context.Background(), nil, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1")
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
			env := []string{"OUTBOX_POSTGRES_URL=" + tt.postgres, "OUTBOX_KAFKA_BROKERS=" + tt.brokers}
			program.RequireUsage(t, tt.args, env, tt.code, tt.stdout, tt.stderr)
		})
	}
}
