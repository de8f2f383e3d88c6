package outboxops

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A transaction that has recorded much and stays open delays neither a tail of events nor a cutover.
func TestUncommittedRowsCostNothing(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d := testenv.NewTables(t)
	require.NoError(t, outbox.Migrate(context.Background(), d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 1_000_000}))
	d.Exec(t, `INSERT INTO {schema}.event_subscription (consumer_group) VALUES ('g')`)
	d.PassUncommitted(t, pg.PlannerSettings, func(snapshot string) []testenv.Statement {
		d.Exec(t, `
			INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
			SELECT r, 0, $1::text::pg_snapshot, 0, system_identifier, 1 FROM pg_control_system(), unnest('{default,worker:g}'::text[]) AS r`, snapshot)
		return []testenv.Statement{
			{Name: "tail", Types: "(text, text, text, text, timestamptz, timestamptz, pg_snapshot, xid8)", SQL: sqlTail,
				Args: fmt.Sprintf(`('', '', '', '', NULL, NULL, '%s', '%s')`, snapshot, tables.SnapshotMax(snapshot))},
			{Name: "partitions", SQL: sqlPartitionSizes, WalksDead: true}, // it looks back from the newest transaction
			{Name: "pending", Types: "(text)", SQL: `SELECT {schema}.outbox_pending($1, 1)`, Args: "('default')"},
			{Name: "cut to Kafka", Types: "(text)", SQL: `SELECT {schema}.outbox_cut_to_kafka('{g}', $1, 'kim', 'why')`, Args: "('r')"},
		}
	})
}
