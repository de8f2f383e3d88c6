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

// startCommerce starts the program, with a Redis that it starts.
func startCommerce(t *testing.T, args ...string) *program.Process {
	t.Helper()
	args = append([]string{"-patience=60s"}, args...)
	return program.Start(t, args, "REDIS_URL=", "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// The service is killed, everything is published twice and some orders are announced twice
// besides. What is counted is what committed, what was answered has committed, and there were
// repeats to skip.
func TestCommerce(t *testing.T) {
	t.Parallel()
	p := startCommerce(t, "-for=4s", "-rate=15")
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.Contains(t, out, "the service was killed 1 times")
	require.Regexp(t, `(?m)^ +SALES_COUNT_INCREASED +[1-9]\d* +[1-9]\d*$`, out)
	require.Regexp(t, `(?m)^ +VIEW_COUNT_INCREASED +[1-9]\d* +[1-9]\d*$`, out)
	require.Regexp(t, `(?m)^ +LIKE_COUNT_DECREASED +[1-9]\d* +-$`, out)
	require.Regexp(t, `(?m) deleted$`, out)
	require.NotContains(t, out, "wrong")
	require.NotContains(t, p.Stderr.String(), "level=ERROR")
	if !testing.Short() {
		needRedis(t)
		require.NotContains(t, out, "there is no redis-server here")
	}
	p.RequireNoSchema(t)
}

// The load generator measures, and nothing else happens. A like whose event nobody recorded is
// what an event looks like that got lost: it is found.
func TestCommerceMissesALike(t *testing.T) {
	t.Parallel()
	p := startCommerce(t, "-load", "-for=2s", "-rate=15", "-patience=5s")
	db := testenv.Pool(t, nil)
	likes := pgx.Identifier{p.Schema, "likes"}.Sanitize()
	require.Eventually(t, func() bool { // the program makes its tables meanwhile
		_, err := db.Exec(context.Background(), `INSERT INTO `+likes+` (product_id, user_id) VALUES (1, 1000000)`)
		return err == nil
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, exitWrong, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `from request to statistic: p50 \S+s, p99 \S+s\n`, out)
	require.Contains(t, out, "the service was killed 0 times")
	require.Regexp(t, `(?m)^ +1 .* wrong$`, out)
	require.NotRegexp(t, `(?m)^ +2 .* wrong$`, out)
	require.Regexp(t, `(?m)^ +11  products that are counted rightly .* wrong$`, out)
	require.Contains(t, out, "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// A signal closes the shop; what was sold is counted and compared.
func TestCommerceInterrupted(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			p := startCommerce(t, "-for=1h", "-rate=15", "-kills=0")
			db := testenv.Pool(t, nil)
			orders := pgx.Identifier{p.Schema, "orders"}.Sanitize()
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+orders).Scan(&n)
				return err == nil && n > 10
			}, testenv.Patience, 10*time.Millisecond)
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
	{"help", "", "", "--help", exitRight, "-load", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-ratez=1", exitUsage, "", "-ratez"},
	{"not a flag", "postgres://h/d", "b:1", "rate", exitUsage, "", `"rate" is not a flag`},
	{"no customers", "postgres://h/d", "b:1", "-rate=0", exitUsage, "", "-rate"},
	{"too many customers", "postgres://h/d", "b:1", "-rate=1001", exitUsage, "", "-rate"},
	{"fewer than no kills", "postgres://h/d", "b:1", "-kills=-1", exitUsage, "", "-kills"},
	{"no patience", "postgres://h/d", "b:1", "-patience=0s", exitUsage, "", "-patience"},
	{"nobody answers the service", "postgres://127.0.0.1:1/d", "b:1", "-schema=s", exitWrong, "", "connect"},
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
		_, err := connectRedis(t.Context(), url)
		require.ErrorContains(t, err, want, url)
	}
}
