package itest

import (
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// A process that led is frozen while PostgreSQL sends it events, or inside a transaction. Its session keeps the row of
// the lease locked. Another process ends that session, and takes over.
func TestFrozenLeaderIsReplaced(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a pooler would not keep the session
	const lock = `FROM {s}.outbox_lease AS l`
	for name, c := range map[string]struct{ sql, waits string }{
		"while it reads events":    {`SELECT repeat('x', 1000) ` + lock + `, generate_series(1, 200000) WHERE l.name = 'default' FOR SHARE OF l`, "ClientWrite"},
		"before it sends a COMMIT": {`BEGIN; SELECT ` + lock + ` WHERE l.name = 'default' FOR SHARE`, "ClientRead"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			reader := h.follow(t)
			h.gone(t, -time.Second)
			frozen, err := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "frozen" }).Acquire(background)
			require.NoError(t, err)
			t.Cleanup(func() { _ = frozen.Hijack().Close(background) })
			session := frozen.Conn().PgConn()
			session.Frontend().SendQuery(&pgproto3.Query{String: h.sql(c.sql)})
			require.NoError(t, session.Frontend().Flush())
			require.Eventually(t, func() bool {
				var n int
				err := h.db.QueryRow(background, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event = $2 AND xact_start IS NOT NULL`, session.PID(), c.waits).Scan(&n)
				return err == nil && n == 1
			}, testenv.Patience, time.Millisecond)
			log := new(testenv.Buffer)
			cfg := quick
			cfg.Logger, cfg.Lease, cfg.DeliveryTimeout = slog.New(slog.NewTextHandler(log, nil)), 3*time.Second, time.Second
			testenv.Run(t, h.relay(t, cfg).Run)
			events := numbered("a", 1, 3)
			h.commit(t, events...)
			requireArrival(t, reader, events...)
			require.Contains(t, log.String(), "a session was ended, because it had an expired lease locked")
			require.Contains(t, log.String(), "application=frozen")
		})
	}
}
