package cursor_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// retained is how many published rows the poll must not notice.
const retained = 1_000_000

// maxPollBuffers is what a poll may touch: the roots and leaves of three
// indexes, and a few rows. A plan that walks a table or an index of a million
// rows touches tens of thousands.
const maxPollBuffers = 60

// openTransactions were in progress when the snapshot of a poll's position was taken.
const openTransactions = 3

// begin begins transactions that the next snapshot lists as in progress, and rolls them back
// when the test ends. A snapshot lists only those that began before another one that has ended.
func (d *fixture) begin(t *testing.T, n int) {
	t.Helper()
	ctx := context.Background()
	for range n {
		tx, err := d.DB.Begin(ctx)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, tx.Rollback(ctx)) })
		_, err = tx.Exec(ctx, `SELECT pg_current_xact_id()`)
		require.NoError(t, err)
	}
	d.Exec(t, `SELECT pg_current_xact_id()`)
}

// The planner has walked the primary key, or all of outbox, for statements that
// mean the same. What holds must hold under custom and generic plans, whether
// the table was analysed or not, and while transactions are open.
func TestPollOverRetainedRows(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `ALTER TABLE {schema}.outbox SET (autovacuum_enabled = false)`)
	d.Insert(t, retained)
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.begin(t, openTransactions)
	_, err = d.cursors.Load(ctx, l)
	require.NoError(t, err)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT $1, pg_current_snapshot(), $1, system_identifier, $2 FROM pg_control_system()`, retained, l.Epoch)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(tables.SnapshotInProgress(p.Base)), openTransactions)

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
		d.Exec(t, `ANALYZE {schema}.outbox`)
	}
}

// Each partition has an index of its own, whose roots and leaves a poll merges; a
// transaction in progress is looked for in each.
func TestPollOverPartitions(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	d, ctx := newFixture(t), context.Background()
	require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: retained / 200}))
	r := retention.NewStore(d.DB, d.Schema, retention.Rules{})
	for range 5 {
		d.Insert(t, retained/50)
		_, err := r.MakePartitions(ctx)
		require.NoError(t, err)
	}
	const ids = retained / 10
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.begin(t, openTransactions)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT $1, pg_current_snapshot(), $1, system_identifier, $2 FROM pg_control_system()`, ids, l.Epoch)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	open := len(tables.SnapshotInProgress(p.Base)) // autovacuum may have some, too
	require.GreaterOrEqual(t, open, openTransactions)
	n := d.Count(t, "outbox_partitions()") + 1 // the default one
	require.Greater(t, n, 20)
	for _, analysed := range []string{"before ANALYZE", "after ANALYZE"} {
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			for fresh := range 2 {
				t.Run(fmt.Sprintf("%s, %s, %d new", analysed, mode, fresh), func(t *testing.T) {
					buffers, plan := d.explainPoll(t, l, p, mode, fresh)
					t.Logf("%d buffers, %d partitions", buffers, n)
					require.LessOrEqual(t, buffers, maxPollBuffers+2*n*(1+open), "%s", plan)
				})
			}
		}
		d.Exec(t, `ANALYZE {schema}.outbox`)
	}
}

// explainPoll runs SQLOpen with some new events, in a transaction that rolls
// back, and returns how many buffers it touched.
func (d *fixture) explainPoll(t *testing.T, l *lease.Lease, p cursor.Position, mode string, fresh int) (buffers int, plan string) {
	t.Helper()
	ctx := context.Background()
	tx, err := d.DB.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	d.InsertIn(t, tx, fresh)
	for _, sql := range []string{
		cursor.SQLSettings,
		"SET LOCAL plan_cache_mode = " + mode,
		"PREPARE poll (text, text, bigint, bigint, pg_snapshot, xid8, bigint, bool, bigint, bigint, bigint, timestamptz, bigint, bigint, bigint, bigint, bytea) AS " + d.cursors.SQLOpen,
	} {
		_, err := tx.Exec(ctx, sql)
		require.NoError(t, err)
	}
	execute := fmt.Sprintf(`EXECUTE poll('default', '%s', %d, %d, '%s', '%s', 1000, false, %d, %d, %d, '%s', 1048576, %d, NULL, NULL, NULL)`,
		l.Holder, l.Epoch, p.CursorID, p.Base, tables.SnapshotMax(p.Base), p.Last, p.Highest, p.SystemID, p.Server.Format(time.RFC3339Nano), p.Epoch)
	buffers, plan = testenv.Explain(t, tx, execute)
	_, err = tx.Exec(ctx, "DEALLOCATE poll")
	require.NoError(t, err)
	return buffers, plan
}

// A service starts on the first day, and keeps its connections: what is planned
// then, over empty tables, is what runs until they are analysed. Each access
// by the wrong index would read all of it.
func TestPlansOfTheFirstDay(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d, ctx := newFixture(t), context.Background()
	for _, table := range []string{"outbox", "outbox_cursor"} {
		d.Exec(t, `ALTER TABLE {schema}.`+table+` SET (autovacuum_enabled = false)`)
		d.Exec(t, `ANALYZE {schema}.`+table)
	}
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	statements := map[string]string{
		"poll": "(text, text, bigint, bigint, pg_snapshot, xid8, bigint, bool, bigint, bigint, bigint, timestamptz, bigint, bigint, bigint, bigint, bytea) AS " + d.cursors.SQLOpen,
		"page": "(bigint, text, bigint, timestamptz, text[], text[], bigint, bigint, bigint, pg_snapshot) AS " + d.cursors.SQLPage,
		"rows": "(bigint, text, bigint, timestamptz, bigint[], bigint[], bigint, int) AS " + d.cursors.SQLFetch,
		"bare": "(bigint, text, bigint, timestamptz, bigint, bool) AS " + d.cursors.SQLFetchBare,
	}
	first := map[string]string{
		"poll": `('default', 'nobody', 1, 1, '3:3:', '3', 1000, false, 1, 1, 1, now(), 1048576, 1, NULL, NULL, NULL)`,
		"page": `(1, 'default', 1, now(), '{3}', '{3}', 0, 1000, 1, '4:4:')`,
		"rows": `(1, 'default', 1, now(), '{1}', '{1}', 1000, 16777216)`,
		"bare": `(1, 'default', 1, now(), 1, true)`,
	}
	for name, sql := range statements {
		_, err := conn.Exec(ctx, "PREPARE "+name+" "+sql)
		require.NoError(t, err)
	}
	inTx := func(do func(pgx.Tx)) {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		_, err = tx.Exec(ctx, cursor.SQLSettings)
		require.NoError(t, err)
		do(tx)
	}
	inTx(func(tx pgx.Tx) {
		for name, args := range first {
			for range 8 { // PostgreSQL decides after five whether to keep the plan
				_, err := tx.Exec(ctx, "EXECUTE "+name+args)
				require.NoError(t, err)
			}
		}
	})

	// Then the tables grow.
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.Insert(t, retained/10)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT n, pg_current_snapshot(), n, $1, $2 FROM generate_series(1, 10000) AS n`, p.SystemID, l.Epoch)
	p, err = d.cursors.Load(ctx, l)
	require.NoError(t, err)
	const fresh = 100
	d.Insert(t, fresh)
	var now string
	require.NoError(t, conn.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&now))
	end := retained/10 + fresh
	var old string // the transaction with many rows
	require.NoError(t, conn.QueryRow(ctx, pg.InSchema(`SELECT xid::text FROM {schema}.outbox WHERE id = 1`, d.Schema)).Scan(&old))
	proof := fmt.Sprintf("%d, 'default', %d, '%s'", p.CursorID, p.Epoch, p.Server.Format(time.RFC3339Nano))
	poll := func(bytes int) string {
		return fmt.Sprintf(`('default', '%s', %d, %d, '%s', '%s', 1000, false, %d, %d, %d, '%s', %d, %d, NULL, NULL, NULL)`,
			l.Holder, l.Epoch, p.CursorID, p.Base, tables.SnapshotMax(p.Base), p.Last, p.Highest, p.SystemID, p.Server.Format(time.RFC3339Nano), bytes, p.Epoch)
	}
	for name, args := range map[string]string{
		"poll": poll(1048576), // finds each row for its size, and then reads it
		"over": poll(1),
		"page": fmt.Sprintf(`(%s, '{%s}', '{%s}', 0, %d, 0, '%s')`, proof, tables.SnapshotMax(p.Base), tables.SnapshotMax(now), 10*fresh, now),
		"deep": fmt.Sprintf(`(%s, '{%s}', '{%s}', %d, %d, 0, '%s')`, proof, old, old, retained/20, fresh, now),
		"rows": fmt.Sprintf(`(%s, '{%d}', '{%d}', 16777216, 16777216)`, proof, end-fresh+1, end),
		"bare": fmt.Sprintf(`(%s, %d, true)`, proof, end),
	} {
		least, plan := math.MaxInt, ""
		for range 2 { // the first one may have to read catalogs, too
			inTx(func(tx pgx.Tx) {
				buffers, how := testenv.Explain(t, tx, "EXECUTE "+strings.NewReplacer("deep", "page", "over", "poll").Replace(name)+args)
				t.Logf("%s: %d buffers", name, buffers)
				least, plan = min(least, buffers), how
			})
		}
		most := maxPollBuffers + 4*fresh
		if name == "poll" {
			most += 4 * fresh
		}
		require.LessOrEqual(t, least, most, "%s", plan)
	}
}
