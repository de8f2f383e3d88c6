package testenv

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// Tables are the tables of outbox in a schema of a test, with helpers that use plain SQL. Statements name a
// table as {schema}.outbox. The fixture of a package embeds it.
type Tables struct {
	DB     *pgxpool.Pool
	Schema string
}

// NewTables returns the tables of a schema that [Migrated] returns.
func NewTables(t testing.TB) *Tables {
	t.Helper()
	db, schema := Migrated(t)
	return &Tables{DB: db, Schema: schema}
}

// Exec runs a statement.
func (d *Tables) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := d.DB.Exec(context.Background(), pg.InSchema(sql, d.Schema), args...)
	require.NoError(t, err)
}

// ExecAll runs several statements.
func (d *Tables) ExecAll(t testing.TB, sql string) {
	t.Helper()
	_, err := d.DB.Exec(context.Background(), pg.InSchema(sql, d.Schema), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

// Update runs a statement that changes rows of outbox, as [UpdateEvents] does.
func (d *Tables) Update(t testing.TB, sql string, args ...any) {
	t.Helper()
	UpdateEvents(t, d.DB, pg.InSchema(sql, d.Schema), args...)
}

// Count returns the number of rows of a table. A condition may follow its name.
func (d *Tables) Count(t testing.TB, table string) (n int) {
	t.Helper()
	require.NoError(t, d.DB.QueryRow(context.Background(), pg.InSchema("SELECT count(*) FROM {schema}."+table, d.Schema)).Scan(&n))
	return n
}

// IDs returns the ids of the rows of a table in their order.
func (d *Tables) IDs(t testing.TB, table string) []int64 {
	t.Helper()
	rows, err := d.DB.Query(context.Background(), pg.InSchema(`SELECT id FROM {schema}.`+table+` ORDER BY id`, d.Schema))
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	return ids
}

// sqlInsertEvents adds $1 events of one key.
const sqlInsertEvents = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now() FROM generate_series(1, $1)`

// Insert adds n events in one transaction.
func (d *Tables) Insert(t testing.TB, n int) {
	t.Helper()
	d.Exec(t, sqlInsertEvents, n)
}

// InsertIn adds n events in a transaction of the caller.
func (d *Tables) InsertIn(t testing.TB, tx pgx.Tx, n int) {
	t.Helper()
	_, err := tx.Exec(context.Background(), pg.InSchema(sqlInsertEvents, d.Schema), n)
	require.NoError(t, err)
}

// BeginInsert adds n events in a transaction that the caller commits. If the caller does not, the end of
// the test rolls it back.
func (d *Tables) BeginInsert(t testing.TB, n int) pgx.Tx {
	t.Helper()
	tx, err := d.DB.Begin(context.Background())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) }) // no effect after the commit
	d.InsertIn(t, tx, n)
	return tx
}

// sqlInsertParked adds $1 events to outbox_failed; $2 is the number of keys.
const sqlInsertParked = `
INSERT INTO {schema}.outbox_failed
       (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
        occurred_at, created_at, status)
SELECT 'default', n, 'b-events/key-' || n % $2::bigint, pg_catalog.lpad(n::text, 32, '0')::uuid, 'a.b.c.v1', 's', 'a', 'key-' || n % $2::bigint, '{}', 'application/json',
       now(), now(), CASE WHEN n <= $2::bigint THEN 'waiting' ELSE 'parked' END
  FROM generate_series(1, $1::bigint) AS n`

// InsertParked adds n events that wait for Kafka, with the ids 1 to n and those of ParkedID. Their keys are
// b-events/key-0 and so on. The first event of a key is its head; the other events are parked behind it.
func (d *Tables) InsertParked(t testing.TB, n, keys int) {
	t.Helper()
	d.Exec(t, sqlInsertParked, n, keys)
}

// ParkedID is the event id of the nth event of InsertParked.
func ParkedID(n int64) string { return fmt.Sprintf("00000000-0000-0000-0000-%012d", n) }

// Unprintable is a JSON text that PostgreSQL stores in a few kilobytes but cannot print: the printed form
// would exceed a gigabyte.
var Unprintable = "[" + strings.Repeat("1e131000,", 9000) + "1]"

// planNode is a node of a plan in JSON.
type planNode struct {
	Hit   int `json:"Shared Hit Blocks"`
	Read  int `json:"Shared Read Blocks"`
	Plans []planNode
}

// Explain runs a statement. It returns the number of buffers that the statement touched, and its plan.
func Explain(t testing.TB, tx pgx.Tx, statement string) (buffers int, plan string) {
	t.Helper()
	require.NoError(t, tx.QueryRow(context.Background(), "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+statement, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
	top := topOf(t, plan)
	return top.Hit + top.Read, plan
}

// Busiest returns the number of buffers that the busiest node of a plan touched, together with the nodes
// below it. If a statement writes in a WITH clause, this is not the top node.
func Busiest(t testing.TB, plan string) int {
	t.Helper()
	var most func(planNode) int
	most = func(n planNode) int {
		all := n.Hit + n.Read
		for _, below := range n.Plans {
			all = max(all, most(below))
		}
		return all
	}
	return most(topOf(t, plan))
}

func topOf(t testing.TB, plan string) planNode {
	t.Helper()
	var explained []struct{ Plan planNode }
	require.NoError(t, json.Unmarshal([]byte(plan), &explained))
	return explained[0].Plan
}
