package testenv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/wait"
)

// Migrated returns a pool and the name of a migrated schema. The tables are empty, and no other test uses
// them. If TestMain calls [Main], an earlier test of the process may have used the schema. Making and
// dropping a schema costs 140 ms of CPU, deleting its rows 2 ms.
//
// A schema is not used again after any of these:
//
//   - The test has failed.
//   - The test has changed an object or a grant in the schema. Added tables do not count: they are dropped.
//   - The test has left large tables.
//   - The test has left a session that could still write to the schema.
//
// A test that reads the statistics of tables, or that tests a migration, uses [Schema] instead.
func Migrated(t testing.TB) (*pgxpool.Pool, string) {
	t.Helper()
	db := Pool(t, nil)
	m := takeMigrated(t, db)
	if m == nil {
		var err error
		m, err = newMigrated(context.Background(), db)
		require.NoError(t, err)
	}
	m.since = time.Now()
	t.Cleanup(func() {
		if m.reusable && !t.Failed() {
			m.users = poolsOf(t)
			free.put(m)
			return
		}
		require.NoError(t, dropSchema(context.Background(), db, m.name))
	})
	return db, m.name
}

// migrated is a schema with the tables of outbox, and its state right after the migration.
type migrated struct {
	name     string
	reusable bool

	tables    []string          // qualified names of the tables that a migration leaves empty
	seeds     map[string]string // the rows of the other tables, as JSON, by qualified name
	sequences string            // a statement that resets all sequences
	objects   string            // the sum of sqlObjects

	since time.Time // when its last test took it
	users []*pool   // the pools of that test
}

// newMigrated makes a schema.
func newMigrated(ctx context.Context, db *pgxpool.Pool) (*migrated, error) {
	m := &migrated{name: schemaName(), reusable: reuses()}
	if _, err := db.Exec(ctx, "CREATE SCHEMA "+quoted(m.name)); err != nil {
		return nil, err
	}
	run := &migrator.Migrator{DB: db, Schema: m.name, LockTimeout: time.Second, Logger: slog.Default()}
	if err := run.Run(ctx); err != nil || !m.reusable {
		return m, err
	}
	return m, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return m.remember(ctx, tx) })
}

// sqlTables lists the tables of a schema, without partitions: deleting the rows of a partitioned table
// empties its partitions.
const sqlTables = `
SELECT oid::regclass::text FROM pg_class
 WHERE relnamespace = quote_ident($1)::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
 ORDER BY 1`

// sqlRows returns the rows of a table as JSON.
const sqlRows = `SELECT coalesce(jsonb_agg(to_jsonb(r) ORDER BY to_jsonb(r)), '[]')::text FROM %s AS r`

// sqlSequences returns a statement that sets the sequences of a schema to their present values.
const sqlSequences = `
SELECT coalesce('SELECT ' || string_agg(format('setval(%L, %s, %s)', format('%I.%I', schemaname, sequencename),
       coalesce(last_value, start_value), (last_value IS NOT NULL)::text), ', ' ORDER BY sequencename), 'SELECT 1')
  FROM pg_sequences WHERE schemaname = $1`

// sqlObjects returns a checksum of the objects in a schema, and the number of pages of the largest table or
// index. The checksum differs after each change of an object or of a grant, and after a table was analyzed:
// xmin is the transaction that has written a row of the catalog.
const sqlObjects = `
WITH own AS (SELECT oid, xmin, reltuples FROM pg_class WHERE relnamespace = quote_ident($1)::regnamespace),
     space AS (SELECT oid, xmin FROM pg_namespace WHERE nspname = $1),
     object (line) AS (
              SELECT concat_ws(' ', 'schema', oid, xmin) FROM space
    UNION ALL SELECT concat_ws(' ', 'relation', oid, xmin, reltuples) FROM own
    UNION ALL SELECT concat_ws(' ', 'column', attrelid, attnum, a.xmin) FROM pg_attribute AS a JOIN own ON own.oid = attrelid
    UNION ALL SELECT concat_ws(' ', 'default', d.oid, d.xmin) FROM pg_attrdef AS d JOIN own ON own.oid = adrelid
    UNION ALL SELECT concat_ws(' ', 'sequence', seqrelid, s.xmin) FROM pg_sequence AS s JOIN own ON own.oid = seqrelid
    UNION ALL SELECT concat_ws(' ', 'trigger', g.oid, g.xmin) FROM pg_trigger AS g JOIN own ON own.oid = tgrelid
    UNION ALL SELECT concat_ws(' ', 'rule', r.oid, r.xmin) FROM pg_rewrite AS r JOIN own ON own.oid = ev_class
    UNION ALL SELECT concat_ws(' ', 'policy', p.oid, p.xmin) FROM pg_policy AS p JOIN own ON own.oid = polrelid
    UNION ALL SELECT concat_ws(' ', 'published', r.oid, r.xmin) FROM pg_publication_rel AS r JOIN own ON own.oid = prrelid
    UNION ALL SELECT concat_ws(' ', 'constraint', c.oid, c.xmin) FROM pg_constraint AS c JOIN space ON space.oid = connamespace
    UNION ALL SELECT concat_ws(' ', 'function', f.oid, f.xmin) FROM pg_proc AS f JOIN space ON space.oid = pronamespace
    UNION ALL SELECT concat_ws(' ', 'operator', o.oid, o.xmin) FROM pg_operator AS o JOIN space ON space.oid = oprnamespace
    UNION ALL SELECT concat_ws(' ', 'type', y.oid, y.xmin) FROM pg_type AS y JOIN space ON space.oid = typnamespace
    UNION ALL SELECT concat_ws(' ', 'grants', d.oid, d.xmin) FROM pg_default_acl AS d JOIN space ON space.oid = defaclnamespace)
SELECT (SELECT md5(string_agg(line, ',' ORDER BY line)) FROM object),
       (SELECT coalesce(max(pg_relation_size(oid)), 0) / current_setting('block_size')::int FROM own)`

// maxPages is the largest size of a table or an index in a schema that is used again. Deleted rows stay in
// the files, and would make the next test slow.
const maxPages = 64

// remember stores the state of the schema right after its migration.
func (m *migrated) remember(ctx context.Context, tx pgx.Tx) error {
	tables, err := m.listTables(ctx, tx)
	if err != nil {
		return err
	}
	m.tables, m.seeds = nil, map[string]string{}
	for _, table := range tables {
		var text string
		if err := tx.QueryRow(ctx, fmt.Sprintf(sqlRows, table)).Scan(&text); err != nil {
			return err
		}
		if text == "[]" {
			m.tables = append(m.tables, table)
		} else {
			m.seeds[table] = text
		}
	}
	if err := tx.QueryRow(ctx, sqlSequences, m.name).Scan(&m.sequences); err != nil {
		return err
	}
	var pages int
	return tx.QueryRow(ctx, sqlObjects, m.name).Scan(&m.objects, &pages)
}

func (m *migrated) listTables(ctx context.Context, tx pgx.Tx) ([]string, error) {
	rows, err := tx.Query(ctx, sqlTables, m.name)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// errChanged means that a test has changed the schema so much that a new schema is cheaper.
var errChanged = errors.New("the schema has changed")

// reset restores the state right after the migration. It does not wait for locks, because a transaction
// that holds a lock may write later.
func (m *migrated) reset(ctx context.Context, tx pgx.Tx) error {
	all := slices.Clone(m.tables)
	for table := range m.seeds {
		all = append(all, table)
	}
	slices.Sort(all)
	// With this role, triggers do not run and foreign keys are not checked.
	_, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica; LOCK TABLE `+strings.Join(all, ", ")+
		` IN ACCESS EXCLUSIVE MODE NOWAIT`, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return err
	}
	if err := m.dropOthers(ctx, tx, all); err != nil {
		return err
	}
	var objects string
	var pages int
	if err := tx.QueryRow(ctx, sqlObjects, m.name).Scan(&objects, &pages); err != nil {
		return err
	}
	if objects != m.objects || pages > maxPages {
		return errChanged
	}
	for table, want := range m.seeds {
		var text string
		if err := tx.QueryRow(ctx, fmt.Sprintf(sqlRows, table)).Scan(&text); err != nil {
			return err
		}
		if text != want {
			return errChanged
		}
	}
	var script strings.Builder
	for _, table := range m.tables {
		script.WriteString("DELETE FROM " + table + ";")
	}
	_, err = tx.Exec(ctx, script.String()+m.sequences, pgx.QueryExecModeSimpleProtocol)
	return err
}

// dropOthers drops the tables that a test has added, for example in fixtures.
func (m *migrated) dropOthers(ctx context.Context, tx pgx.Tx, ours []string) error {
	found, err := m.listTables(ctx, tx)
	if err != nil {
		return err
	}
	for _, table := range found {
		if slices.Contains(ours, table) {
			continue
		}
		if _, err := tx.Exec(ctx, "DROP TABLE IF EXISTS "+table+" CASCADE"); err != nil {
			return err
		}
	}
	return nil
}

// sqlSessions reports whether a session exists that could still write to the schema. It may be one of the
// sessions $1. It may also be a session outside of our pools, whose sessions are $2, that began after the
// test took the schema at $3.
const sqlSessions = `
SELECT EXISTS (SELECT FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend'
   AND (pid = ANY($1) OR NOT pid = ANY($2) AND backend_start > $3))`

// sessionPatience is how long isLeft waits for the sessions of the last test to end.
var sessionPatience = 100 * time.Millisecond

// isLeft reports whether no session exists that could still write to the schema. PostgreSQL may still run a
// statement that was cancelled or whose client is gone. So isLeft waits until the session of the statement
// has ended, for at most sessionPatience.
func (m *migrated) isLeft(ctx context.Context, db *pgxpool.Pool) (bool, error) {
	for start := time.Now(); ; wait.Sleep(ctx, 5*time.Millisecond) {
		var found bool
		// PostgreSQL runs on this machine, so both use the same clock.
		err := db.QueryRow(ctx, sqlSessions, pids(m.users), pids(poolsOf(nil)), m.since).Scan(&found)
		if err != nil || !found {
			return err == nil, err
		}
		if time.Since(start) > sessionPatience {
			return false, nil
		}
	}
}

// takeMigrated returns a schema that no test uses, after a reset. It returns nil if there is none.
func takeMigrated(t testing.TB, db *pgxpool.Pool) *migrated {
	t.Helper()
	ctx := context.Background()
	const tries = 2 // there are about as many schemas as tests that run at the same time
	for range tries {
		m := free.take()
		if m == nil {
			return nil
		}
		left, err := m.isLeft(ctx, db)
		require.NoError(t, err)
		if !left {
			free.put(m)
			continue
		}
		err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return m.reset(ctx, tx) })
		if err == nil {
			return m
		}
		require.NoError(t, dropSchema(ctx, db, m.name))
	}
	return nil
}

// free has the schemas that no test uses. The schema that has been free for the longest time comes first.
var free freeSchemas

type freeSchemas struct {
	mu      sync.Mutex
	on      bool // Main drops them
	schemas []*migrated
}

func (f *freeSchemas) put(m *migrated) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.schemas = append(f.schemas, m)
}

func (f *freeSchemas) take() *migrated {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.schemas) == 0 {
		return nil
	}
	m := f.schemas[0]
	f.schemas = f.schemas[1:]
	return m
}

// reuses reports whether schemas are used again. Behind PgBouncer they are not, because it keeps its
// sessions after a test.
func reuses() bool {
	free.mu.Lock()
	defer free.mu.Unlock()
	return free.on && !ThroughPgBouncer()
}

// Main wraps the tests of a package, as an argument of goleak.VerifyTestMain. Schemas are then used again,
// and dropped when all tests have ended. Without Main each test has its own schema.
func Main(m interface{ Run() int }) interface{ Run() int } { return suite{m} }

type suite struct{ tests interface{ Run() int } }

// Run implements the interface of [testing.M].
func (s suite) Run() int {
	free.mu.Lock()
	free.on = true
	free.mu.Unlock()
	code := s.tests.Run()
	if err := dropFree(context.Background()); err != nil {
		fmt.Fprintf(os.Stderr, "drop the schemas of tests: %v\n", err)
		return max(code, 1)
	}
	return code
}

// dropFree drops the schemas that no test uses.
func dropFree(ctx context.Context) error {
	first := free.take()
	if first == nil {
		return nil
	}
	conn, err := pgx.Connect(ctx, lookUp(PostgresVar))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, `SET lock_timeout = '30s'`); err != nil {
		return err
	}
	for m := first; m != nil; m = free.take() {
		if _, err := conn.Exec(ctx, dropStatement(m.name)); err != nil {
			return err
		}
	}
	return nil
}

func dropStatement(schema string) string { return "DROP SCHEMA " + quoted(schema) + " CASCADE" }

func dropSchema(ctx context.Context, db *pgxpool.Pool, schema string) error {
	_, err := db.Exec(ctx, dropStatement(schema))
	return err
}

// pool has the sessions that a pool of a test has opened. They include sessions with a copy of its
// configuration.
type pool struct {
	test string

	mu   sync.Mutex
	pids []uint32
}

// pools has the pools of all tests.
var pools struct {
	mu  sync.Mutex
	all []*pool
}

// watch records the sessions of a configuration until the process ends.
func watch(t testing.TB, cfg *pgxpool.Config) {
	p := &pool{test: t.Name()}
	pools.mu.Lock()
	pools.all = append(pools.all, p)
	pools.mu.Unlock()
	after := cfg.ConnConfig.AfterConnect
	cfg.ConnConfig.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		p.mu.Lock()
		p.pids = append(p.pids, conn.PID())
		p.mu.Unlock()
		if after != nil {
			return after(ctx, conn)
		}
		return nil
	}
}

// poolsOf returns the pools of the top-level test of t and of all its subtests. If t is nil, it returns all
// pools.
func poolsOf(t testing.TB) (found []*pool) {
	pools.mu.Lock()
	defer pools.mu.Unlock()
	if t == nil {
		return slices.Clone(pools.all)
	}
	whole, _, _ := strings.Cut(t.Name(), "/")
	for _, p := range pools.all {
		if p.test == whole || strings.HasPrefix(p.test, whole+"/") {
			found = append(found, p)
		}
	}
	return found
}

// pids returns the process ids of all sessions of pools.
func pids(of []*pool) []int32 {
	all := []int32{}
	for _, p := range of {
		p.mu.Lock()
		for _, pid := range p.pids {
			all = append(all, int32(pid))
		}
		p.mu.Unlock()
	}
	return all
}
