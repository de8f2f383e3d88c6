package cursor_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The statement that moves the cursor past failures finds the row of each event by the unique index, although it was
// planned while outbox_failed was empty: a bad topic fills that within seconds.
func TestMovePastFailuresOverManyRows(t *testing.T) {
	t.Parallel()
	const failures, rows = 100, 10_000
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	d.Exec(t, `ALTER TABLE {schema}.outbox_failed SET (autovacuum_enabled = off)`)
	d.Insert(t, failures)
	tx, err := d.DB.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, pg.PlannerSettings, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "PREPARE moved AS "+d.cursors.SQLMoveFailed, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	statement := fmt.Sprintf(`EXECUTE moved('default', '%s', %d, %d, '%s', '%s', %d, %d, %d, '%s', %d, NULL, NULL, NULL,
		'{%s}', array_fill('k'::text, ARRAY[%[12]d]), array_fill('waiting'::text, ARRAY[%[12]d]),
		array_fill('c'::text, ARRAY[%[12]d]), array_fill('e'::text, ARRAY[%[12]d]), array_fill('1 s'::interval, ARRAY[%[12]d]),
		array_fill(true, ARRAY[%[12]d]), array_fill(false, ARRAY[%[12]d]), array_fill('t/0'::text, ARRAY[%[12]d]))`,
		l.Holder, l.Epoch, p.CursorID, p.Base, p.Base, p.Last, p.Highest, p.SystemID, p.Server.Format(time.RFC3339Nano), p.Epoch,
		strings.Trim(strings.ReplaceAll(fmt.Sprint(d.IDs(t, "outbox")), " ", ","), "[]"), failures)
	sp, err := tx.Begin(ctx)
	require.NoError(t, err)
	testenv.Explain(t, sp, statement) // planned while the table is empty
	require.NoError(t, sp.Rollback(ctx))
	d.InsertParked(t, rows, rows)
	_, plan := testenv.Explain(t, tx, statement)
	require.Contains(t, plan, "uk_outbox_failed")
	require.Less(t, testenv.Busiest(t, plan), 100*failures, "%s", plan)
}

// Whether an event is parked is known without reading all those that wait: where failed events hold back no others,
// none is parked, and the relay asks in every round.
func TestAnyParkedOverManyRows(t *testing.T) {
	t.Parallel()
	const rows = 10_000
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	d.Exec(t, `ALTER TABLE {schema}.outbox_failed SET (autovacuum_enabled = off)`)
	tx, err := d.DB.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	for _, sql := range []string{pg.PlannerSettings, "PREPARE any_parked AS " + failed.SQLAnyParked} {
		_, err = tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
	testenv.Explain(t, tx, "EXECUTE any_parked('default')") // planned while the table is empty
	d.InsertParked(t, rows, rows)
	_, plan := testenv.Explain(t, tx, "EXECUTE any_parked('default')")
	require.Less(t, testenv.Busiest(t, plan), 20, "%s", plan)
}
