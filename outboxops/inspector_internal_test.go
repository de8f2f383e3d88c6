package outboxops

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// tablesFixture is a migrated schema.
type tablesFixture struct {
	db     *pgxpool.Pool
	schema string
}

func newTables(t *testing.T) *tablesFixture {
	t.Helper()
	db, schema := testenv.Migrated(t)
	return &tablesFixture{db, schema}
}

func (f *tablesFixture) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := f.db.Exec(context.Background(), pg.InSchema(sql, f.schema), args...)
	require.NoError(t, err)
}

// sqlInsertEvents adds $1 events in one transaction.
const sqlInsertEvents = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now() FROM generate_series(1, $1)`

// sqlInsertParked adds $1 events that wait for Kafka. $2 is the number of keys. The events of a key are
// behind one head.
const sqlInsertParked = `
INSERT INTO {schema}.outbox_failed
       (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
        occurred_at, created_at, status)
SELECT 'default', n, 'b-events/key-' || n % $2::bigint, gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'key-' || n % $2::bigint, '{}', 'application/json',
       now(), now(), CASE WHEN n <= $2::bigint THEN 'waiting' ELSE 'parked' END
  FROM generate_series(1, $1::bigint) AS n`

// explain runs a statement and returns the number of buffers that it touched.
func explain(t *testing.T, tx pgx.Tx, statement string) (buffers int, plan string) {
	t.Helper()
	ctx := context.Background()
	require.NoError(t, tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+statement, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
	var explained []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(plan), &explained))
	return explained[0].Plan.Hit + explained[0].Plan.Read, plan
}

// A search for the events of an aggregate uses the index that Migrate makes on request. This holds with and
// without statistics, and in partitions.
func TestEventsOfAggregate(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const events = 20_000
	ctx := context.Background()
	for _, partitionRows := range []int64{0, 10_000} {
		d := newTables(t)
		require.NoError(t, outbox.Migrate(ctx, d.db, outbox.MigrateConfig{Schema: d.schema, PartitionRows: partitionRows}))
		d.exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
			SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'Order', (n % 1000)::text, '{}', 'application/json', now() FROM generate_series(1, $1::int) AS n`, events)
		i, err := NewInspector(d.db, InspectorConfig{Schema: d.schema})
		require.NoError(t, err)
		plan := func() (plan string) {
			filter := EventFilter{AggregateType: "Order", AggregateID: "7"}
			rows, err := d.db.Query(ctx, "EXPLAIN "+i.sql.events, append([]any{pg.PlanEachTime}, append(filter.args(), int64(0), 100)...)...)
			require.NoError(t, err)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			found, err := i.Events(ctx, filter, EventPage{Limit: 1000})
			require.NoError(t, err)
			require.Len(t, found, events/1000)
			return strings.Join(lines, "\n")
		}
		require.NotContains(t, plan(), "aggregate_idx")
		require.NoError(t, outbox.Migrate(ctx, d.db, outbox.MigrateConfig{Schema: d.schema, AggregateIndex: true}))
		for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
			require.Contains(t, plan(), "aggregate_idx", analysed)
			d.exec(t, `ANALYZE {schema}.outbox`)
		}
	}
}

// Pages and monitors poll every few seconds. The cost of a poll must not grow with the published events,
// nor with the history of the cursor.
func TestInspectionOverManyRows(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	const published, moved, fresh, parked = 200_000, 20_000, 100, 2000
	d, ctx := newTables(t), context.Background()
	for _, table := range []string{"outbox", "outbox_cursor", "outbox_failed"} {
		d.exec(t, `ALTER TABLE {schema}.`+table+` SET (autovacuum_enabled = false)`)
		d.exec(t, `ANALYZE {schema}.`+table)
	}
	d.exec(t, `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at) VALUES ('default', 'somewhere', 1, now() + interval '1 min')`)
	d.exec(t, sqlInsertEvents, published)
	d.exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 0, '1:1:', 0, system_identifier, 1 FROM pg_control_system()`)
	d.exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch, created_at)
		SELECT 10 * n, pg_current_snapshot(), 10 * n, system_identifier, 1, now() - ($1 - n) * interval '50 ms'
		  FROM generate_series(1, $1) AS n, pg_control_system()`, moved)
	d.exec(t, sqlInsertEvents, fresh)
	d.exec(t, sqlInsertParked, parked, 10)

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
