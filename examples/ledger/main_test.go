package main

import (
	"context"
	"os"
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

func startLedger(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return program.Start(t, append(args, "-patience=60s"), "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// Tellers, relay and consumers are killed in the middle, the relay when Kafka has what it has sent and the cursor does
// not say so. All equations hold, and there were conflicts of optimistic locking and repeats in Kafka for them to hold in
// spite of. With one topic no event comes before an earlier one.
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
	// Not parallel, as above.
	p := startLedger(t, "-deposits=240", "-accounts=4", "-topics=two", "-kill=false")
	require.Zero(t, p.Wait(t))
	require.Regexp(t, `; [1-9]\d* events waited for an earlier one`, p.Stdout.String())
	require.NotContains(t, p.Stdout.String(), "wrong")
	p.RequireNoSchema(t)
}

// A row of the feed that came another time is found, and an entry that somebody has added to the journal. The counter is
// open until both are there.
func TestLedgerFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	p := startLedger(t, "-deposits=1000000", "-kill=false")
	db := testenv.Pool(t, nil)
	in := func(table string) string { return pgx.Identifier{p.Schema, table}.Sanitize() }
	change := func(sql string) {
		require.Eventually(t, func() bool { // the program makes its tables and works meanwhile
			changed, err := db.Exec(context.Background(), sql)
			return err == nil && changed.RowsAffected() == 1
		}, testenv.Patience, 10*time.Millisecond)
	}
	change(`INSERT INTO ` + in("journal_entry") + ` SELECT id, account_id, 1 FROM ` + in("ledger_transaction") + ` WHERE reverses IS NOT NULL LIMIT 1`) // nobody reverses a reversal
	change(`INSERT INTO ` + in("audit_feed") + ` (account_id, sequence, event_id, event_type, transaction_id, occurred_at, payload)
		SELECT account_id, sequence, event_id, event_type, transaction_id, occurred_at, payload FROM ` + in("audit_feed") + ` LIMIT 1`)
	p.Signal(t, os.Interrupt)
	require.Equal(t, exitWrong, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `(?m)transactions whose entries balance .* wrong$`, out)
	require.Regexp(t, `(?m)cents in the sum of all entries .* wrong$`, out)
	require.Regexp(t, `(?m)1 +repeats in the feed .* wrong$`, out)
	require.Contains(t, out, "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal closes the counter. What was posted is compared.
func TestLedgerInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			t.Parallel()
			p := startLedger(t, "-deposits=1000000")
			db := testenv.Pool(t, nil)
			transactions := pgx.Identifier{p.Schema, "ledger_transaction"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+transactions).Scan(&n)
				return err == nil && n > 20
			}, testenv.Patience, 10*time.Millisecond)
			p.Signal(t, signal)
			require.Zero(t, p.Wait(t))
			require.NotContains(t, p.Stdout.String(), tellersRole, "they were not killed")
			p.RequireNoSchema(t)
		})
	}
}

func TestLedgerInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	ending.RequireWhileStarting(t, program.Command(context.Background(), nil, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1"), "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "--help", exitRight, "-deposits", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-deposit=1", exitUsage, "", "-deposit"},
	{"not a flag", "postgres://h/d", "b:1", "deposits", exitUsage, "", `"deposits" is not a flag`},
	{"no deposits", "postgres://h/d", "b:1", "-deposits=0", exitUsage, "", "-deposits"},
	{"three topics", "postgres://h/d", "b:1", "-topics=three", exitUsage, "", "-topics"},
	{"no such role", "postgres://h/d", "b:1", "-role=king -schema=s", exitUsage, "", "-role"},
	{"role without a schema", "postgres://h/d", "b:1", "-role=relay", exitUsage, "", "-schema"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "", exitWrong, "", "connect"},
	{"nobody answers the relay", "postgres://127.0.0.1:1/d", "b:1", "-role=relay -schema=s", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			env := []string{"OUTBOX_POSTGRES_URL=" + tt.postgres, "OUTBOX_KAFKA_BROKERS=" + tt.brokers}
			program.RequireUsage(t, tt.args, env, tt.code, tt.stdout, tt.stderr)
		})
	}
}
