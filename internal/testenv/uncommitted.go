package testenv

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// Statement is a statement whose buffers a test counts: PREPARE name types AS sql, EXECUTE name args.
type Statement struct{ Name, Types, SQL, Args string }

const (
	// uncommittedRows are in outbox while their transaction is open.
	uncommittedRows = 200_000
	// maxUncommittedBuffers is what a statement may touch because of them: the indexes are a level higher. Other
	// tests have open transactions, too, and each costs an access to an index. To walk the rows takes thousands.
	maxUncommittedBuffers = 1000
)

// PassUncommitted checks that statements do not walk the rows of an open transaction. It counts the buffers that
// they touch beside an open transaction without rows, and beside one with very many. Settings precede each
// statement. The statements of a case are made for a snapshot, at which the events were sent: once for one that was
// taken before the transaction began, and once for a later one. They are also run while no later transaction has
// ended, so that no snapshot has the open one.
func (d *Tables) PassUncommitted(t *testing.T, settings string, at func(snapshot string) []Statement) {
	t.Helper()
	snapshot := func() (now string) {
		require.NoError(t, d.DB.QueryRow(context.Background(), `SELECT pg_current_snapshot()::text`).Scan(&now))
		return now
	}
	before := snapshot()
	touched := func(rows int) (buffers map[string]int, names []string) {
		open := d.BeginInsert(t, rows)
		_, err := open.Exec(context.Background(), `SELECT pg_current_xact_id()`) // also if it has no rows
		require.NoError(t, err)
		buffers = map[string]int{}
		count := func(when, snapshot string) {
			for _, s := range at(snapshot) {
				name := when + ", " + s.Name
				buffers[name], names = d.Buffers(t, settings, s), append(names, name)
			}
		}
		count("before the newest transaction", before)
		d.Exec(t, `SELECT pg_current_xact_id()`)
		count("before the transaction", before)
		count("beside the transaction", snapshot())
		require.NoError(t, open.Rollback(context.Background()))
		return buffers, names
	}
	none, _ := touched(0)
	many, names := touched(uncommittedRows)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Logf("%d buffers beside no row, %d beside %d rows", none[name], many[name], uncommittedRows)
			require.LessOrEqual(t, many[name], none[name]+maxUncommittedBuffers)
		})
	}
}

// Buffers returns how many buffers a statement touches, once its connection has read the catalogs. What the statement
// writes is rolled back.
func (d *Tables) Buffers(t *testing.T, settings string, s Statement) (n int) {
	t.Helper()
	ctx := context.Background()
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	exec := func(sql string) {
		_, err := conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err, "%s", s.Name)
	}
	exec(pg.InSchema(fmt.Sprintf("PREPARE counted %s AS %s", s.Types, s.SQL), d.Schema))
	for range 2 {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		exec(settings)
		_, plan := Explain(t, tx, "EXECUTE counted "+s.Args)
		n = Busiest(t, plan)
		require.NoError(t, tx.Rollback(ctx))
	}
	exec("DEALLOCATE counted")
	return n
}
