package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// TestMain makes the test's program the relay in a process of its own.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == childArg {
		os.Exit(childMain(context.Background(), os.Stdin, os.Stdout, os.Stderr))
	}
	// sarama, under watermill-kafka, counts with meters that one goroutine of the process ticks for ever.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

// logical returns the address of a PostgreSQL from whose WAL Debezium can read.
func logical(t *testing.T) string {
	t.Helper()
	binDir, err := pgserver.Embedded(t.Context(), pgserver.DefaultVersion, t.Output())
	require.NoError(t, err)
	s, err := pgserver.Start(t.Context(), pgserver.Config{BinDir: binDir, Settings: map[string]string{"wal_level": "logical"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop(context.Background())) })
	return s.URL()
}

// Every peer relays what is recorded while it runs, and what was recorded before, and the
// record is the event: arriveAll and laps miss what does not arrive. The document has a
// row for each peer.
func TestRunMeasuresEveryPeerAndLeavesNothing(t *testing.T) {
	brokers := testenv.RealBrokers(t)
	docs := t.TempDir()
	cfg := config{
		Addresses: services.Addresses{Postgres: logical(t), Brokers: brokers, Kind: "kafka"},
		which:     regexp.MustCompile("latency|drain"), peers: peerNames(),
		runs: 1, rates: []int{50}, seconds: 0.5, warm: 0.1, workers: 4, partitions: 2, events: minEvents, drainPeriod: 30, walEvents: 50,
		json: filepath.Join(docs, "results.jsonl"), docs: docs,
	}
	var stdout, stderr bytes.Buffer
	require.NoError(t, run(context.Background(), cfg, &stdout, &stderr), "%s", &stderr)

	for _, p := range peers {
		require.Contains(t, stdout.String(), "drain/"+p.name)
	}
	lines, err := os.ReadFile(cfg.json)
	require.NoError(t, err)
	for line := range strings.Lines(string(lines)) {
		var r report.Result
		require.NoError(t, json.Unmarshal([]byte(line), &r), line)
		require.NotEmpty(t, r.Scenario)
	}
	text, err := os.ReadFile(filepath.Join(docs, documentFile))
	require.NoError(t, err)
	for _, p := range peers {
		require.Contains(t, string(text), "| "+p.name+" |")
	}
	require.FileExists(t, filepath.Join(docs, imagesDir, "benchmarks-drain.svg"))
	require.NoError(t, renderAgain(docs))
	again, err := os.ReadFile(filepath.Join(docs, documentFile))
	require.NoError(t, err)
	require.Equal(t, string(text), string(again))
	requireNothingLeft(t, cfg.Postgres)
}

// The WAL of a transaction is compared with that of a transaction that records nothing.
func TestWAL(t *testing.T) {
	cfg := config{
		Addresses: services.Addresses{Postgres: testenv.Pool(t, nil).Config().ConnString(), Brokers: testenv.RealBrokers(t), Kind: "kafka"},
		which:     regexp.MustCompile("wal"),
		runs:      1, workers: 4, partitions: 2, events: minEvents, drainPeriod: 30, walEvents: 200,
	}
	var stdout, stderr bytes.Buffer
	require.NoError(t, run(context.Background(), cfg, &stdout, &stderr), "%s", &stderr)
	require.Contains(t, stdout.String(), "wal/without")
	require.Contains(t, stdout.String(), "wal/outbox")
}

func requireNothingLeft(t *testing.T, url string) {
	t.Helper()
	db, err := services.NewPool(context.Background(), url, 1)
	require.NoError(t, err)
	defer db.Close()
	for _, sql := range []string{
		`SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'bench%'`, `SELECT count(*) FROM pg_replication_slots`, `SELECT count(*) FROM pg_publication`,
	} {
		var n int
		require.NoError(t, db.QueryRow(context.Background(), sql).Scan(&n))
		require.Zero(t, n, sql)
	}
}

// All peers publish the same bytes, but for what jsonb makes of them.
func TestPayload(t *testing.T) {
	e := orders.New(7)
	payload, err := payloadOf(e)
	require.NoError(t, err)
	n, err := orders.Number(payload)
	require.NoError(t, err)
	require.Equal(t, 7, n)
	job, err := json.Marshal(riverJob(e))
	require.NoError(t, err)
	require.Equal(t, string(payload), string(job))
}
