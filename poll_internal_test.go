package outbox

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// retained is how many published rows the poll must not notice.
const retained = 1_000_000

// maxPollBuffers is what a poll may touch: the roots and leaves of three
// indexes, and a few rows. A plan that walks a table or an index of a million
// rows touches tens of thousands.
const maxPollBuffers = 60

// The planner has walked the primary key, or all of outbox, for statements that
// mean the same. What holds must hold under custom and generic plans, whether
// the table was analysed or not, and while transactions are open.
func TestPollOverRetainedRows(t *testing.T) {
	d, ctx := newDesk(t), context.Background()
	d.exec(t, `ALTER TABLE {schema}.outbox SET (autovacuum_enabled = false)`)
	d.insert(t, retained)
	l, err := d.leases.acquire(ctx)
	require.NoError(t, err)
	for range 3 { // these were in progress when the snapshot was taken
		tx, err := d.db.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		_, err = tx.Exec(ctx, `SELECT pg_current_xact_id()`)
		require.NoError(t, err)
	}
	_, err = d.cursors.load(ctx, l)
	require.NoError(t, err)
	d.exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT $1, pg_current_snapshot(), $1, system_identifier, $2 FROM pg_control_system()`, retained, l.epoch)
	p, err := d.cursors.load(ctx, l)
	require.NoError(t, err)

	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			for fresh := range 2 {
				t.Run(fmt.Sprintf("%s, %s, %d new", analysed, mode, fresh), func(t *testing.T) {
					buffers, plan := d.explainPoll(t, l, p, mode, fresh)
					t.Logf("%d buffers", buffers)
					require.LessOrEqual(t, buffers, maxPollBuffers, "%s", plan)
				})
			}
		}
		d.exec(t, `ANALYZE {schema}.outbox`)
	}
}

// explainPoll runs sqlOpen with some new events, in a transaction that rolls
// back, and returns how many buffers it touched.
func (d *desk) explainPoll(t *testing.T, l *lease, p position, mode string, fresh int) (buffers int, plan string) {
	t.Helper()
	ctx := context.Background()
	tx, err := d.db.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	for _, sql := range []string{
		"SET LOCAL plan_cache_mode = " + mode,
		fmt.Sprintf(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
			SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now() FROM generate_series(1, %d)`, fresh),
		"PREPARE poll (text, text, bigint, bigint, pg_snapshot, xid8, bigint, bool, bigint, bigint, bigint) AS " + d.cursors.sqlOpen,
	} {
		_, err := tx.Exec(ctx, inSchema(sql, d.schema))
		require.NoError(t, err)
	}
	execute := fmt.Sprintf(`EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE poll('default', '%s', %d, %d, '%s', '%s', 1000, false, %d, %d, %d)`,
		l.holder, l.epoch, p.cursorID, p.base, snapshotMax(p.base), p.last, p.highest, p.systemID)
	require.NoError(t, tx.QueryRow(ctx, execute, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
	_, err = tx.Exec(ctx, "DEALLOCATE poll")
	require.NoError(t, err)
	var explained []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(plan), &explained))
	return explained[0].Plan.Hit + explained[0].Plan.Read, plan
}
