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

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
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
	requireRow(t, p, "health", "the relay is live and works$")
	requireRow(t, p, "failed event", "event-1: message_too_large")
	requireRow(t, p, "dead delivery", `delivery-\d+: CONFIRM_ORDER of group mail; .*the customer has no address`)
	requireRow(t, p, "outage", `Kafka is cut off; after .* s the relay is live and does not work: .*(the circuit breaker is open|Kafka has been failing)`)
	require.Regexp(t, `Kafka is back; after .* s the order that was placed meanwhile is sent, and the relay is live and works\n`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "make demo ARGS=-keep")
	require.NotContains(t, p.Stdout.String(), "\x1b", "colour where nobody looks")
	p.RequireNoSchema(t)
}

// The operators' page is open while the demo runs, and with -keep until Ctrl-C; only to
// who names this machine by its address.
func TestDemoKeepsThePage(t *testing.T) {
	testenv.Long(t)
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
	db := p.Tables(t)
	for table, want := range map[string]string{"outbox_failed": "message_too_large", "event_delivery": "DEAD"} {
		var row string
		require.NoError(t, db.QueryRow(context.Background(), `SELECT t::text FROM `+table+` AS t WHERE t::text LIKE '%'||$1||'%'`, want).Scan(&row))
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

// A line of the journal without a recorded event looks like an event that was lost on the way.
func TestDemoMissesAnEvent(t *testing.T) {
	testenv.Long(t)
	// Not parallel: the line must be there before the demo has ended.
	p := startDemo(t, "-orders=800", "-rate=400", "-patience=1s", "-calm")
	p.Change(t, `INSERT INTO journal (order_id, event_type, key) VALUES (1000000, 'lost', '1')`)
	require.Equal(t, show.ExitWrong, p.Wait(t))
	requireRow(t, p, "missing", `1$`)
	requireRow(t, p, "never committed", `0$`)
	require.Contains(t, p.Stdout.String(), "What arrived is not what committed.")
	p.RequireNoSchema(t)
}

// A signal closes the shop; what was sold is delivered and compared.
func TestDemoInterrupted(t *testing.T) {
	testenv.Long(t)
	start := func(t *testing.T) *program.Process {
		return startDemo(t, "-orders=1000000", "-rate=200")
	}
	program.TestInterrupted(t, start, "orders", 50, func(t *testing.T, p *program.Process) {
		requireRow(t, p, "missing", `0$`)
	})
}

// Without Kafka the shop opens and sells. What it sold arrives once Kafka is there, and is compared.
func TestWithoutKafka(t *testing.T) {
	t.Parallel()
	p := program.TestWithoutKafka(t, 100, func(t *testing.T, env ...string) *program.Process {
		return program.Start(t, []string{"-orders=400", "-rate=200", "-calm"}, env...)
	})
	requireRow(t, p, "missing", `0$`)
}

// A signal ends a demo that has not seen Kafka.
func TestInterruptedWithoutKafka(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	address, _ := testenv.LateKafka(t)
	p := program.Start(t, []string{"-orders=1000000", "-rate=200"}, "OUTBOX_KAFKA_BROKERS="+address)
	p.AwaitRows(t, "outbox", 20)
	p.Signal(t, os.Interrupt)
	require.Zero(t, p.Wait(t))
	p.RequireNoSchema(t)
}

func TestAllEventsAreRegistered(t *testing.T) {
	t.Parallel()
	events, err := registry()
	require.NoError(t, err)
	outboxtest.RequireAllRegistered(t, events, "./...")
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-shoppers",
		program.NoKafka,
		program.Misuse("no orders", "-orders=0", "-orders"),
		program.Misuse("negative rate", "-rate=-1", "-rate"),
	)
}
