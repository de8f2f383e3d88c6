package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { program.Main(m, main) }

func startLedger(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return startLedgerWith(t, args, "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// startLedgerWith starts it with more in its environment.
func startLedgerWith(t *testing.T, args []string, env ...string) *program.Process {
	t.Helper()
	return program.Start(t, append(args, "-patience=60s"), env...)
}

// Tellers, relay and consumers are killed in the middle, the relay when Kafka has what it has sent and the cursor
// does not say so. All equations hold, and there were conflicts of optimistic locking and repeats in Kafka for them
// to hold in spite of. With one topic no event comes before an earlier one.
func TestLedger(t *testing.T) {
	// Not parallel: processes are to be killed while they are busy.
	p := startLedger(t, "-deposits=240", "-accounts=4")
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `240 deposits, 48 reversals; [1-9]\d* attempts were rolled back`, out)
	require.Contains(t, out, "killed: consumers, relay, tellers")
	require.Regexp(t, `[1-9]\d* records in Kafka are repeats; 0 events waited for an earlier one; [1-9]\d* are in the archive`, out)
	require.NotContains(t, out, "wrong")
	require.Empty(t, p.Stderr.String())
	p.RequireNoSchema(t)
}

// With a topic for each type reversals come before what they reverse, and the consumer of both puts them in order.
func TestLedgerWithTwoTopics(t *testing.T) {
	testenv.Long(t)
	// Not parallel, as above.
	p := startLedger(t, "-deposits=240", "-accounts=4", "-topics=two", "-kill=false")
	require.Zero(t, p.Wait(t))
	require.Regexp(t, `; [1-9]\d* events waited for an earlier one`, p.Stdout.String())
	require.NotContains(t, p.Stdout.String(), "wrong")
	p.RequireNoSchema(t)
}

// A row of the feed that was inserted twice is found, and so is an extra entry in the journal. The
// counter is open until both are there.
func TestLedgerFindsWhatIsWrong(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := startLedger(t, "-deposits=1000000", "-kill=false")
	p.Change(t, `INSERT INTO journal_entry SELECT id, account_id, 1 FROM ledger_transaction WHERE reverses IS NOT NULL LIMIT 1`) // reversals are never reversed
	p.Change(t, `INSERT INTO audit_feed (account_id, sequence, event_id, event_type, transaction_id, occurred_at, payload)
		SELECT account_id, sequence, event_id, event_type, transaction_id, occurred_at, payload FROM audit_feed LIMIT 1`)
	p.Signal(t, os.Interrupt)
	require.Equal(t, show.ExitWrong, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `(?m)transactions whose entries balance .* wrong$`, out)
	require.Regexp(t, `(?m)cents in the sum of all entries .* wrong$`, out)
	require.Regexp(t, `(?m)1 +repeats in the feed .* wrong$`, out)
	require.Contains(t, out, "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal closes the counter. What was posted is compared.
func TestLedgerInterrupted(t *testing.T) {
	testenv.Long(t)
	start := func(t *testing.T) *program.Process {
		return startLedger(t, "-deposits=1000000")
	}
	program.TestInterrupted(t, start, "ledger_transaction", 20, func(t *testing.T, p *program.Process) {
		require.NotContains(t, p.Stdout.String(), tellersRole, "they were not killed")
	})
}

// Without Kafka the program starts and records events. They are published and handled once Kafka is there.
func TestWithoutKafka(t *testing.T) {
	t.Parallel()
	program.TestWithoutKafka(t, 20, func(t *testing.T, env ...string) *program.Process {
		return startLedgerWith(t, []string{"-deposits=240", "-kill=false"}, env...)
	})
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-deposits",
		program.NoKafka,
		program.Misuse("no deposits", "-deposits=0", "-deposits"),
		program.Misuse("three topics", "-topics=three", "-topics"),
		program.Misuse("no such role", "-role=king -schema=s", "-role"),
		program.Misuse("role without a schema", "-role=relay", "-schema"),
		program.Unanswered("nobody answers the relay", "-role=relay -schema=s", ""),
	)
}
