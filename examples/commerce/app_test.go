package main

import (
	"context"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// newApp returns the parts of the program on a schema of the test's own. The tests
// speak to a real PostgreSQL and to the Kafka of the environment. Redis is miniredis:
// a server in this process with the protocol of Redis and its own idea of the rest.
func newApp(t *testing.T) *app {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	_, schema := testenv.Schema(t)
	a := &app{
		id: schema, source: "commerce-api/" + uuid.NewString(),
		kafka: testenv.KafkaOpts(testenv.Brokers(t)), tally: newTally(),
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

// withRedis gives the app a Redis, and returns the server.
func (a *app) withRedis(t *testing.T) *miniredis.Miniredis {
	t.Helper()
	server := miniredis.RunT(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	a.pages = pages{client, "test"}
	return server
}

// relayAnd runs a relay and a group until the test ends.
func (a *app) relayAnd(t *testing.T, group *outbox.Consumer) {
	t.Helper()
	relays, err := a.relays("default")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error { return relays[0].Run(ctx) })
	g.Go(func() error { return group.Run(ctx) })
	t.Cleanup(func() {
		stop()
		require.NoError(t, g.Wait())
	})
}
