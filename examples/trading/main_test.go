package main

import (
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// seed repeats a run of the tests. A run prints its own.
var seed = flag.Uint64("seed", 0, "of the bots and the exchange in TestTrading; 0 is by chance")

func TestMain(m *testing.M) { program.Main(m, main) }

// Processes are killed in the middle, and all equations hold. The seed is in the log.
func TestTrading(t *testing.T) {
	// Not parallel: processes are to be killed while they are busy.
	p := program.Start(t, []string{"-orders=300", "-rate=60", "-kills=4", "-backtests=4", "-backtest=4s", "-lease=1s", "-patience=60s", fmt.Sprintf("-seed=%d", *seed)})
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.Contains(t, out, "4 processes killed")
	require.Regexp(t, `attempts: [1-9]\d* ACKED, [1-9]\d* REJECTED, [1-9]\d* THROTTLED and made again, [1-9]\d* NOT_PLACED`, out)
	require.Regexp(t, `[1-9]\d* commands waited while the kill switch was on`, out)
	require.NotContains(t, out, "wrong")
	require.Empty(t, p.Stderr.String())
	p.RequireNoSchema(t)
}

// Without a kill nothing is done twice: leases are renewed while backtests run, which take
// four times as long.
func TestTradingWithoutKills(t *testing.T) {
	// Not parallel: leases are short.
	p := program.Start(t, []string{"-orders=50", "-kills=0", "-backtests=4", "-backtest=4s", "-lease=1s", "-patience=60s"})
	require.Zero(t, p.Wait(t))
	require.Regexp(t, `(?m)^ +0 +backtests begun again +=`, p.Stdout.String())
	p.RequireNoSchema(t)
}

// An attempt that says ACKED, and of which the exchange knows nothing, is found.
func TestTradingFindsAWrongAttempt(t *testing.T) {
	t.Parallel()
	p := program.Start(t, []string{"-orders=50", "-processes=1", "-kills=0", "-backtests=0", "-patience=5s"})
	db := testenv.Pool(t, nil)
	in := func(table string) string { return pgx.Identifier{p.Schema, table}.Sanitize() }
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		changed, err := db.Exec(context.Background(), `INSERT INTO `+in("order_attempt")+` (order_intent_id, attempt_no, identifier, state)
			SELECT id, 99, 'nowhere', 'ACKED' FROM `+in("order_intent")+` LIMIT 1`)
		return err == nil && changed.RowsAffected() == 1
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.Wait(t))
	require.Regexp(t, `(?m)orders at the exchange .* wrong$`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal ends what the bots do. What was decided is done and compared.
func TestTradingInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := program.Start(t, []string{"-orders=1000000", "-processes=1", "-kills=1", "-backtests=1", "-backtest=1s", "-patience=60s"})
			db := testenv.Pool(t, nil)
			attempts := pgx.Identifier{p.Schema, "order_attempt"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+attempts).Scan(&n)
				return err == nil && n > 10
			}, testenv.Patience, 10*time.Millisecond)
			p.Signal(t, signal)
			require.Zero(t, p.Wait(t))
			p.RequireNoSchema(t)
		})
	}
}

func TestTradingInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	ending.RequireWhileStarting(t, program.Command(context.Background(), nil), "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, args string
	code                 int
	stdout, stderr       string
}{
	{"help", "", "--help", exitRight, "-orders", ""},
	{"no PostgreSQL", "", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"unknown flag", "postgres://h/d", "-order=1", exitUsage, "", "-order"},
	{"not a flag", "postgres://h/d", "orders", exitUsage, "", `"orders" is not a flag`},
	{"no orders", "postgres://h/d", "-orders=0", exitUsage, "", "-orders"},
	{"fewer than no kills", "postgres://h/d", "-kills=-1", exitUsage, "", "-kills"},
	{"workers without a schema", "postgres://h/d", "-exchange=http://h", exitUsage, "", "-schema"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "", exitWrong, "", "connect"},
	{"nobody answers workers", "postgres://127.0.0.1:1/d", "-exchange=http://h -schema=s", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			program.RequireUsage(t, tt.args, []string{"OUTBOX_POSTGRES_URL=" + tt.postgres}, tt.code, tt.stdout, tt.stderr)
		})
	}
}
