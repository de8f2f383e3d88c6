package cursor_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Beside an old snapshot PostgreSQL keeps the rows of outbox_failed that were sent, in the table and in its indexes. A
// retrier that looked from the first one each time would take longer and longer for what is left.
func TestOldSnapshotDelaysNoRetries(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	const parked, sent, more = 40_000, 30_000, 500
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.Exec(t, `ALTER TABLE {schema}.outbox_failed SET (autovacuum_enabled = false)`)
	d.InsertParked(t, parked, parked)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET place = 'b-events/1', next_retry_at = now() + outbox_id * interval '1 ms'`)
	d.Exec(t, `VACUUM ANALYZE {schema}.outbox_failed`)
	old, err := d.DB.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { require.NoError(t, old.Rollback(ctx)) }()
	_, err = old.Exec(ctx, `SELECT pg_current_snapshot()`)
	require.NoError(t, err)

	d.Exec(t, `DELETE FROM {schema}.outbox_failed WHERE outbox_id <= $1`, sent)
	found, err := failed.Due(ctx, "b-events/1", true, pgtype.Timestamptz{}, nil)
	require.NoError(t, err)
	require.Len(t, found, more)
	require.EqualValues(t, sent+1, found[0].Row)
	last := found[more-1].Due
	d.Exec(t, `DELETE FROM {schema}.outbox_failed WHERE outbox_id <= $1`, sent+more)
	from := func(due string) testenv.Statement {
		return testenv.Statement{Name: "due from " + due, Types: "(text, text, bool, int, text[], timestamptz)", SQL: failed.SQLDue,
			Args: fmt.Sprintf(`('default', 'b-events/1', true, 10, '{}', '%s')`, due)}
	}
	first := d.Buffers(t, pg.PlannerSettings, from("-infinity"))
	next := d.Buffers(t, pg.PlannerSettings, from(last.Time.Format(time.RFC3339Nano)))
	t.Logf("due: %d buffers from the first one, %d from the last one", first, next)
	require.Less(t, next, first/5)

	// All are of one key: what a key still has is looked for from its end.
	d.Exec(t, `UPDATE {schema}.outbox_failed SET parking_key = 'b-events/key-1', status = 'parked', place = ''`)
	d.Exec(t, `DELETE FROM {schema}.outbox_failed WHERE outbox_id < $1`, parked-10)
	save := d.Buffers(t, pg.PlannerSettings, testenv.Statement{
		Name: "save", Types: "(text, text, bigint, bigint[], text[], text[], text[], int[], interval[], bool, bool, text[], int[], bigint[], timestamptz[], bigint[], uuid[])", SQL: failed.SQLSave,
		Args: fmt.Sprintf(`('default', '%s', %d, '{%d}', '{resolved}', '{x}', '{x}', '{1}', '{1 s}', false, false, '{}', '{0}', '{0}', '{now}', '{%[3]d}', '{%[4]s}')`,
			l.Holder, l.Epoch, parked-10, testenv.ParkedID(parked-10))})
	t.Logf("save: %d buffers", save)
	require.Less(t, save, 100)
}
