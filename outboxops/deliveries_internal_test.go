package outboxops

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// sqlInsertDeliveries adds $1 deliveries with status $2 to group $3. PARKED deliveries have the same key,
// all others have a key each.
const sqlInsertDeliveries = `
INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, locked_until, locked_by, created_at, updated_at,
       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
SELECT n, CASE WHEN $2::text = 'PARKED' THEN 1 ELSE -n END, 0, 10, now(), CASE WHEN $2 = 'PROCESSING' THEN now() END, CASE WHEN $2 = 'PROCESSING' THEN 'w' END,
       now(), now(), now(), now(), gen_random_uuid(), $2, $3::text, 'COUNTED', 'order-events', 'shop.order.created.v1', 'shop', 'Order', 'key-' || n,
       'application/json', '{}'
  FROM generate_series(1, $1::bigint) AS n`

// The cost of operators' reads does not depend on the number of done deliveries, and counts end at
// MaxCounted. A requeue does not read the followers of its key. This also holds for connections that have
// planned their statements over an empty table.
func TestDeliveriesOverManyRows(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	const done, many = 200_000, 30_000
	d, ctx := testenv.NewTables(t), context.Background()
	d.Exec(t, `ALTER TABLE {schema}.event_delivery SET (autovacuum_enabled = false)`)
	d.Exec(t, `ANALYZE {schema}.event_delivery`)
	firstDay, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer firstDay.Release()
	lookAtDeliveries(t, d, firstDay.Conn(), "on an empty table", 0)

	for _, status := range []string{"DEAD", "PENDING", "PARKED"} { // the hot key has 30,000 followers
		d.Exec(t, sqlInsertDeliveries, many, status, "stats")
	}
	d.Exec(t, sqlInsertDeliveries, done, "DONE", "stats")
	d.Exec(t, sqlInsertDeliveries, 100, "PROCESSING", "mails")
	d.Exec(t, sqlInsertDeliveries, 100, "DONE", "mails")
	var dead int64
	require.NoError(t, d.DB.QueryRow(ctx, pg.InSchema(`UPDATE {schema}.event_delivery SET order_key = 1 WHERE status = 'DEAD' AND position = 7 RETURNING id`, d.Schema)).Scan(&dead))
	d.Exec(t, `UPDATE {schema}.event_delivery SET order_key = 1 WHERE status = 'PENDING' AND position = 9`)

	lookAtDeliveries(t, d, firstDay.Conn(), "planned on an empty table", dead)
	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		conn, err := d.DB.Acquire(ctx)
		require.NoError(t, err)
		func() {
			defer conn.Release()
			lookAtDeliveries(t, d, conn.Conn(), analysed, dead)
			require.NoError(t, conn.Conn().DeallocateAll(ctx))
		}()
		d.Exec(t, `ANALYZE {schema}.event_delivery`)
	}
}

// looksAtDeliveries are statements with the types and the values of their parameters, and the largest
// number of buffers that they may touch.
var looksAtDeliveries = []struct {
	name, more, sql, arguments string
	limit                      int
}{
	{"count", "bigint, bigint", tables.SQLDeliveryCount, "'{PENDING,PARKED,PROCESSING,DEAD}', '', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 10000, 100000", 3000},
	{"count_group", "bigint, bigint", tables.SQLDeliveryCount, "'{PENDING,PARKED,PROCESSING,DEAD}', 'mails', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 10000, 100000", 50},
	{"failures", "bigint, bigint", tables.SQLDeliveryFailures, "'{PENDING,PROCESSING,DEAD}', '', '', '', '', '', '', '', NULL, NULL, true, '', '', 10000, 100000", 4000},
	{"list", listParameters, tables.SQLDeliveryList, "'{PENDING,PARKED,PROCESSING,DEAD}', '', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 9223372036854775807, 100", 200},
	{"list_dead", listParameters, tables.SQLDeliveryList, "'{DEAD}', 'stats', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 50000, 100", 100},
	{"list_done", listParameters, tables.SQLDeliveryList, "'{DONE}', '', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 200000, 100", 150},
	{"list_resolved", listParameters, tables.SQLDeliveryList, "'{RESOLVED}', 'mails', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 200000, 100", 2000},
	{"ids", "bigint, bigint", tables.SQLDeliveryIDs, "'{DEAD}', '', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 0, 100, ''", 100},
	{"ids_resolved", "bigint, bigint", tables.SQLDeliveryIDs, "'{RESOLVED}', 'mails', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 0, 100, ''", 2000},
}

const listParameters = "bigint, bigint"

// lookAtDeliveries runs the operations of operators on a delivery, and counts the buffers that they touch.
// The connection prepares the statements at the first call.
func lookAtDeliveries(t *testing.T, d *testenv.Tables, conn *pgx.Conn, when string, dead int64) {
	t.Helper()
	ctx := context.Background()
	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	_, err = tx.Exec(ctx, pg.PlannerSettings)
	require.NoError(t, err)
	for _, look := range looksAtDeliveries {
		var prepared bool
		require.NoError(t, tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE name = $1)`, "look_"+look.name).Scan(&prepared))
		if !prepared {
			_, err = tx.Exec(ctx, "PREPARE look_"+look.name+" (text[], text, text, text, text, text, text, text, timestamptz, timestamptz, bool, text, text, "+look.more+") AS "+
				pg.InSchema(look.sql, d.Schema), pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
		}
		buffers, plan := testenv.Explain(t, tx, "EXECUTE look_"+look.name+" ("+look.arguments+")")
		t.Logf("%s %s: %d buffers", look.name, when, buffers)
		require.LessOrEqual(t, buffers, look.limit, "%s %s: %s", look.name, when, plan)
	}
	for name, alert := range map[string]struct {
		sql   string
		args  []string
		limit int
	}{
		"deaths": {tables.SQLDeliveryDeaths, []string{"now() - interval '1 min'", "'{}'", "100"}, 200},
		"stale":  {tables.SQLStaleDeliveries, []string{"'{PENDING,PARKED}'::text[]", "''", "''", "''", "now() + interval '1 min'", "10000", "100000"}, 3000},
	} {
		for i, arg := range alert.args {
			alert.sql = strings.ReplaceAll(alert.sql, fmt.Sprint("$", i+1), arg)
		}
		buffers, plan := testenv.Explain(t, tx, pg.InSchema(alert.sql, d.Schema))
		t.Logf("%s %s: %d buffers", name, when, buffers)
		require.LessOrEqual(t, buffers, alert.limit, "%s %s: %s", name, when, plan)
	}
	for _, action := range []string{"requeue", "resolve", "hold", "release"} {
		buffers := 0
		for range 2 { // the first call also reads the catalogs, which are large because of other tests
			_, err = tx.Exec(ctx, `SAVEPOINT act`)
			require.NoError(t, err)
			buffers, _ = testenv.Explain(t, tx, pg.InSchema(fmt.Sprintf(`SELECT {schema}.outbox_%s_deliveries('{%d}', 'kim', 'why')`, action, dead), d.Schema))
			_, err = tx.Exec(ctx, `ROLLBACK TO act`)
			require.NoError(t, err)
		}
		t.Logf("%s %s: %d buffers", action, when, buffers)
		require.LessOrEqual(t, buffers, 500, "%s %s", action, when)
	}
}
