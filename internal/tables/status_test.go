package tables_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// What alerts, metrics and operators read costs the same however many events wait or have
// failed, also if it was planned while the tables were empty, and in each part of a window.
func TestStatusOverManyRows(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	const events, failed, keys, most = 30_000, 60_000, 2000, 500
	d, ctx := testenv.NewTables(t), context.Background()
	for _, table := range []string{"outbox", "outbox_failed", "outbox_cursor", "event_subscription"} {
		d.Exec(t, `ALTER TABLE {schema}.`+table+` SET (autovacuum_enabled = false)`)
		d.Exec(t, `ANALYZE {schema}.`+table)
	}
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	inTx := func(do func(pgx.Tx)) {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		_, err = tx.Exec(ctx, pg.PlannerSettings)
		require.NoError(t, err)
		do(tx)
	}
	statements := []struct{ name, sql, args string }{
		{"relays", "(bigint, bigint) AS " + tables.SQLRelays, "(500, 500)"},
		{"failures", "(text[], text, text, text, bigint) AS " + tables.SQLFailureCount, "('{waiting,failed,parked,dead}', '', '', '', 500)"},
		{"deaths", "(timestamptz, text, bigint[], bigint) AS " + tables.SQLDeaths, "(now() - interval '1 minute', '', '{}', 500)"},
		{"stale_pending", "(text[], timestamptz, bigint) AS " + tables.SQLStalePending, "('{default}', now() + interval '1 minute', 500)"},
		{"stale_failures", "(text[], timestamptz, bigint) AS " + tables.SQLStaleFailures, "('{default}', now() + interval '1 minute', 500)"},
	}
	for _, s := range statements {
		_, err := conn.Exec(ctx, "PREPARE "+s.name+" "+pg.InSchema(s.sql, d.Schema))
		require.NoError(t, err)
		inTx(func(tx pgx.Tx) {
			_, err := tx.Exec(ctx, "EXECUTE "+s.name+s.args)
			require.NoError(t, err)
		})
	}
	d.Exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		VALUES ('default', 0, pg_current_snapshot(), 0, 1, 1)`)
	d.Insert(t, events)
	d.InsertParked(t, failed, keys)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead', error_class = 'c', next_retry_at = now() - interval '1 hour' WHERE outbox_id % 3 = 0`)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET held = true WHERE outbox_id % 100 < 50`)
	for _, window := range []struct {
		name, sql string
	}{
		{"none", `SELECT`},
		{"begins", `UPDATE {schema}.outbox_cursor SET window_snapshot = pg_current_snapshot()`},
		{"ends", `UPDATE {schema}.outbox_cursor SET last_processed_id = (SELECT max(id) - 10 FROM {schema}.outbox)`},
	} {
		d.Exec(t, window.sql)
		for _, s := range statements {
			inTx(func(tx pgx.Tx) {
				_, plan := testenv.Explain(t, tx, "EXECUTE "+s.name+s.args)
				buffers := testenv.Busiest(t, plan)
				t.Logf("%s, %s: %d buffers", window.name, s.name, buffers)
				require.LessOrEqual(t, buffers, 12*most, "%s, %s\n%s", window.name, s.name, plan)
			})
		}
	}
}
