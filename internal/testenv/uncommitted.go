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
type Statement struct {
	Name, Types, SQL, Args string
	WalksDead              bool // the first one behind a rollback may walk the rows
}

const (
	// uncommittedRows are in outbox while their transaction is open.
	uncommittedRows = 200_000
	// maxUncommittedBuffers is what a statement may touch because of them: the indexes are a level higher. Other
	// tests have open transactions, too, and each costs an access to an index. To walk the rows takes thousands.
	maxUncommittedBuffers = 1000
)

// PassUncommitted checks that statements do not walk the rows of a transaction that is open or was rolled back. It
// counts the buffers that they touch beside or behind a transaction without rows, and one with very many. Settings
// precede each statement. The statements of a case are made for a snapshot, at which the events were sent: once for
// one that was taken before the transaction began, and once for a later one. They are also run while no later
// transaction has ended, so that no snapshot has the open one.
func (d *Tables) PassUncommitted(t *testing.T, settings string, at func(snapshot string) []Statement) {
	t.Helper()
	ctx := context.Background()
	snapshot := func() (now string) {
		require.NoError(t, d.DB.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&now))
		return now
	}
	begin := func(rows int) pgx.Tx {
		open := d.BeginInsert(t, rows)
		_, err := open.Exec(ctx, `SELECT pg_current_xact_id()`) // also if it has no rows
		require.NoError(t, err)
		return open
	}
	before := snapshot()
	touched := func(rows int) (buffers map[string]int, names []string) {
		buffers = map[string]int{}
		note := func(when string, s Statement, n int) {
			name := when + ", " + s.Name
			buffers[name], names = n, append(names, name)
		}
		count := func(when, snapshot string) (statements []Statement) {
			statements = at(snapshot)
			for _, s := range statements {
				note(when, s, d.Buffers(t, settings, s))
			}
			return statements
		}
		open := begin(rows)
		count("before the newest transaction", before)
		d.Exec(t, `SELECT pg_current_xact_id()`)
		count("before the transaction", before)
		statements := count("beside the transaction", snapshot())
		require.NoError(t, open.Rollback(ctx))
		for i, s := range statements { // the first to walk dead rows marks them for those that follow
			if s.WalksDead {
				continue
			}
			open := begin(rows)
			d.Exec(t, `SELECT pg_current_xact_id()`)
			beside := snapshot()
			d.counting(t, settings, func(count func(Statement) int) {
				count(at(beside)[i])
				require.NoError(t, open.Rollback(ctx))
				s := at(beside)[i]
				note("behind the rollback", s, count(s))
			})
		}
		return buffers, names
	}
	none, _ := touched(0)
	many, names := touched(uncommittedRows)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Logf("%d buffers without rows, %d with %d rows", none[name], many[name], uncommittedRows)
			require.LessOrEqual(t, many[name], none[name]+maxUncommittedBuffers)
		})
	}
}

// Buffers returns how many buffers a statement touches, once its connection has read the catalogs. What the statement
// writes is rolled back.
func (d *Tables) Buffers(t *testing.T, settings string, s Statement) (n int) {
	t.Helper()
	d.counting(t, settings, func(count func(Statement) int) {
		count(s)
		n = count(s)
	})
	return n
}

// counting calls do with a function that counts the buffers of a statement. All are run in one connection.
func (d *Tables) counting(t *testing.T, settings string, do func(count func(Statement) int)) {
	t.Helper()
	ctx := context.Background()
	conn, err := d.DB.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	do(func(s Statement) int {
		exec := func(sql string) {
			_, err := conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err, "%s", s.Name)
		}
		exec(pg.InSchema(fmt.Sprintf("PREPARE counted %s AS %s", s.Types, s.SQL), d.Schema))
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		exec(settings)
		_, plan := Explain(t, tx, "EXECUTE counted "+s.Args)
		require.NoError(t, tx.Rollback(ctx))
		exec("DEALLOCATE counted")
		return Busiest(t, plan)
	})
}
