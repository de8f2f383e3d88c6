package tables_test

import (
	"testing"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A transaction that has recorded much and stays open delays neither status nor metrics nor alerts, whether a window is
// open or not. They failed then, because they walked its rows for longer than their timeout.
func TestUncommittedRowsCostNothing(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d := testenv.NewTables(t)
	d.PassUncommitted(t, pg.PlannerSettings, func(snapshot string) []testenv.Statement {
		d.Exec(t, `
			INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
			SELECT r, 0, $1::text::pg_snapshot, CASE r WHEN 'sending' THEN pg_current_snapshot() END, 0, system_identifier, 1
			  FROM pg_control_system(), unnest('{default,sending}'::text[]) AS r`, snapshot)
		return []testenv.Statement{
			{Name: "relays", Types: "(bigint, bigint)", SQL: tables.SQLRelays, Args: "(100001, 10000)"},
			{Name: "positions", Types: "(bigint, bigint)", SQL: tables.SQLPositions, Args: "(100001, 10000)"},
			{Name: "stale_pending", Types: "(text[], timestamptz, bigint)", SQL: tables.SQLStalePending, Args: "('{default,sending}', now(), 10000)"},
			{Name: "sequence", Types: "(text)", SQL: tables.SQLSequence, Args: "('default')"},
		}
	})
}
