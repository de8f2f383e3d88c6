package migrator_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// While another session has the lock of those that migrate, the log of Run names the session, and Run goes on after it.
func TestMigrateSaysWhoMigrates(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	holder := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "frozen migration" })
	open, err := holder.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = open.Rollback(context.Background()) }()
	var pid int
	require.NoError(t, open.QueryRow(t.Context(), `SELECT pg_backend_pid() FROM (SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))) AS l`, f.schema).Scan(&pid))
	var log testenv.Buffer
	m := f.migrator(nextFiles(t))
	m.Logger = slog.New(slog.NewTextHandler(&log, nil))
	done := make(chan error, 1)
	go func() { done <- m.Run(t.Context()) }()
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "level=WARN") }, testenv.Patience, testenv.Patience/6000)
	for _, part := range []string{"another session migrates", fmt.Sprintf("session %d ", pid), "frozen migration", "idle in transaction"} {
		require.Contains(t, log.String(), part)
	}
	require.Empty(t, done)
	require.NoError(t, open.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.Contains(t, log.String(), "works again")
	require.Equal(t, len(names(t))+len(nextRelease), f.applied(t))
}

// A process that is frozen while it has the lock of those that migrate keeps all others waiting. PostgreSQL ends its
// transaction after a while, whatever the role is configured to.
func TestFrozenMigrationEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	cfg, tracer := f.db.Config().Copy(), new(testenv.IdleTracer)
	cfg.ConnConfig.Tracer = tracer
	var err error
	f.db, err = pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer f.db.Close()
	require.NoError(t, f.migrator(nextFiles(t)).Run(t.Context()))
	require.Len(t, tracer.Bounds, 2*len(nextRelease), "to protect the schema, and to apply the file")
	for _, bound := range tracer.Bounds {
		require.Equal(t, "10s", bound)
	}
}
