package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { program.Main(m, main) }

func startEventsourcing(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return startEventsourcingWith(t, args, "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// startEventsourcingWith starts it with more in its environment.
func startEventsourcingWith(t *testing.T, args []string, env ...string) *program.Process {
	t.Helper()
	return program.Start(t, append([]string{"-patience=60s"}, args...), env...)
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
	testenv.Long(t)
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
	testenv.Long(t)
	t.Parallel()
	p := startEventsourcing(t, "-for=2s", "-kills=0", "-processes=1", "-worker", "-patience=2s")
	p.Change(t, `INSERT INTO order_events (aggregate_id, event_type, payload, version, occurred_at, metadata)
		SELECT gen_random_uuid(), event_type, jsonb_set(payload, '{userId}', '0'), version, occurred_at, metadata FROM order_events WHERE version = 1 LIMIT 1`)
	require.Equal(t, show.ExitWrong, p.Wait(t))
	require.Regexp(t, `(?m)events recorded for publication .* wrong$`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal closes the shop; what was ordered is compared.
func TestEventsourcingInterrupted(t *testing.T) {
	testenv.Long(t)
	start := func(t *testing.T) *program.Process {
		return startEventsourcing(t, "-for=1h", "-kills=0", "-processes=1", "-worker")
	}
	program.TestInterrupted(t, start, "order_events", 10, func(t *testing.T, p *program.Process) {
		require.NotContains(t, p.Stdout.String(), "wrong")
	})
}

// Without Kafka the program starts and records events. They are published and handled once Kafka is there.
func TestWithoutKafka(t *testing.T) {
	t.Parallel()
	program.TestWithoutKafka(t, 20, func(t *testing.T, env ...string) *program.Process {
		return startEventsourcingWith(t, []string{"-for=4s", "-kills=0"}, env...)
	})
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-worker",
		program.NoKafka,
		program.Misuse("no time", "-for=0s", "-for"),
		program.Misuse("too many orders", "-rate=501", "-rate"),
		program.Misuse("fewer than no kills", "-kills=-1", "-kills"),
		program.Unanswered("nobody answers the service", "-schema=s -worker", "OUTBOX_KAFKA_BROKERS"),
	)
}
