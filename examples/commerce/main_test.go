package main

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { program.Main(m, main) }

// startCommerce starts the program, with a Redis that it starts.
func startCommerce(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return startCommerceWith(t, args, "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// startCommerceWith starts it with more in its environment.
func startCommerceWith(t *testing.T, args []string, env ...string) *program.Process {
	t.Helper()
	return program.Start(t, append([]string{"-patience=60s"}, args...), append(env, "REDIS_URL=")...)
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
	require.NotContains(t, out, "of others", "trace ids get through")
	require.NotContains(t, p.Stderr.String(), "level=ERROR")
	if !testing.Short() {
		needRedis(t)
		require.NotContains(t, out, "there is no redis-server here")
	}
	p.RequireNoSchema(t)
}

// The load generator measures, and nothing else happens. A like without a recorded event looks like
// an event that was lost: it is found.
func TestCommerceMissesALike(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := startCommerce(t, "-load", "-for=2s", "-rate=15", "-patience=20s")
	p.Change(t, `INSERT INTO likes (product_id, user_id) VALUES (1, 1000000)`)
	require.Equal(t, show.ExitWrong, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `from request to statistic: p50 \S+s, p99 \S+s\n`, out)
	require.Contains(t, out, "the service was killed 0 times")
	require.Regexp(t, `(?m)^ +1 .* wrong$`, out)
	require.NotRegexp(t, `(?m)^ +2 .* wrong$`, out)
	require.Regexp(t, `(?m)^ +11  products that are counted rightly .* wrong$`, out)
	require.Contains(t, out, "The numbers do not add up.")
	p.RequireNoSchema(t)
}

// Who looks at the running shop changes nothing in what the report says of the visits. Their events have a line of
// their own.
func TestOwnClicks(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := startCommerce(t, "-load", "-for=5s", "-rate=15")
	address := regexp.MustCompile(`shop +(http://\S+),`)
	require.Eventually(t, func() bool { return address.MatchString(p.Stdout.String()) }, testenv.Patience, 10*time.Millisecond)
	s := newStreet(address.FindStringSubmatch(p.Stdout.String())[1])
	t.Cleanup(s.client.CloseIdleConnections)
	click := func(method, path string, body, answer any) error {
		return s.call(t.Context(), method, path, "my-own", body, answer)
	}
	require.Eventually(t, func() bool { return click(http.MethodGet, "/products/1", nil, nil) == nil }, testenv.Patience, 10*time.Millisecond)
	require.NoError(t, click(http.MethodPost, "/products/1/likes", map[string]int64{"userId": customers + 1}, nil))
	var placed orderAnswer
	require.NoError(t, click(http.MethodPost, "/orders", orderRequest{customers + 1, []orderItem{{1, 2}}}, &placed))
	require.NoError(t, click(http.MethodPost, fmt.Sprintf("/orders/%d/payment", placed.OrderID), nil, nil))
	require.Zero(t, p.Wait(t), p.Stdout.String())
	require.Regexp(t, `(?m)^  [4-9] events of others, which the tables count as well$`, p.Stdout.String())
	require.NotContains(t, p.Stdout.String(), "wrong")
}

// A signal closes the shop; what was sold is counted and compared.
func TestCommerceInterrupted(t *testing.T) {
	testenv.Long(t)
	start := func(t *testing.T) *program.Process {
		return startCommerce(t, "-for=1h", "-rate=15", "-kills=0")
	}
	program.TestInterrupted(t, start, "orders", 10, func(t *testing.T, p *program.Process) {
		require.NotContains(t, p.Stdout.String(), "wrong")
	})
}

// Without Kafka the program starts and records events. They are published and handled once Kafka is there.
func TestWithoutKafka(t *testing.T) {
	t.Parallel()
	program.TestWithoutKafka(t, 20, func(t *testing.T, env ...string) *program.Process {
		return startCommerceWith(t, []string{"-for=4s", "-rate=15", "-kills=0"}, env...)
	})
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-load",
		program.NoKafka,
		program.Misuse("no customers", "-rate=0", "-rate"),
		program.Misuse("too many customers", "-rate=1001", "-rate"),
		program.Misuse("fewer than no kills", "-kills=-1", "-kills"),
		program.Misuse("no patience", "-patience=0s", "-patience"),
		program.Unanswered("nobody answers the service", "-schema=s", ""),
	)
}

// Redis is asked for before anything is begun. A server that is not there is told.
func TestRedisURL(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{"http://localhost": "REDIS_URL", "redis://127.0.0.1:1": "connect to Redis"} {
		_, err := connectRedis(t.Context(), url)
		require.ErrorContains(t, err, want, url)
	}
}
