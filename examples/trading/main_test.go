package main

import (
	"flag"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
)

// seed repeats a run of the tests. A run prints its own.
var seed = flag.Uint64("seed", 0, "of the bots and the exchange in TestTrading; 0 is by chance")

func TestMain(m *testing.M) { program.Main(m, main) }

// Processes are killed in the middle, and all equations hold. The seed is in the log.
func TestTrading(t *testing.T) {
	// Not parallel: processes are to be killed while they are busy.
	p := program.Start(t, []string{"-orders=300", "-rate=60", "-kills=4", "-backtests=4", "-backtest=4s", "-lease=1s", "-patience=60s", "-worth=1m", fmt.Sprintf("-seed=%d", *seed)})
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
	testenv.Long(t)
	// Not parallel: leases are short.
	p := program.Start(t, []string{"-orders=50", "-kills=0", "-backtests=4", "-backtest=4s", "-lease=1s", "-patience=60s"})
	require.Zero(t, p.Wait(t))
	require.Regexp(t, `(?m)^ +0 +backtests begun again +=`, p.Stdout.String())
	p.RequireNoSchema(t)
}

// An attempt that says ACKED, and of which the exchange knows nothing, is found.
func TestTradingFindsAWrongAttempt(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := program.Start(t, []string{"-orders=50", "-processes=1", "-kills=0", "-backtests=0", "-patience=5s"})
	p.Change(t, `INSERT INTO order_attempt (order_intent_id, attempt_no, identifier, state)
		SELECT id, 99, 'nowhere', 'ACKED' FROM order_intent LIMIT 1`)
	require.Equal(t, show.ExitWrong, p.Wait(t))
	require.Regexp(t, `(?m)orders at the exchange .* wrong$`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal ends what the bots do. What was decided is done and compared.
func TestTradingInterrupted(t *testing.T) {
	testenv.Long(t)
	start := func(t *testing.T) *program.Process {
		return program.Start(t, []string{"-orders=1000000", "-processes=1", "-kills=1", "-backtests=1", "-backtest=1s", "-patience=60s"})
	}
	program.TestInterrupted(t, start, "order_attempt", 10, func(t *testing.T, p *program.Process) {
		require.NotContains(t, p.Stdout.String(), "wrong")
	})
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-orders",
		program.Misuse("no orders", "-orders=0", "-orders"),
		program.Misuse("fewer than no kills", "-kills=-1", "-kills"),
		program.Misuse("workers without a schema", "-exchange=http://h", "-schema"),
		program.Unanswered("nobody answers workers", "-exchange=http://h -schema=s", ""),
	)
}
