package pgserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/long"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// programs returns a server's programs: embedded ones, or installed ones on a
// machine that cannot download.
func programs(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs a PostgreSQL of its own")
	}
	dir, err := pgserver.Embedded(t.Context(), "", t.Output())
	if err != nil {
		var ok bool
		dir, ok = pgserver.Installed()
		require.True(t, ok, "no PostgreSQL: %v", err)
	}
	return dir
}

func start(t *testing.T, cfg pgserver.Config) *pgserver.Server {
	t.Helper()
	cfg.BinDir = programs(t)
	began := time.Now()
	s, err := pgserver.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Logf("ready in %v", time.Since(began))
	t.Cleanup(func() { require.NoError(t, s.Stop(context.Background())) })
	return s
}

func query[T any](t *testing.T, s *pgserver.Server, sql string) (value T) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&value))
	return value
}

// requireGone allows a moment for init to collect an orphan that has ended.
func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}, 5*time.Second, 5*time.Millisecond, "process %d", pid)
}

// sharedMemory returns the files that the process has mapped from /dev/shm
// (Linux; elsewhere none).
func sharedMemory(pid int) []string {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil
	}
	return regexp.MustCompile(`/dev/shm/PostgreSQL\.\d+`).FindAllString(string(maps), -1)
}

func TestCommittedDataSurvivesCrash(t *testing.T) {
	long.Test(t)
	t.Parallel()
	s := start(t, pgserver.Config{})
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 7 AS n")
	require.NoError(t, err)
	url, pid, backend := s.URL(), s.PID(), query[int](t, s, "SELECT pg_backend_pid()")

	require.NoError(t, s.Kill())
	requireGone(t, pid)
	requireGone(t, backend)
	require.Error(t, conn.Ping(t.Context()))

	began := time.Now()
	require.NoError(t, s.Restart(t.Context()))
	t.Logf("back in %v", time.Since(began))
	require.Equal(t, url, s.URL())
	require.Equal(t, 7, query[int](t, s, "SELECT n FROM kept"))
}

// A backend that computes does not notice by itself that its parent is gone.
func TestKillEndsBusyBackends(t *testing.T) {
	long.Test(t)
	t.Parallel()
	s := start(t, pgserver.Config{})
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	busy := int(conn.PgConn().PID())
	failed := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.Background(), "SELECT count(*) FROM generate_series(1, 1e10)")
		failed <- err
	}()
	require.Eventually(t, func() bool {
		return query[bool](t, s, "SELECT state = 'active' FROM pg_stat_activity WHERE pid = "+strconv.Itoa(busy))
	}, 10*time.Second, 10*time.Millisecond)

	require.NoError(t, s.Kill())
	requireGone(t, busy)
	require.Error(t, <-failed)
	require.NoError(t, s.Restart(t.Context()))
}

func TestStopLeavesNothing(t *testing.T) {
	tmp := openTempDir(t)
	t.Setenv("TMPDIR", tmp)
	for _, tt := range []struct {
		name string
		stop func(*pgserver.Server) error
	}{
		{"running", func(s *pgserver.Server) error { return s.Stop(t.Context()) }},
		{"killed", func(s *pgserver.Server) error { require.NoError(t, s.Kill()); return s.Stop(t.Context()) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := start(t, pgserver.Config{})
			pid, shared := s.PID(), sharedMemory(s.PID())
			require.NoError(t, tt.stop(s))
			requireGone(t, pid)
			require.ErrorIs(t, s.Restart(t.Context()), pgserver.ErrStopped)
			entries, err := os.ReadDir(tmp)
			require.NoError(t, err)
			require.Empty(t, entries)
			for _, file := range shared {
				require.NoFileExists(t, file)
			}
		})
	}
}

// openTempDir is a temporary directory that the server's user may enter.
// t.TempDir is closed to others.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "pgserver-test-")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func TestDefaultsAndSettings(t *testing.T) {
	t.Parallel()
	s := start(t, pgserver.Config{Settings: map[string]string{
		"Work_Mem":                 "7MB",
		"application_name":         `it's a \ test`,
		"max_connections":          "42",
		"shared_preload_libraries": "",
	}})
	for name, want := range map[string]string{
		"max_connections":           "42",
		"max_prepared_transactions": "64",
		"wal_level":                 "replica",
		"listen_addresses":          "127.0.0.1",
		"server_encoding":           "UTF8",
		"lc_messages":               "C",
		"work_mem":                  "7MB",
		"port":                      strconv.Itoa(s.Port()),
	} {
		require.Equal(t, want, query[string](t, s, "SHOW "+name), name)
	}
	require.Equal(t, `it's a \ test`, query[string](t, s,
		"SELECT reset_val FROM pg_settings WHERE name = 'application_name'"))
	if query[int](t, s, "SELECT current_setting('server_version_num')::int") >= 160000 {
		require.True(t, query[bool](t, s, "SELECT rolpassword LIKE 'SCRAM-SHA-256$1000:%' FROM pg_authid WHERE rolname = current_user"))
		require.Equal(t, "1000", query[string](t, s, "SHOW scram_iterations"))
	}
}

func TestDataDirIsKeptAndUsedAgain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(openTempDir(t), "data")
	first := start(t, pgserver.Config{DataDir: dir})
	conn, err := pgx.Connect(t.Context(), first.URL())
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 7 AS n")
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	require.NoError(t, first.Stop(t.Context()))

	second := start(t, pgserver.Config{DataDir: dir, Settings: map[string]string{"work_mem": "9MB"}})
	require.Equal(t, 7, query[int](t, second, "SELECT n FROM kept"))
	require.Equal(t, "9MB", query[string](t, second, "SHOW work_mem"))
}

func TestStandbyTakesThePlaceOfItsPrimary(t *testing.T) {
	long.Test(t)
	t.Parallel()
	exec := func(s *pgserver.Server, sql string) {
		conn, err := pgx.Connect(t.Context(), s.URL())
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	primary := start(t, pgserver.Config{})
	exec(primary, "CREATE TABLE kept AS SELECT 1 AS n")
	standby := start(t, pgserver.Config{Primary: primary})
	require.True(t, query[bool](t, standby, "SELECT pg_is_in_recovery()"))
	require.Equal(t, 1, query[int](t, standby, "SELECT sum(n)::int FROM kept"), "copied")
	exec(primary, "INSERT INTO kept VALUES (2)")
	require.Eventually(t, func() bool {
		return query[int](t, standby, "SELECT sum(n)::int FROM kept") == 3
	}, 20*time.Second, 10*time.Millisecond, "replicated")

	require.NoError(t, primary.Kill())
	require.True(t, query[bool](t, standby, "SELECT pg_promote()"))
	exec(standby, "INSERT INTO kept VALUES (4)")
	require.Equal(t, 7, query[int](t, standby, "SELECT sum(n)::int FROM kept"))
	require.NoError(t, standby.Restart(t.Context()))
	require.False(t, query[bool](t, standby, "SELECT pg_is_in_recovery()"))
}

func TestFailedStartTellsWhy(t *testing.T) {
	tmp := openTempDir(t)
	bin := programs(t)
	t.Setenv("TMPDIR", tmp)
	var log bytes.Buffer
	_, err := pgserver.Start(t.Context(), pgserver.Config{
		BinDir: bin, Log: &log, Settings: map[string]string{"wal_level": "no-such-level"},
	})
	require.ErrorContains(t, err, "no-such-level")
	require.Contains(t, log.String(), "no-such-level")
	entries, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestConfigErrors(t *testing.T) {
	t.Parallel()
	_, err := pgserver.Start(t.Context(), pgserver.Config{BinDir: t.TempDir(), Settings: map[string]string{"port": "1"}})
	require.ErrorContains(t, err, "BinDir")
	require.ErrorContains(t, err, "setting port")
	_, err = pgserver.Embedded(t.Context(), "9", nil)
	require.ErrorContains(t, err, `"9"`)
}
