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

	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"
)

// TestMain makes the test's program the child that scenarios start.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == childArg {
		os.Exit(childMain(context.Background(), os.Stdin, os.Stdout, os.Stderr))
	}
	goleak.VerifyTestMain(m)
}

// tiny measures everything, and nothing well.
func tiny(t *testing.T) config {
	brokers := testenv.RealBrokers(t)
	return config{
		Addresses: services.Addresses{Postgres: testenv.Pool(t, nil).Config().ConnString(), Brokers: brokers, Kind: "kafka"},
		which:     regexp.MustCompile(""),
		runs:      2, longRuns: 2, large: 60, largeSize: 100_000, backlogs: []int{4000, 9000}, parked: 20, beside: 0.3, newlyBad: 0.3, bulk: 1000, events: 2000, backlog: 10_000, rates: []int{50}, seconds: 0.4, warm: 0.1,
		workers: 4, polls: 20, records: 200, partitions: 2, poisons: 1, poisonEvery: 40, outage: minOutage, handled: 2000, retained: minEvents,
		busEvents: 1000, busHot: 500, busOpen: 0.1, failingEvents: 1000, failingSeconds: 1, silence: 0.01, silences: 3, kills: 1, tenants: 3, tenantRate: 20,
	}
}

func TestRunMeasuresEverythingAndLeavesNothing(t *testing.T) {
	cfg := tiny(t)
	cfg.json = filepath.Join(t.TempDir(), "results.jsonl")
	before := schemas(t)
	var stdout, stderr bytes.Buffer
	require.NoError(t, run(context.Background(), cfg, &stdout, &stderr), "%s", &stderr)

	for _, s := range scenarios {
		require.Contains(t, stdout.String(), "\n"+s.name) // or that it failed: four workers may be too few
	}
	lines, err := os.ReadFile(cfg.json)
	require.NoError(t, err)
	for line := range strings.Lines(string(lines)) {
		var r report.Result
		require.NoError(t, json.Unmarshal([]byte(line), &r), line)
		require.NotEmpty(t, r.Scenario)
	}
	require.Equal(t, before, schemas(t))
}

func schemas(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, testenv.Pool(t, nil).QueryRow(context.Background(), `SELECT count(*) FROM pg_namespace`).Scan(&n))
	return n
}

func TestCtrlC(t *testing.T) {
	ctx, interrupt := context.WithCancel(context.Background())
	cfg := tiny(t)
	cfg.which = regexp.MustCompile("drain")
	before := schemas(t)
	var stdout bytes.Buffer
	err := run(ctx, cfg, &stdout, writerFunc(func(b []byte) {
		if strings.Contains(string(b), "drain/read") {
			interrupt() // the producer is next
		}
	}))
	require.ErrorIs(t, err, context.Canceled)
	require.Contains(t, stdout.String(), "PostgreSQL: ")
	require.Equal(t, before, schemas(t))
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

// The pipe must not have less to do than the relay.
func TestPipeAndRelayProduceTheSameRecords(t *testing.T) {
	ctx, cfg := context.Background(), tiny(t)
	s, err := connect(ctx, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	b := &bench{Services: s, cfg: cfg, stderr: os.Stderr}
	stock, err := b.stock(ctx, 100)
	require.NoError(t, err)
	reader, err := b.newReader(ctx)
	require.NoError(t, err)
	defer reader.Client.Close()

	j := job{Postgres: cfg.Postgres, Brokers: cfg.Brokers, Topic: b.Topic, Schema: stock.schema, Relay: "same", Events: stock.events, Batch: 30}
	records := map[string]map[string]*kgo.Record{}
	for _, work := range []string{"pipe", "relay", "produce"} {
		u, err := works[work](ctx, j)
		require.NoError(t, err)
		require.Equal(t, stock.events, u.Events)
		records[work] = map[string]*kgo.Record{}
		for len(records[work]) < stock.events {
			for r := range reader.Client.PollFetches(ctx).RecordsAll() {
				records[work][string(r.Value)] = r
			}
		}
	}
	for value, relayed := range records["relay"] {
		for _, work := range []string{"pipe", "produce"} {
			r := records[work][value]
			require.NotNil(t, r)
			require.Equal(t, string(relayed.Key), string(r.Key))
			require.Equal(t, relayed.Headers, r.Headers)
			require.Equal(t, relayed.Partition, r.Partition)
		}
	}
}
