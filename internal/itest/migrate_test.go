package itest

import (
	"context"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
)

// schemaFixture is a schema with the tables of outbox.
type schemaFixture struct {
	db     *pgxpool.Pool
	schema string
}

// migrated returns a schema that Migrate has brought up to date.
func migrated(t *testing.T) *schemaFixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	return &schemaFixture{db: db, schema: schema}
}

func (f *schemaFixture) sql(sql string) string {
	return strings.ReplaceAll(sql, "{s}", pgx.Identifier{f.schema}.Sanitize())
}

func (f *schemaFixture) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := f.db.Exec(background, f.sql(sql))
	require.NoError(t, err, sql)
}

// script runs statements whose names are unqualified, as a transaction.
func (f *schemaFixture) script(t *testing.T, sql string) {
	t.Helper()
	require.NoError(t, f.tryScript(sql))
}

func (f *schemaFixture) tryScript(sql string) error {
	return pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		_, err := tx.Conn().PgConn().Exec(background, f.sql("SET LOCAL search_path TO {s};")+sql).ReadAll()
		return err
	})
}

func (f *schemaFixture) count(t *testing.T, from string) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT count(*) FROM {s}.`+from)).Scan(&n))
	return n
}

// insertEvents records $1 events without a Recorder.
const insertEvents = `
INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT gen_random_uuid(), 'acme.order.created.v1', 'test', 'Order', n::text, '{"n": 1}', 'application/json', now()
  FROM generate_series(1, $1) AS n`

// insertFailures has each third event wait in outbox_failed.
const insertFailures = `
INSERT INTO {s}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
                               occurred_at, created_at, status)
SELECT id, 'order-events/' || id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, 'waiting'
  FROM {s}.outbox WHERE id % 3 = 0`

// unborn returns the name of a schema that does not exist and whose name needs
// quoting. What is made of it is dropped when the test ends.
func unborn(t *testing.T) (*pgxpool.Pool, string) {
	t.Helper()
	db := testenv.Pool(t, nil)
	schema := fmt.Sprintf(`Not "there" yet; it's %.8s`, uuid.NewString())
	t.Cleanup(func() {
		_, err := db.Exec(background, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
		require.NoError(t, err)
	})
	return db, schema
}

// describe returns the columns, indexes, constraints and comments of a schema's
// tables, without the one in which Migrate remembers what it has done.
func describe(t *testing.T, db *pgxpool.Pool, schema string) []string {
	t.Helper()
	rows, err := db.Query(background, `
		SELECT concat_ws(' ', 'column', table_name, ordinal_position, column_name, udt_name, character_maximum_length, is_nullable, column_default)
		  FROM information_schema.columns WHERE table_schema = $1 AND table_name <> 'outbox_migration'
		UNION ALL
		SELECT concat_ws(' ', 'index', indexdef) FROM pg_indexes WHERE schemaname = $1 AND tablename <> 'outbox_migration'
		UNION ALL
		SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, pg_get_constraintdef(oid))
		  FROM pg_constraint WHERE connamespace = quote_ident($1)::regnamespace AND conrelid::regclass::text !~ 'outbox_migration'
		UNION ALL
		SELECT concat_ws(' ', 'comment', c.relname, d.objsubid, d.description)
		  FROM pg_description d JOIN pg_class c ON c.oid = d.objoid AND d.classoid = 'pg_class'::regclass
		 WHERE c.relnamespace = quote_ident($1)::regnamespace AND c.relname <> 'outbox_migration'
		ORDER BY 1`, schema)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	quoted := pgx.Identifier{schema}.Sanitize()
	names := strings.NewReplacer(quoted, "{schema}", strings.ReplaceAll(quoted, "'", "''"), "{schema}") // the latter within texts
	for i, s := range all {
		all[i] = names.Replace(s)
	}
	return all
}

// applied returns the migrations that Migrate remembers, as text.
func applied(t *testing.T, db *pgxpool.Pool, schema string) []string {
	t.Helper()
	rows, err := db.Query(background, `SELECT version || ' ' || name || ' ' || applied_at::text FROM `+
		pgx.Identifier{schema, "outbox_migration"}.Sanitize()+` ORDER BY version`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// files returns the names of the migrations.
func files(t *testing.T) []string {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	require.NotEmpty(t, names)
	return names
}

// migratedByHand returns a schema to which a tool of the project's own has
// applied the files.
func migratedByHand(t *testing.T, apply func(conn *pgx.Conn, sql string)) (*pgxpool.Pool, string) {
	t.Helper()
	testenv.Direct(t) // a setting of a session
	db, schema := testenv.Schema(t)
	conn, err := db.Acquire(background)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(background, "SET search_path TO "+pgx.Identifier{schema}.Sanitize())
	require.NoError(t, err)
	for _, name := range files(t) {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		apply(conn.Conn(), string(sql))
	}
	_, err = conn.Exec(background, "RESET search_path")
	require.NoError(t, err)
	return db, schema
}

// execWhole runs a file in one go, as tern does.
func execWhole(t *testing.T) func(*pgx.Conn, string) {
	return func(conn *pgx.Conn, sql string) {
		_, err := conn.PgConn().Exec(background, sql).ReadAll()
		require.NoError(t, err)
	}
}

// execEach runs the statements of a file one by one, cut where goose cuts them:
// at the end of each line that ends in a semicolon, but for those between its marks.
func execEach(t *testing.T) func(*pgx.Conn, string) {
	return func(conn *pgx.Conn, sql string) {
		first, rest, _ := strings.Cut(sql, "\n")
		require.Equal(t, "-- +goose Up", first)
		var statement strings.Builder
		end := func() {
			_, err := conn.Exec(background, statement.String())
			require.NoError(t, err, statement.String())
			statement.Reset()
		}
		marked := false
		for line := range strings.Lines(rest) {
			switch {
			case strings.HasPrefix(line, "-- +goose StatementBegin"):
				marked = true
			case strings.HasPrefix(line, "-- +goose StatementEnd"):
				marked = false
				end()
			case strings.HasPrefix(line, "--"):
				require.NotContains(t, line, "+goose", "there is no way back")
			default:
				statement.WriteString(line)
				if strings.HasSuffix(strings.TrimSpace(line), ";") && !marked {
					end()
				}
			}
		}
		require.Empty(t, strings.TrimSpace(statement.String()), "the file ends with a statement")
	}
}

func TestMigrateIsIdempotent(t *testing.T) {
	t.Parallel()
	db, schema := unborn(t)
	cfg := outbox.MigrateConfig{Schema: schema}
	require.NoError(t, outbox.Migrate(background, db, cfg))
	tables, done := describe(t, db, schema), applied(t, db, schema)
	require.NotEmpty(t, tables)
	require.Len(t, done, len(files(t)))
	for i, name := range files(t) {
		require.True(t, strings.HasPrefix(done[i], fmt.Sprintf("%d %s ", i+1, name)), done[i])
	}
	for range 2 {
		require.NoError(t, outbox.Migrate(background, db, cfg))
		require.Equal(t, tables, describe(t, db, schema))
		require.Equal(t, done, applied(t, db, schema))
	}
}

// Ten processes start at once and there is nothing yet, not even the schema;
// also where every transaction of a pool is serializable unless it says otherwise.
func TestMigrateAtOnce(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			testenv.Direct(t) // a setting of sessions
			db, schema := unborn(t)
			var pools []*pgxpool.Pool
			for range 10 {
				pool := testenv.Pool(t, func(cfg *pgxpool.Config) {
					cfg.MaxConns = 1
					cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
				})
				require.NoError(t, pool.Ping(background))
				pools = append(pools, pool)
			}
			var all sync.WaitGroup
			errs := make([]error, len(pools))
			start := make(chan struct{})
			for i, pool := range pools {
				all.Go(func() {
					<-start
					errs[i] = outbox.Migrate(background, pool, outbox.MigrateConfig{Schema: schema})
				})
			}
			close(start)
			all.Wait()
			for _, err := range errs {
				require.NoError(t, err)
			}
			require.Len(t, applied(t, db, schema), len(files(t)))
		})
	}
}

// Two schemas of one database are two outboxes.
func TestMigrateTwoSchemas(t *testing.T) {
	t.Parallel()
	db, first := unborn(t)
	_, second := unborn(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: first}))
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: second}))
	require.Equal(t, describe(t, db, first), describe(t, db, second))
}

func TestMigrateExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			db, schema := unborn(t)
			pool := testenv.PoolIn(t, mode)
			for range 2 {
				require.NoError(t, outbox.Migrate(background, pool, outbox.MigrateConfig{Schema: schema}))
			}
			require.Len(t, applied(t, db, schema), len(files(t)))
		})
	}
}

// The connection goes back to the pool as it was: search_path and all.
func TestMigrateLeavesTheConnectionAlone(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a setting of sessions
	_, schema := unborn(t)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.MaxConns = 1
		cfg.ConnConfig.RuntimeParams["search_path"] = "pg_temp"
	})
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	var path string
	require.NoError(t, db.QueryRow(background, `SELECT current_setting('search_path')`).Scan(&path))
	require.Equal(t, "pg_temp", path)
	var locks int
	require.NoError(t, db.QueryRow(background, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`).Scan(&locks))
	require.Zero(t, locks)
}

// Both ways in which tools run a file lead to the tables that Migrate makes.
func TestMigrationsByHand(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	want := describe(t, db, schema)
	for name, apply := range map[string]func(*pgx.Conn, string){"whole": execWhole(t), "statement by statement": execEach(t)} {
		t.Run(name, func(t *testing.T) {
			db, schema := migratedByHand(t, apply)
			require.Equal(t, want, describe(t, db, schema))
			rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: schema})
			require.NoError(t, err)
			require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return rec.Record(background, tx, good) }))
		})
	}
}

// tern makes templates of the files, and takes a line of dashes for the place
// where the way back begins.
func TestMigrationFiles(t *testing.T) {
	t.Parallel()
	for i, name := range files(t) {
		require.True(t, strings.HasPrefix(name, fmt.Sprintf("%04d_", i+1)), name)
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		require.NotContains(t, string(sql), "{{")
		require.NotContains(t, string(sql), "---- ")
		require.NotContains(t, string(sql), "{schema}", "names are unqualified")
	}
}

// created finds what a file creates, with the kind and the name. What functions create when they are called is
// indented.
var created = regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?(?:UNIQUE )?(TABLE|INDEX|FUNCTION|PROCEDURE|VIEW|MATERIALIZED VIEW|TRIGGER|POLICY) (?:@schema@\.)?(\w+)`)

// The files say once what each object is: what is read there is what is in the database.
func TestMigrationsDefineNothingTwice(t *testing.T) {
	t.Parallel()
	where := map[string]string{}
	for _, name := range files(t) {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		for _, match := range created.FindAllStringSubmatch(string(sql), -1) {
			what := strings.ToLower(match[1] + " " + match[2])
			require.Empty(t, where[what], "%s defines %s again", name, what)
			where[what] = name
		}
	}
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	rows, err := db.Query(background, `SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = quote_ident($1)::regnamespace
		UNION ALL SELECT 'table ' || relname FROM pg_class WHERE relnamespace = quote_ident($1)::regnamespace AND relkind = 'r' AND relname <> 'outbox_migration'`, schema)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, what := range all {
		require.Contains(t, where, what)
	}
}

func TestMigrateDatabaseAhead(t *testing.T) {
	t.Parallel()
	db, schema := unborn(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	in := func(name string) string { return pgx.Identifier{schema, name}.Sanitize() }
	_, err := db.Exec(background, `INSERT INTO `+in("outbox_migration")+` (version, name) VALUES (9999, '9999_future.sql');
		DROP TABLE `+in("event_handled")+`; ALTER TABLE `+in("outbox")+` ADD future int`)
	require.NoError(t, err)
	tables, done := describe(t, db, schema), applied(t, db, schema)
	err = outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema})
	require.ErrorIs(t, err, outbox.ErrDatabaseAhead)
	require.ErrorContains(t, err, "9999")
	require.Equal(t, tables, describe(t, db, schema))
	require.Equal(t, done, applied(t, db, schema))
}

// A file that fails half-way leaves nothing behind, nor does what comes before the first.
func TestMigrateFileIsOneTransaction(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	_, err := db.Exec(background, `CREATE TABLE `+pgx.Identifier{schema, "outbox_lease"}.Sanitize()+` (other int)`)
	require.NoError(t, err)
	tables := describe(t, db, schema)
	require.ErrorContains(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}), "0001_events_and_cursors.sql")
	require.Equal(t, tables, describe(t, db, schema))
	var remembered bool
	require.NoError(t, db.QueryRow(background, `SELECT to_regclass($1) IS NOT NULL`, pgx.Identifier{schema, "outbox_migration"}.Sanitize()).Scan(&remembered))
	require.False(t, remembered)
}

// A service's role that may use the tables and create nothing can call Migrate at every start, as
// long as another role has migrated.
func TestMigrateWithoutPrivileges(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a role of sessions
	db, schema := testenv.Schema(t)
	role := "outbox_user_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	quoted := pgx.Identifier{schema}.Sanitize()
	exec := func(sql string) {
		_, err := db.Exec(background, sql)
		require.NoError(t, err, sql)
	}
	exec(`CREATE ROLE ` + role)
	t.Cleanup(func() { exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	exec(`GRANT USAGE ON SCHEMA ` + quoted + ` TO ` + role)
	user := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["role"] = role })

	require.Error(t, outbox.Migrate(background, user, outbox.MigrateConfig{Schema: schema}), "there is something to do")
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	exec(`GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA ` + quoted + ` TO ` + role + `;
		GRANT USAGE ON ALL SEQUENCES IN SCHEMA ` + quoted + ` TO ` + role)
	_, err := user.Exec(background, `CREATE TABLE `+quoted+`.mine ()`)
	require.ErrorContains(t, err, "permission denied")
	require.NoError(t, outbox.Migrate(background, user, outbox.MigrateConfig{Schema: schema}))

	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(background, user, func(tx pgx.Tx) error { return rec.Record(background, tx, good) }))
}

// A role that may only write events records them with no more than INSERT and
// the sequence.
func TestRecordWithFewestPrivileges(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a role of sessions
	c := newCounter(t, parcels(t))
	role := "outbox_writer_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	exec := func(sql string) {
		_, err := c.db.Exec(background, c.sql(sql))
		require.NoError(t, err, sql)
	}
	exec(`CREATE ROLE ` + role)
	t.Cleanup(func() { exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	exec(`GRANT USAGE ON SCHEMA {s} TO ` + role + `; GRANT INSERT ON {s}.outbox TO ` + role + `; GRANT USAGE ON {s}.outbox_id_seq TO ` + role)
	user := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["role"] = role })
	require.NoError(t, pgx.BeginFunc(background, user, func(tx pgx.Tx) error { return c.rec.Record(background, tx, good) }))
	require.Equal(t, []string{"good"}, c.ids(t))
}

// Every table and column has a comment, for users of psql.
func TestMigrateCommentsEverything(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	rows, err := db.Query(background, `
		SELECT c.relname || coalesce('.' || a.attname, '')
		  FROM pg_class c LEFT JOIN LATERAL
		       (SELECT NULL::name AS attname, 0 AS attnum
		        UNION ALL SELECT attname, attnum FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped) a ON true
		 WHERE c.relnamespace = quote_ident($1)::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')
		   AND coalesce(CASE WHEN a.attnum = 0 THEN obj_description(c.oid, 'pg_class') ELSE col_description(c.oid, a.attnum) END, '') = ''
		 ORDER BY c.relname, a.attnum`, schema)
	require.NoError(t, err)
	silent, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, silent, "without a comment")
}

var badSchemas = []struct {
	name, schema string
	want         error
}{
	{"of 64 bytes", strings.Repeat("x", 64), outbox.ErrTooLong},
	{"of 22 characters in 66 bytes", strings.Repeat("주", 22), outbox.ErrTooLong},
	{"with NUL", "a\x00", outbox.ErrNUL},
	{"that is not UTF-8", badText, outbox.ErrUTF8},
}

func TestMigrateBadSchema(t *testing.T) {
	t.Parallel()
	for _, tt := range badSchemas {
		t.Run(tt.name, func(t *testing.T) {
			err := outbox.Migrate(background, nil, outbox.MigrateConfig{Schema: tt.schema})
			require.ErrorIs(t, err, tt.want)
			require.ErrorContains(t, err, "Schema")
		})
	}
}

func TestMigrateCanceled(t *testing.T) {
	t.Parallel()
	db, schema := unborn(t)
	ctx, cancel := context.WithCancel(background)
	cancel()
	require.ErrorIs(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema}), context.Canceled)
	var exists bool
	require.NoError(t, db.QueryRow(background, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, schema).Scan(&exists))
	require.False(t, exists)
}

// A process that waits for another one's migration can be stopped.
func TestMigrateCanceledWhileItWaits(t *testing.T) {
	t.Parallel()
	db, schema := unborn(t)
	first, err := db.Begin(background)
	require.NoError(t, err)
	defer first.Rollback(background)
	_, err = first.Exec(background, `SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))`, schema)
	require.NoError(t, err)
	pool := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = schema })
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- outbox.Migrate(ctx, pool, outbox.MigrateConfig{Schema: schema}) }()
	requireWaiting(t, db, schema)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

// requireWaiting waits until a connection of that application waits for a lock.
func requireWaiting(t *testing.T, db *pgxpool.Pool, application string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var waits bool
		err := db.QueryRow(background, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock')`, application).Scan(&waits)
		return err == nil && waits
	}, testenv.Patience, testenv.Patience/6000)
}

// What is pending and what is applied is told without changing anything.
func TestMigrationStatus(t *testing.T) {
	t.Parallel()
	db, schema := unborn(t)
	cfg := outbox.MigrateConfig{Schema: schema}
	names := files(t)
	status := func() []outbox.Migration {
		all, err := outbox.MigrationStatus(background, db, cfg)
		require.NoError(t, err)
		return all
	}
	all := status()
	require.Len(t, all, len(names))
	for i, m := range all {
		require.Equal(t, outbox.Migration{Version: i + 1, Name: names[i]}, m)
	}
	var there bool
	require.NoError(t, db.QueryRow(background, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, schema).Scan(&there))
	require.False(t, there)

	require.NoError(t, outbox.Migrate(background, db, cfg))
	all = status()
	require.Len(t, all, len(names))
	for i, m := range all {
		require.WithinDuration(t, time.Now(), m.AppliedAt, testenv.Patience)
		require.Equal(t, outbox.Migration{Version: i + 1, Name: names[i], AppliedAt: m.AppliedAt}, m)
	}
	_, err := db.Exec(background, `INSERT INTO `+pgx.Identifier{schema, "outbox_migration"}.Sanitize()+` VALUES (1000, '1000_later.sql')`)
	require.NoError(t, err)
	all = status()
	require.Len(t, all, len(names)+1)
	require.True(t, all[len(names)].Unknown)

	_, err = outbox.MigrationStatus(background, db, outbox.MigrateConfig{Schema: "$user"})
	require.ErrorIs(t, err, outbox.ErrMalformed)
}
