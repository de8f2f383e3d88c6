package main

import (
	"context"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/stretchr/testify/require"
)

// Each way of counting is exact, and one that was not would not get away with it.
func TestCountsAreChecked(t *testing.T) {
	ctx, cfg := context.Background(), tiny(t)
	s, err := connect(ctx, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	b := &bench{Services: s, cfg: cfg, stderr: os.Stderr}
	schema, err := b.NewSchema(ctx, "checked")
	require.NoError(t, err)
	shelf, err := b.newShelf(ctx, 500)
	require.NoError(t, err)

	for group, j := range map[string]job{"one by one": {MaxPoll: 1}, "together": {}, "batch": {InBatch: true}} {
		_, err = b.DB.Exec(ctx, services.InSchema(ddlCounts, schema), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		j.Postgres, j.Brokers, j.Topic, j.Schema, j.EventType = cfg.Postgres, cfg.Brokers, shelf.topic, schema, b.EventType()
		j.Events, j.Group = shelf.events, b.ID+group
		u, err := countAll(ctx, j)
		require.NoError(t, err)
		require.Equal(t, shelf.events, u.Events)
		require.Positive(t, u.CPU)
		require.NoError(t, b.checkCounts(ctx, j, shelf))
		for _, wrong := range []struct{ sql, want string }{
			{`UPDATE {schema}.counts SET n = n + 1 WHERE key IN (SELECT key FROM {schema}.counts WHERE n > 0 LIMIT 1)`, "counters"},
			{`DELETE FROM {schema}.event_handled WHERE id IN (SELECT max(id) FROM {schema}.event_handled)`, "noted 499 times and committed 500"},
		} {
			_, err = b.DB.Exec(ctx, services.InSchema(wrong.sql, schema))
			require.NoError(t, err)
			require.ErrorContains(t, b.checkCounts(ctx, j, shelf), wrong.want)
		}
		_, err = b.Admin.DeleteGroup(ctx, j.Group)
		require.NoError(t, err)
	}
}
