package outbox

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// Somebody looks every few seconds. What is published, and the history of the cursor,
// must not be what that costs.
func TestInspectionOverManyRows(t *testing.T) {
	const published, moved, fresh, parked = 200_000, 20_000, 100, 2000
	d, ctx := newDesk(t), context.Background()
	for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed"} {
		d.exec(t, `ALTER TABLE {schema}.`+table+` SET (autovacuum_enabled = false)`)
		d.exec(t, `ANALYZE {schema}.`+table)
	}
	l, err := d.leases.acquire(ctx)
	require.NoError(t, err)
	d.insert(t, published)
	_, err = d.cursors.load(ctx, l)
	require.NoError(t, err)
	d.exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
		SELECT 10 * n, pg_current_snapshot(), 10 * n, system_identifier, $1, now() - ($2 - n) * interval '50 ms'
		  FROM generate_series(1, $2) AS n, pg_control_system()`, l.epoch, moved)
	d.insert(t, fresh)
	d.exec(t, sqlInsertParked, parked, 10)

	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, look := range []struct {
			name, parameters, sql, arguments string
			limit                            int
		}{
			{"relays", "int", sqlRelays, "100001", 800},
			{"moves", "text, timestamptz, timestamptz, interval", sqlMoves, "'default', now() - interval '5 min', now(), '5 s'", 60 * 30},
		} {
			t.Run(look.name+" "+analysed, func(t *testing.T) {
				tx, err := d.db.Begin(ctx)
				require.NoError(t, err)
				defer tx.Rollback(ctx)
				_, err = tx.Exec(ctx, pg.PlannerSettings)
				require.NoError(t, err)
				_, err = tx.Exec(ctx, "PREPARE look ("+look.parameters+") AS "+pg.InSchema(look.sql, d.schema), pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err)
				buffers, plan := explain(t, tx, "EXECUTE look ("+look.arguments+")")
				t.Logf("%d buffers", buffers)
				require.LessOrEqual(t, buffers, look.limit, "%s", plan)
				_, err = tx.Exec(ctx, "DEALLOCATE look")
				require.NoError(t, err)
			})
		}
		for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed"} {
			d.exec(t, `ANALYZE {schema}.`+table)
		}
	}
}
