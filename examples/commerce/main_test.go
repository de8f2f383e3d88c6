package main

import (
	"context"
	"regexp"
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

// startCommerce starts the program, with the Redis that it brings.
func startCommerce(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return program.Start(t, args, "REDIS_URL=", "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// Everything is published twice and some orders are announced twice besides. What is
// counted is what committed, and there were repeats to skip.
func TestCommerce(t *testing.T) {
	// Not parallel: the program warns where it is slow.
	p := startCommerce(t, "-visits=200", "-patience=60s")
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `(?m)^ +SALES_COUNT_INCREASED +[1-9]\d* +[1-9]\d*$`, out)
	require.Regexp(t, `(?m)^ +VIEW_COUNT_INCREASED +[1-9]\d* +[1-9]\d*$`, out)
	require.Regexp(t, `(?m)^ +LIKE_COUNT_DECREASED +[1-9]\d* +-$`, out)
	require.Regexp(t, `(?m) deleted$`, out)
	require.NotContains(t, out, "wrong")
	slowStart := regexp.MustCompile(`(?m)^.* INFO outbox: waiting for .*\n`) // where the machine is busy
	require.Empty(t, slowStart.ReplaceAllString(p.Stderr.String(), ""), "no warning in a run without problems")
	p.RequireNoSchema(t)
}

// A like whose event nobody recorded is what an event looks like that got lost.
func TestCommerceMissesALike(t *testing.T) {
	// Not parallel: the like must be there before the program has ended.
	p := startCommerce(t, "-visits=50", "-patience=2s")
	db := testenv.Pool(t, nil)
	likes := pgx.Identifier{p.Schema, "likes"}.Sanitize()
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		_, err := db.Exec(context.Background(), `INSERT INTO `+likes+` (product_id, user_id) VALUES (1, 1000000)`)
		return err == nil
	}, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.Wait(t))
	require.Regexp(t, `(?m)^ +1 .* wrong$`, p.Stdout.String())
	require.NotRegexp(t, `(?m)^ +2 .* wrong$`, p.Stdout.String())
	require.Contains(t, p.Stdout.String(), "What was counted is not what committed.")
	p.RequireNoSchema(t)
}

// A signal closes the shop; what was sold is counted and compared.
func TestCommerceInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startCommerce(t, "-visits=1000000", "-patience=60s")
			db := testenv.Pool(t, nil)
			orders := pgx.Identifier{p.Schema, "orders"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+orders).Scan(&n)
				return err == nil && n > 50
			}, 30*time.Second, 10*time.Millisecond)
			p.Signal(t, signal)
			require.Zero(t, p.Wait(t))
			p.RequireNoSchema(t)
		})
	}
}

func TestCommerceInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := program.Command(context.Background(), nil, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1", "REDIS_URL=")
	ending.RequireWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "--help", exitRight, "-visits", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-visitz=1", exitUsage, "", "-visitz"},
	{"not a flag", "postgres://h/d", "b:1", "visits", exitUsage, "", `"visits" is not a flag`},
	{"no visits", "postgres://h/d", "b:1", "-visits=0", exitUsage, "", "-visits"},
	{"no patience", "postgres://h/d", "b:1", "-patience=0s", exitUsage, "", "-patience"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			env := []string{"REDIS_URL=", "OUTBOX_POSTGRES_URL=" + tt.postgres, "OUTBOX_KAFKA_BROKERS=" + tt.brokers}
			program.RequireUsage(t, tt.args, env, tt.code, tt.stdout, tt.stderr)
		})
	}
}

// Redis is asked for before anything is begun. A server that is not there is told.
func TestRedisURL(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{"http://localhost": "REDIS_URL", "redis://127.0.0.1:1": "connect to Redis"} {
		_, _, err := openRedis(t.Context(), url)
		require.ErrorContains(t, err, want, url)
	}
}
