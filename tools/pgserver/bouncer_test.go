package pgserver_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/long"
	"github.com/outboxgo/outbox/tools/pgserver"
)

func startBouncer(t *testing.T, s *pgserver.Server) *pgserver.Bouncer {
	t.Helper()
	b, err := pgserver.StartBouncer(t.Context(), pgserver.BouncerConfig{URL: s.URL()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Stop(context.Background())) })
	return b
}

// Who relies on a session finds out at his next transaction.
func TestBouncerGivesEachTransactionAnotherSession(t *testing.T) {
	long.Test(t)
	t.Parallel()
	b := startBouncer(t, start(t, pgserver.Config{}))
	var clients [2]*pgx.Conn
	for i := range clients {
		conn, err := pgx.Connect(t.Context(), b.URL())
		require.NoError(t, err)
		defer conn.Close(context.Background())
		_, err = conn.Exec(t.Context(), "BEGIN") // so that there are two sessions
		require.NoError(t, err)
		clients[i] = conn
	}
	for _, conn := range clients {
		_, err := conn.Exec(t.Context(), "COMMIT")
		require.NoError(t, err)
	}
	seen := map[int]bool{}
	for range 4 {
		var pid int
		require.NoError(t, clients[0].QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		seen[pid] = true
	}
	require.Len(t, seen, 2)
}

func TestBouncerReachesEveryDatabase(t *testing.T) {
	long.Test(t)
	t.Parallel()
	b := startBouncer(t, start(t, pgserver.Config{}))
	ask := func(database, sql string) {
		cfg, err := pgx.ParseConfig(b.URL())
		require.NoError(t, err)
		cfg.Database = database
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		require.NoError(t, err)
		defer conn.Close(context.Background())
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	ask("postgres", "CREATE DATABASE elsewhere")
	ask("elsewhere", "CREATE TABLE t ()")
	ask("postgres", "DROP DATABASE elsewhere WITH (FORCE)")
}

func TestBouncerWantsThePassword(t *testing.T) {
	t.Parallel()
	b := startBouncer(t, start(t, pgserver.Config{}))
	cfg, err := pgx.ParseConfig(b.URL())
	require.NoError(t, err)
	cfg.Password = "guess"
	_, err = pgx.ConnectConfig(t.Context(), cfg)
	require.ErrorContains(t, err, "authentication failed")
}

func TestBouncerLeavesNothing(t *testing.T) {
	long.Test(t)
	tmp := openTempDir(t)
	t.Setenv("TMPDIR", tmp)
	s := start(t, pgserver.Config{})
	b := startBouncer(t, s)
	if status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.PID())); err == nil {
		require.Regexp(t, regexp.MustCompile(`(?m)^Uid:\t[1-9]`), string(status), "not as root")
	}
	require.NoError(t, b.Stop(t.Context()))
	require.NoError(t, b.Stop(t.Context()), "once more")
	requireGone(t, b.PID())
	require.NoError(t, s.Stop(t.Context()))
	entries, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestBouncerErrorsNameTheField(t *testing.T) {
	t.Parallel()
	_, err := pgserver.StartBouncer(t.Context(), pgserver.BouncerConfig{URL: "postgres://localhost:port"})
	require.ErrorContains(t, err, "field URL")
	_, err = pgserver.StartBouncer(t.Context(), pgserver.BouncerConfig{URL: `postgres://a%22b@localhost`})
	require.ErrorContains(t, err, "field URL")
}
