package main

import (
	"context"
	"log/slog"
	"os/exec"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// newApp returns the parts of the program on a schema of the test's own. The tests
// speak to a real PostgreSQL, to the Kafka of the environment and to a real Redis.
func newApp(t *testing.T) *app {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	_, schema := testenv.Schema(t)
	a := &app{
		id: schema, source: "commerce-api/" + uuid.NewString(),
		kafka: testenv.KafkaOpts(testenv.Brokers(t)), log: slog.New(slog.DiscardHandler),
	}
	a.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	var err error
	a.events, err = registry(a.source)
	require.NoError(t, err)
	require.NoError(t, a.migrate(t.Context()))
	return a
}

// withRedis gives the app a Redis of the test's own: a real one, but under -short.
func (a *app) withRedis(t *testing.T) {
	t.Helper()
	if !testing.Short() {
		needRedis(t)
	}
	url, _, stop, err := startRedis(t.Context(), "")
	require.NoError(t, err)
	t.Cleanup(stop)
	client, err := connectRedis(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() }) // a test may have closed it
	a.pages = pages{client, "test"}
}

func needRedis(t *testing.T) (program string) {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	require.NoError(t, err, "this test needs Redis: tools/needs.sh test says how to install it")
	return program
}

// relayAnd runs a relay and a group until the test ends.
func (a *app) relayAnd(t *testing.T, group *outbox.Consumer) {
	t.Helper()
	relay, err := outbox.NewRelay(a.db, a.kafka, outbox.RelayConfig{Schema: a.id})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error { return relay.Run(ctx) })
	g.Go(func() error { return group.Run(ctx) })
	t.Cleanup(func() {
		stop()
		require.NoError(t, g.Wait())
	})
}
