package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { program.Main(m, main) }

func startEventsourcing(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return program.Start(t, append([]string{"-patience=60s"}, args...), "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// A process that stores, publishes and projects is killed, the read model is damaged and
// rebuilt, and all adds up.
func TestEventsourcing(t *testing.T) {
	t.Parallel()
	p := startEventsourcing(t, "-for=4s")
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.Contains(t, out, "1 processes killed")
	require.Regexp(t, `[1-9]\d* orders: [1-9]\d* paid, [1-9]\d* delivered, [1-9]\d* cancelled`, out)
	require.Regexp(t, `[1-9]\d* times somebody else was faster`, out)
	require.Regexp(t, `[1-9]\d* orders of the read model damaged and repaired; all of it rebuilt [1-9]\d* times`, out)
	require.NotContains(t, out, "wrong")
	require.Empty(t, p.Stderr.String())
	p.RequireNoSchema(t)
}

// The same without Kafka.
func TestEventsourcingWithWorker(t *testing.T) {
	t.Parallel()
	p := startEventsourcing(t, "-for=3s", "-worker")
	require.Zero(t, p.Wait(t))
	require.Contains(t, p.Stdout.String(), "1 processes killed")
	require.Contains(t, p.Stdout.String(), "without Kafka")
	p.RequireNoSchema(t)
}

// An event that is stored and not recorded is what a store that publishes by itself leaves
// behind when it is killed in between. It is found.
func TestEventsourcingMissesAnEvent(t *testing.T) {
	t.Parallel()
	p := startEventsourcing(t, "-for=2s", "-kills=0", "-processes=1", "-worker", "-patience=2s")
	db := testenv.Pool(t, nil)
	events := pgx.Identifier{p.Schema, "order_events"}.Sanitize()
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		tag, err := db.Exec(context.Background(), `INSERT INTO `+events+` (aggregate_id, event_type, payload, version, occurred_at, metadata)
			SELECT gen_random_uuid(), event_type, jsonb_set(payload, '{userId}', '0'), version, occurred_at, metadata FROM `+events+` WHERE version = 1 LIMIT 1`)
		return err == nil && tag.RowsAffected() == 1
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.Wait(t))
	require.Regexp(t, `(?m)events recorded for publication .* wrong$`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal closes the shop; what was ordered is compared.
func TestEventsourcingInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startEventsourcing(t, "-for=1h", "-kills=0", "-processes=1", "-worker")
			db := testenv.Pool(t, nil)
			events := pgx.Identifier{p.Schema, "order_events"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+events).Scan(&n)
				return err == nil && n > 10
			}, testenv.Patience, 10*time.Millisecond)
			p.Signal(t, signal)
			require.Zero(t, p.Wait(t))
			p.RequireNoSchema(t)
		})
	}
}

func TestEventsourcingInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := program.Command(context.Background(), nil, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1")
	ending.RequireWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "--help", exitRight, "-worker", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-order=1", exitUsage, "", "-order"},
	{"not a flag", "postgres://h/d", "b:1", "orders", exitUsage, "", `"orders" is not a flag`},
	{"no time", "postgres://h/d", "b:1", "-for=0s", exitUsage, "", "-for"},
	{"too many orders", "postgres://h/d", "b:1", "-rate=501", exitUsage, "", "-rate"},
	{"fewer than no kills", "postgres://h/d", "b:1", "-kills=-1", exitUsage, "", "-kills"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "", exitWrong, "", "connect"},
	{"nobody answers the service", "postgres://127.0.0.1:1/d", "", "-schema=s -worker", exitWrong, "", "connect"},
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
