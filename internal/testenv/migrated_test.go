package testenv

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(Main(m)) }

// sample returns a value for a column of a type that the constraints of the table may accept.
func sample(column, kind, number, status string) string {
	switch {
	case column == "status":
		return status
	case column == "state":
		return `'active'`
	case strings.HasSuffix(kind, "[]"):
		return `'{}'`
	case kind == "interval":
		return `'1 s'`
	case strings.Contains(kind, "int"):
		return number
	}
	for part, value := range map[string]string{
		"char": `'a'`, "text": `'a'`, "time": `now()`, "json": `'{}'`, "bytea": `'a'`, "bool": `true`, "uuid": `gen_random_uuid()`,
		"snapshot": `pg_current_snapshot()`, "name": `current_user`,
	} {
		if strings.Contains(kind, part) {
			return value
		}
	}
	return "NULL"
}

// use inserts a row into each empty table, adds a table, and draws from each sequence.
func use(t *testing.T, db *pgxpool.Pool, schema string) {
	t.Helper()
	ctx := context.Background()
	rows, err := db.Query(ctx, sqlTables, schema)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Greater(t, len(tables), 10)
	for _, table := range tables {
		var n int
		require.NoError(t, db.QueryRow(ctx, "SELECT count(*) FROM "+table).Scan(&n))
		if n > 0 {
			continue
		}
		rows, err := db.Query(ctx, `SELECT quote_ident(attname), format_type(atttypid, NULL) FROM pg_attribute
			WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped AND attidentity = '' AND attgenerated = ''
			  AND (attnotnull AND NOT atthasdef OR attname = 'payload')`, table)
		require.NoError(t, err)
		var names, kinds []string
		var name, kind string
		_, err = pgx.ForEachRow(rows, []any{&name, &kind}, func() error {
			names, kinds = append(names, name), append(kinds, kind)
			return nil
		})
		require.NoError(t, err)
		var insert string
		for _, try := range []struct{ number, status string }{{"1", `'failed'`}, {"1", `'PENDING'`}, {"-1", ""}} {
			values := make([]string, len(kinds))
			for i, kind := range kinds {
				values[i] = sample(names[i], kind, try.number, try.status)
			}
			insert = fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s)", table, strings.Join(names, ", "), strings.Join(values, ", "))
			if _, err = db.Exec(ctx, insert); err == nil {
				break
			}
		}
		require.NoError(t, err, insert)
	}
	_, err = db.Exec(ctx, "CREATE TABLE "+quoted(schema)+".added (id bigint GENERATED ALWAYS AS IDENTITY)")
	require.NoError(t, err)
	_, err = db.Exec(ctx, `SELECT nextval(format('%I.%I', schemaname, sequencename)) FROM pg_sequences WHERE schemaname = $1`, schema)
	require.NoError(t, err)
}

// look returns all visible properties of a schema, by the name of the property.
func look(t *testing.T, db *pgxpool.Pool, schema string) map[string]string {
	t.Helper()
	ctx := context.Background()
	seen := map[string]string{}
	rows, err := db.Query(ctx, `SELECT replace(key, nsp, '@'), replace(value, nsp, '@') FROM (
		          SELECT $1, 'statistics of ' || relname, concat(relkind, reltuples, relpages, relacl, reloptions) FROM pg_class WHERE relnamespace = quote_ident($1)::regnamespace
		UNION ALL SELECT $1, 'column ' || table_name || '.' || column_name, to_jsonb(c)::text FROM information_schema.columns AS c WHERE table_schema = $1
		UNION ALL SELECT $1, 'constraint ' || conname || conrelid::regclass, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = quote_ident($1)::regnamespace
		UNION ALL SELECT $1, 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = $1
		UNION ALL SELECT $1, 'function ' || oid::regprocedure, pg_get_functiondef(oid) || coalesce(proacl::text, '') FROM pg_proc WHERE pronamespace = quote_ident($1)::regnamespace
		UNION ALL SELECT $1, 'trigger ' || tgname, tgenabled::text || pg_get_triggerdef(pg_trigger.oid) FROM pg_trigger JOIN pg_class AS c ON c.oid = tgrelid WHERE relnamespace = quote_ident($1)::regnamespace
		UNION ALL SELECT $1, 'sequence ' || sequencename, to_jsonb(s)::text FROM pg_sequences AS s WHERE schemaname = $1) AS v (nsp, key, value)`, schema)
	require.NoError(t, err)
	var key, value string
	_, err = pgx.ForEachRow(rows, []any{&key, &value}, func() error {
		seen[key] = value
		return nil
	})
	require.NoError(t, err)
	rows, err = db.Query(ctx, sqlTables, schema)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, table := range tables {
		// applied_at differs between schemas: each one is migrated at a different time.
		rows := strings.Replace(sqlRows, "to_jsonb(r)", "to_jsonb(r) - 'applied_at'", 1)
		require.NoError(t, db.QueryRow(ctx, fmt.Sprintf(rows, table)).Scan(&value))
		seen["rows of "+strings.ReplaceAll(table, quoted(schema), "@")] = value
	}
	return seen
}

// needReuse skips a test if schemas are not used again.
func needReuse(t *testing.T) {
	t.Helper()
	if !reuses() {
		t.Skip("through PgBouncer no schema is used again")
	}
}

// after runs f as a complete test in a migrated schema, and returns the name of the schema.
func after(t *testing.T, f func(t *testing.T, db *pgxpool.Pool, schema string)) (name string) {
	t.Helper()
	require.True(t, t.Run("first", func(t *testing.T) {
		db, schema := Migrated(t)
		f(t, db, schema)
		name = schema
	}))
	return name
}

// A used schema looks to the next test like a schema that was just migrated.
func TestUsedSchemaLooksNew(t *testing.T) {
	needReuse(t)
	used := after(t, use)
	defer func(d time.Duration) { sessionPatience = d }(sessionPatience)
	sessionPatience = Patience
	db, schema := Migrated(t)
	require.Equal(t, used, schema)
	fresh, err := newMigrated(context.Background(), db)
	require.NoError(t, err)
	defer func() { require.NoError(t, dropSchema(context.Background(), db, fresh.name)) }()
	require.Equal(t, look(t, db, fresh.name), look(t, db, schema))

	other, another := Migrated(t)
	require.NotEqual(t, schema, another, "two at the same time")
	require.NotSame(t, db, other)
}

// If a test has changed more than rows and sequences, the next test does not get its schema.
func TestChangedSchemaIsNotUsedAgain(t *testing.T) {
	needReuse(t)
	ctx := context.Background()
	db := Pool(t, nil)
	m, err := newMigrated(ctx, db)
	require.NoError(t, err)
	defer func() { require.NoError(t, dropSchema(ctx, db, m.name)) }()
	reset := func(change string) error {
		tx, err := db.Begin(ctx)
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(ctx)) }()
		_, err = tx.Exec(ctx, strings.ReplaceAll(change, "{s}", quoted(m.name)), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		return m.reset(ctx, tx)
	}
	require.NoError(t, reset(""))
	for name, change := range map[string]string{
		"a column":      `ALTER TABLE {s}.outbox ADD COLUMN more int`,
		"a column less": `ALTER TABLE {s}.outbox DROP COLUMN topic`,
		"an index":      `CREATE INDEX ON {s}.outbox (id, topic)`,
		"a default":     `ALTER TABLE {s}.outbox ALTER COLUMN topic SET DEFAULT 'x'`,
		"a constraint":  `ALTER TABLE {s}.outbox ADD CHECK (id > 0)`,
		"a trigger":     `CREATE TRIGGER t BEFORE UPDATE ON {s}.outbox FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
		"a rule":        `CREATE RULE r AS ON DELETE TO {s}.outbox DO INSTEAD NOTHING`,
		"a policy":      `CREATE POLICY p ON {s}.outbox`,
		"a function":    `CREATE FUNCTION {s}.f() RETURNS int LANGUAGE sql AS 'SELECT 1'`,
		"a body":        `DO $$ BEGIN EXECUTE (SELECT replace(pg_get_functiondef(oid), 'BEGIN', 'BEGIN NULL;') FROM pg_proc WHERE proname = 'outbox_hold_key' AND pronamespace = '{s}'::regnamespace); END $$`,
		"a reference":   `CREATE TABLE {s}.other (id bigint REFERENCES {s}.outbox_failed)`,
		"a right":       `GRANT SELECT ON {s}.outbox TO PUBLIC`,
		"of a column":   `GRANT SELECT (id) ON {s}.outbox TO PUBLIC`,
		"of a function": `REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {s} FROM PUBLIC; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {s} TO PUBLIC`,
		"of the schema": `GRANT USAGE ON SCHEMA {s} TO PUBLIC`,
		"of new tables": `ALTER DEFAULT PRIVILEGES IN SCHEMA {s} GRANT SELECT ON TABLES TO PUBLIC`,
		"an increment":  `ALTER SEQUENCE {s}.outbox_id_seq INCREMENT 2`,
		"a version":     `DELETE FROM {s}.outbox_migration WHERE version = 1`,
	} {
		require.ErrorIs(t, reset(change), errChanged, name)
	}
	require.NoError(t, reset(""))
	require.ErrorIs(t, reset(`ANALYZE {s}.outbox`), errChanged, "no ROLLBACK undoes that")
	require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return m.remember(ctx, tx) }))
	require.ErrorIs(t, reset(`
		INSERT INTO {s}.outbox_migration (version, name) SELECT i, '' FROM generate_series(1000, 20000) AS i;
		DELETE FROM {s}.outbox_migration WHERE version >= 1000`), errChanged, "large tables make tests slow")
}

// A session that a test has left does not write to the schema of the next test.
func TestSessionThatIsLeft(t *testing.T) {
	needReuse(t)
	ctx := context.Background()
	insert := func(conn *pgx.Conn, schema string) {
		_, err := conn.Exec(ctx, fmt.Sprintf(`INSERT INTO %s.outbox_migration (version, name) VALUES (1000, 'late')`, quoted(schema)))
		require.NoError(t, err)
	}
	for name, connect := range map[string]func(t *testing.T, db *pgxpool.Pool) *pgx.Conn{
		"like a pool's": func(t *testing.T, db *pgxpool.Pool) *pgx.Conn {
			conn, err := pgx.ConnectConfig(ctx, db.Config().ConnConfig)
			require.NoError(t, err)
			return conn
		},
		"of nobody": func(t *testing.T, db *pgxpool.Pool) *pgx.Conn {
			conn, err := pgx.Connect(ctx, db.Config().ConnString())
			require.NoError(t, err)
			return conn
		},
	} {
		t.Run(name, func(t *testing.T) {
			var late *pgx.Conn
			left := after(t, func(t *testing.T, db *pgxpool.Pool, _ string) { late = connect(t, db) })
			_, schema := Migrated(t)
			require.NotEqual(t, left, schema)
			insert(late, left)
			require.NoError(t, late.Close(ctx))
		})
	}

	// The next test waits for a session that ends soon.
	t.Run("that ends", func(t *testing.T) {
		ended := make(chan error, 1)
		left := after(t, func(t *testing.T, db *pgxpool.Pool, schema string) {
			late, err := pgx.ConnectConfig(ctx, db.Config().ConnConfig)
			require.NoError(t, err)
			go func() {
				time.Sleep(20 * time.Millisecond)
				_, err := late.Exec(ctx, fmt.Sprintf(`INSERT INTO %s.outbox_migration (version, name) VALUES (1000, 'late')`, quoted(schema)))
				ended <- err
				_ = late.Close(ctx)
			}()
		})
		db, schema := Migrated(t)
		require.NoError(t, <-ended)
		require.NotEqual(t, left, schema, "its versions have changed")
		var n int
		require.NoError(t, db.QueryRow(ctx, "SELECT count(*) FROM "+quoted(schema)+".outbox_migration WHERE name = 'late'").Scan(&n))
		require.Zero(t, n)
	})
}
