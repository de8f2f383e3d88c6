package pg_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A COMMIT is lost if its session certainly does not run it: the session has ended, waits for a statement, or runs one
// of a later transaction.
func TestIsLost(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // it knows the processes of its sessions
	db := testenv.Pool(t, nil)
	exec := func(t *testing.T, conn *pgxpool.Conn, sql string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	runs := func(t *testing.T, conn *pgxpool.Conn) {
		exec(t, conn, `BEGIN`)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = conn.Exec(ctx, `SELECT pg_sleep(3600)`)
		}()
		t.Cleanup(func() { cancel(); <-ended })
	}
	for name, tt := range map[string]struct {
		state string // of the session that is waited for
		begin func(*testing.T, *pgxpool.Conn)
		ago   time.Duration
		want  bool
	}{
		"it runs":                    {"active", runs, 0, false},
		"it runs another one":        {"active", runs, time.Hour, true},
		"it has not arrived":         {"idle in transaction", func(t *testing.T, c *pgxpool.Conn) { exec(t, c, `BEGIN`) }, 0, true},
		"it is done":                 {"idle", func(*testing.T, *pgxpool.Conn) {}, 0, true},
		"its session hides its work": {"disabled", func(t *testing.T, c *pgxpool.Conn) { exec(t, c, `SET track_activities = off`) }, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := own(t, db)
			tt.begin(t, conn)
			pid := int32(conn.Conn().PgConn().PID())
			require.Eventually(t, func() bool {
				var state string
				require.NoError(t, db.QueryRow(t.Context(), `SELECT state FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&state))
				return state == tt.state
			}, testenv.Patience, 10*time.Millisecond)
			lost, err := pg.IsLost(t.Context(), db, pid, tt.ago)
			require.NoError(t, err)
			require.Equal(t, tt.want, lost)
		})
	}
	t.Run("its session has ended", func(t *testing.T) {
		t.Parallel()
		pid := int32(1) // that of the init process
		lost, err := pg.IsLost(t.Context(), db, pid, 0)
		require.NoError(t, err)
		require.True(t, lost)
	})
	t.Run("its session is of another role", func(t *testing.T) {
		t.Parallel()
		role := pgx.Identifier{"Test " + uuid.NewString()}.Sanitize()
		_, err := db.Exec(t.Context(), `CREATE ROLE `+role)
		require.NoError(t, err)
		t.Cleanup(func() {
			_, err := db.Exec(context.Background(), `DROP ROLE `+role)
			require.NoError(t, err)
		})
		other := testenv.Pool(t, func(cfg *pgxpool.Config) {
			cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `SET SESSION AUTHORIZATION `+role)
				return err
			}
		})
		lost, err := pg.IsLost(t.Context(), other, int32(own(t, db).Conn().PgConn().PID()), 0)
		require.NoError(t, err)
		require.False(t, lost, "it cannot be seen")
	})
	t.Run("PostgreSQL does not answer", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		lost, err := pg.IsLost(ctx, db, int32(own(t, db).Conn().PgConn().PID()), 0)
		require.Error(t, err)
		require.False(t, lost)
	})
}

// own returns a connection of a pool that no other test uses.
func own(t *testing.T, db *pgxpool.Pool) *pgxpool.Conn {
	t.Helper()
	conn, err := db.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { conn.Hijack().Close(context.Background()) })
	return conn
}

// A connection can be cut until it is returned, also if it has left the pool.
func TestCut(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		before func(*pg.Borrowed)
		lives  bool
	}{
		"borrowed": {func(*pg.Borrowed) {}, false},
		"detached": {(*pg.Borrowed).Detach, false},
		"returned": {(*pg.Borrowed).Return, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, err := pg.Borrow(t.Context(), testenv.Pool(t, nil))
			require.NoError(t, err)
			tt.before(b)
			b.Cut()
			require.Equal(t, tt.lives, b.Ping(t.Context()) == nil)
			if !tt.lives {
				b.Return()
			}
		})
	}
}
