package outboxops

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// sqlInsertDeliveries adds $1 deliveries with status $2 to group $3. Those that are PARKED have
// one key, and all others one each.
const sqlInsertDeliveries = `
INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, locked_until, locked_by, created_at, updated_at,
       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
SELECT n, CASE WHEN $2::text = 'PARKED' THEN 1 ELSE -n END, 0, 10, now(), CASE WHEN $2 = 'PROCESSING' THEN now() END, CASE WHEN $2 = 'PROCESSING' THEN 'w' END,
       now(), now(), now(), now(), gen_random_uuid(), $2, $3::text, 'COUNTED', 'order-events', 'shop.order.created.v1', 'shop', 'Order', 'key-' || n,
       'application/json', '{}'
  FROM generate_series(1, $1::bigint) AS n`

// What operators look at costs the same however many deliveries are done, and counts end at
// MaxCounted. A requeue does not read the followers of its key.
func TestDeliveriesOverManyRows(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	const done, many = 200_000, 30_000
	d, ctx := newTables(t), context.Background()
	d.exec(t, `ALTER TABLE {schema}.event_delivery SET (autovacuum_enabled = false)`)
	d.exec(t, `ANALYZE {schema}.event_delivery`)
	for _, status := range []string{"DEAD", "PENDING", "PARKED"} { // the hot key has 30,000 followers
		d.exec(t, sqlInsertDeliveries, many, status, "stats")
	}
	d.exec(t, sqlInsertDeliveries, done, "DONE", "stats")
	d.exec(t, sqlInsertDeliveries, 100, "PROCESSING", "mails")
	d.exec(t, sqlInsertDeliveries, 100, "DONE", "mails")
	d.exec(t, `UPDATE {schema}.event_delivery SET order_key = 1 WHERE status = 'DEAD' AND position = 7`)
	d.exec(t, `UPDATE {schema}.event_delivery SET order_key = 1 WHERE status = 'PENDING' AND position = 9`)

	const filter = "bigint, bigint, bool"
	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, look := range []struct {
			name, more, sql, arguments string
			limit                      int
		}{
			{"count", "bigint, bigint", tables.SQLDeliveryCount, "'{PENDING,PARKED,PROCESSING,DEAD}', '', '', '', '', '', '', '', NULL, NULL, 10000, 100000", 3000},
			{"count of a group", "bigint, bigint", tables.SQLDeliveryCount, "'{PENDING,PARKED,PROCESSING,DEAD}', 'mails', '', '', '', '', '', '', NULL, NULL, 10000, 100000", 50},
			{"list", filter, tables.SQLDeliveryList, "'{PENDING,PARKED,PROCESSING,DEAD}', '', '', '', '', '', '', '', NULL, NULL, 9223372036854775807, 100, false", 200},
			{"list of what is dead", filter, tables.SQLDeliveryList, "'{DEAD}', 'stats', '', '', '', '', '', '', NULL, NULL, 50000, 100, false", 100},
			{"list of what is done", filter, tables.SQLDeliveryList, "'{DONE}', '', '', '', '', '', '', '', NULL, NULL, 200000, 100, false", 150},
			{"list of what is resolved", filter, tables.SQLDeliveryList, "'{DEAD}', 'mails', '', '', '', '', '', '', NULL, NULL, 200000, 100, true", 2000},
			{"ids", "bigint, bigint", tables.SQLDeliveryIDs, "'{DEAD}', '', '', '', '', '', '', '', NULL, NULL, 0, 100", 100},
		} {
			t.Run(look.name+" "+analysed, func(t *testing.T) {
				tx, err := d.db.Begin(ctx)
				require.NoError(t, err)
				defer tx.Rollback(ctx)
				_, err = tx.Exec(ctx, pg.PlannerSettings)
				require.NoError(t, err)
				_, err = tx.Exec(ctx, "PREPARE look (text[], text, text, text, text, text, text, text, timestamptz, timestamptz, "+look.more+") AS "+
					pg.InSchema(look.sql, d.schema), pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err)
				buffers, plan := explain(t, tx, "EXECUTE look ("+look.arguments+")")
				t.Logf("%d buffers", buffers)
				require.LessOrEqual(t, buffers, look.limit, "%s", plan)
				_, err = tx.Exec(ctx, "DEALLOCATE look")
				require.NoError(t, err)
			})
		}
		t.Run("requeue "+analysed, func(t *testing.T) {
			tx, err := d.db.Begin(ctx)
			require.NoError(t, err)
			defer tx.Rollback(ctx)
			var id int64
			require.NoError(t, tx.QueryRow(ctx, pg.InSchema(`SELECT id FROM {schema}.event_delivery WHERE status = 'DEAD' AND order_key = 1`, d.schema)).Scan(&id))
			for _, action := range []string{"requeue", "resolve"} {
				buffers, plan := explain(t, tx, pg.InSchema(fmt.Sprintf(`SELECT {schema}.outbox_%s_deliveries('{%d}', 'kim', 'why')`, action, id), d.schema))
				t.Logf("%s: %d buffers", action, buffers)
				require.LessOrEqual(t, buffers, 500, "%s", plan)
			}
		})
		d.exec(t, `ANALYZE {schema}.event_delivery`)
	}
}
