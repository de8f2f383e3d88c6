package itest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A session that holds a lock for longer than its bound is ended only if its process is frozen: it holds the row of a
// lease, or it does not read what PostgreSQL sends. Others may be at work: a handler between two statements, a
// transaction of the host, and who changes a table.
func TestOnlyFrozenHoldersAreEnded(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // processes of sessions
	const (
		note  = `INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('g', 't', 'i', 'a')`
		lease = `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at) VALUES ('l', 'h', 1, now())`
		flood = `SELECT repeat('x', 1000) FROM generate_series(1, 200000)`
	)
	for name, tt := range map[string]struct {
		holds, waits string
		flooded      bool
		application  string
		ended        bool
	}{
		"at work":                     {holds: note, waits: note},
		"a lease":                     {holds: lease, waits: lease, ended: true},
		"cut off":                     {holds: note, waits: note, flooded: true, ended: true},
		"cut off, of another service": {holds: note, waits: note, flooded: true, application: "another"},
		"changes a table":             {holds: `LOCK TABLE {schema}.event_handled IN EXCLUSIVE MODE`, waits: note, flooded: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "service" })
			holder, err := testenv.Pool(t, func(cfg *pgxpool.Config) {
				cfg.ConnConfig.RuntimeParams["application_name"] = "service"
				if tt.application != "" {
					cfg.ConnConfig.RuntimeParams["application_name"] = tt.application
				}
			}).Acquire(t.Context())
			require.NoError(t, err)
			defer func() { _ = holder.Hijack().PgConn().Conn().Close() }()
			pid := int32(holder.Conn().PgConn().PID())
			_, err = holder.Exec(t.Context(), `BEGIN`)
			require.NoError(t, err)
			_, err = holder.Exec(t.Context(), f.sql(tt.holds))
			require.NoError(t, err)
			if tt.flooded {
				holder.Conn().PgConn().Exec(t.Context(), flood) // the answer is not read
				f.eventually(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite' AND pid = `+fmt.Sprint(pid), 1)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			waited := make(chan error, 1)
			waits := pg.WaitsOf(db)
			go func() {
				end := waits.Begin()
				_, err := db.Exec(ctx, f.sql(tt.waits))
				waited <- end(err)
			}()
			var found []pg.Holder
			require.Eventually(t, func() bool {
				news, _, err := waits.Look(t.Context(), db, f.schema, 100*time.Millisecond)
				require.NoError(t, err)
				found = append(found, news...)
				return len(found) > 0
			}, testenv.Patience, 50*time.Millisecond)
			require.Equal(t, []any{pid, tt.ended}, []any{found[0].PID, found[0].Ended}, "%+v", found)
			if tt.ended {
				require.NoError(t, <-waited)
				return
			}
			for range 5 { // also later
				news, _, err := waits.Look(t.Context(), db, f.schema, 100*time.Millisecond)
				require.NoError(t, err)
				require.Empty(t, news)
			}
			cancel()
			require.Error(t, <-waited)
		})
	}
}
