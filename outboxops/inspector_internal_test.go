package outboxops

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A search for the events of an aggregate uses the index that Migrate makes on request. This holds with and
// without statistics, and in partitions.
func TestEventsOfAggregate(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const events = 20_000
	ctx := context.Background()
	for _, partitionRows := range []int64{0, 10_000} {
		d := testenv.NewTables(t)
		require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: partitionRows}))
		d.Exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
			SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'Order', (n % 1000)::text, '{}', 'application/json', now() FROM generate_series(1, $1::int) AS n`, events)
		i, err := NewInspector(d.DB, InspectorConfig{Schema: d.Schema})
		require.NoError(t, err)
		plan := func() (plan string) {
			filter := EventFilter{AggregateType: "Order", AggregateID: "7"}
			rows, err := d.DB.Query(ctx, "EXPLAIN "+i.sql.events, append([]any{pg.PlanEachTime}, append(filter.args(), int64(0), 100)...)...)
			require.NoError(t, err)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			found, err := i.Events(ctx, filter, EventPage{Limit: 1000})
			require.NoError(t, err)
			require.Len(t, found, events/1000)
			return strings.Join(lines, "\n")
		}
		require.NotContains(t, plan(), "aggregate_idx")
		require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, AggregateIndex: true}))
		for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
			require.Contains(t, plan(), "aggregate_idx", analysed)
			d.Exec(t, `ANALYZE {schema}.outbox`)
		}
	}
}

// Pages and monitors poll every few seconds. The cost of a poll must not grow with the published events,
// nor with the history of the cursor.
func TestInspectionOverManyRows(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	const published, moved, fresh, parked = 200_000, 20_000, 100, 2000
	d, ctx := testenv.NewTables(t), context.Background()
	for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed"} {
		d.Exec(t, `ALTER TABLE {schema}.`+table+` SET (autovacuum_enabled = false)`)
		d.Exec(t, `ANALYZE {schema}.`+table)
	}
	d.Exec(t, `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at) VALUES ('default', 'somewhere', 1, now() + interval '1 min')`)
	d.Insert(t, published)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 0, '1:1:', 0, system_identifier, 1 FROM pg_control_system()`)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
		SELECT 10 * n, pg_current_snapshot(), 10 * n, system_identifier, 1, now() - ($1 - n) * interval '50 ms'
		  FROM generate_series(1, $1) AS n, pg_control_system()`, moved)
	d.Insert(t, fresh)
	d.InsertParked(t, parked, 10)

	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, look := range []struct {
			name, parameters, sql, arguments string
			limit                            int
		}{
			{"relays", "bigint, bigint", tables.SQLRelays, "100001, 10000", 800},
			{"topics", "int, int", sqlRecordedTopics, "100, 100", 500},
			{"progress", "text, timestamptz, timestamptz, interval", sqlProgress, "'default', now() - interval '5 min', now(), '5 s'", 60 * 30},
		} {
			t.Run(look.name+" "+analysed, func(t *testing.T) {
				tx, err := d.DB.Begin(ctx)
				require.NoError(t, err)
				defer tx.Rollback(ctx)
				_, err = tx.Exec(ctx, pg.PlannerSettings)
				require.NoError(t, err)
				_, err = tx.Exec(ctx, "PREPARE look ("+look.parameters+") AS "+pg.InSchema(look.sql, d.Schema), pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err)
				buffers, plan := testenv.Explain(t, tx, "EXECUTE look ("+look.arguments+")")
				t.Logf("%d buffers", buffers)
				require.LessOrEqual(t, buffers, look.limit, "%s", plan)
				_, err = tx.Exec(ctx, "DEALLOCATE look")
				require.NoError(t, err)
			})
		}
		for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed"} {
			d.Exec(t, `ANALYZE {schema}.`+table)
		}
	}
}
