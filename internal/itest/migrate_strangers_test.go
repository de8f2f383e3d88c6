package itest

import (
	"fmt"
	"io/fs"
	"log/slog"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
)

// overloads are functions that PostgreSQL prefers to those of outbox where a call has an argument without a type, one
// of another type, or leaves one out.
var overloads = []string{"outbox_define(name,text[])", "outbox_revoke_grants(text)", "outbox_guard_partition(text)", "outbox_prepare_partitions(text)",
	"outbox_check_names(text,text)", "outbox_lock_groups(text,text)", "outbox_unread(text,bytea)", "outbox_promote(text,bigint[])",
	"outbox_pending(text,integer)"}

// plantOverloads makes the overloads. Each of them fails.
func plantOverloads(t *testing.T, db *pgxpool.Pool, h *relayFixture) {
	t.Helper()
	for _, one := range overloads {
		_, err := db.Exec(background, h.sql(`CREATE FUNCTION {s}.`+one+` RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted'; END $$`))
		require.NoError(t, err)
	}
}

// openSchema returns a schema in which everybody may create, a pool of its owner, who is no superuser, and one of a
// stranger.
func openSchema(t *testing.T) (h *relayFixture, owner, mallory *pgxpool.Pool) {
	t.Helper()
	testenv.Direct(t)
	db, schema := testenv.Schema(t)
	h = &relayFixture{db: db, schema: schema}
	name := fmt.Sprintf("owner_%.8s", uuid.NewString())
	_, err := db.Exec(background, h.sql(fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD '%s'; ALTER SCHEMA {s} OWNER TO %[1]s; GRANT CREATE ON SCHEMA {s} TO PUBLIC`, name, rolePassword)))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := db.Exec(background, h.sql(fmt.Sprintf(`DROP OWNED BY %s CASCADE; DROP ROLE %[1]s; CREATE SCHEMA IF NOT EXISTS {s}`, name)))
		require.NoError(t, err)
	})
	mallory, _ = newMallory(t, h)
	return h, (&roles{relayFixture: h}).connect(t, name), mallory
}

// A function that fits a call of outbox better than outbox's own, and was there before the tables, does not run with
// the rights of the role that migrates.
func TestMigrateRunsNoOverloadsOfOthers(t *testing.T) {
	t.Parallel()
	h, owner, mallory := openSchema(t)
	plantOverloads(t, mallory, h)
	cfg := outbox.MigrateConfig{Schema: h.schema, PartitionRows: 100, Logger: slog.New(slog.DiscardHandler)}
	err := outbox.Migrate(background, owner, cfg)
	require.ErrorIs(t, err, outbox.ErrForeignObjects)
	require.NotContains(t, err.Error(), "planted")
	for _, one := range overloads {
		require.ErrorContains(t, err, one)
	}
	_, err = mallory.Exec(background, h.sql("DROP FUNCTION {s}."+strings.Join(overloads, ", {s}.")))
	require.NoError(t, err)
	require.NoError(t, outbox.Migrate(background, owner, cfg))
}

// The same where another tool applies the files: the first file finds the functions, and runs none.
func TestMigrationsByHandRunNoOverloadsOfOthers(t *testing.T) {
	t.Parallel()
	h, _, mallory := openSchema(t)
	plantOverloads(t, mallory, h)
	f := &schemaFixture{db: h.db, schema: h.schema}
	sql, err := fs.ReadFile(migrations.FS, files(t)[0])
	require.NoError(t, err)
	err = f.tryScript(string(sql))
	require.ErrorContains(t, err, "another role has made functions with names of outbox")
	require.ErrorContains(t, err, "outbox_check_names(text,text)")
}

// Functions that run with the rights of the owner call no function of a role that may create in the schema later.
func TestFunctionsRunNoOverloadsOfOthers(t *testing.T) {
	inEachPlace(t, 0, func(t *testing.T, h *relayFixture) {
		mallory, _ := newMallory(t, h)
		plantOverloads(t, mallory, h)
		_, err := h.db.Exec(background, h.sql(`
			INSERT INTO {s}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at, occurred_at,
				recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
			SELECT n, n, 1, 1, now(), now(), now(), now(), now(), now(), gen_random_uuid(), 'DEAD', 'g', 'a', 't', 'test.a.b.v1', 's', 'T', 'i', 'application/json', '{}'
			  FROM generate_series(1, 3) AS n`))
		require.NoError(t, err)
		for _, call := range []string{
			`outbox_forget_handled('g', '{t}', '{i}', '{o}', '{b}', now(), 'kim', 'why')`,
			`outbox_edit_delivery(1, '{}', 'kim', 'why')`, `outbox_requeue_deliveries('{2}', 'kim', 'why')`, `outbox_resolve_deliveries('{3}', 'kim', 'why')`,
		} {
			_, err := h.db.Exec(background, h.sql(`SELECT {s}.`+call))
			require.NoError(t, err, call)
		}
		for call, want := range map[string]string{
			`outbox_cut_from_debezium('p', 'r', 'kim', 'why')`:    "there is no publication p",
			`outbox_cut_to_debezium('p', 's', 'r', 'kim', 'why')`: "there is no publication p",
			`outbox_begin_relay('s', 'r', 'kim', 'why')`:          "there is no cut at relay r",
		} {
			_, err := h.db.Exec(background, h.sql(`SELECT {s}.`+call))
			require.ErrorContains(t, err, want, call)
		}
		_, err = h.db.Exec(background, h.sql(`SELECT {s}.outbox_start_group('another', '{}', '{}', '{}', '{}', 'kim', 'why')`))
		require.NoError(t, err)
		require.NoError(t, outbox.Migrate(background, h.db, outbox.MigrateConfig{Schema: h.schema, PartitionRows: 10}))
	})
}

// ofOutbox are names that statements and functions take for outbox's own.
var ofOutbox = []struct{ name, create string }{
	{"outbox_id_seq", `CREATE SEQUENCE {s}.outbox_id_seq`},
	{"outbox_cursor_id_seq", `CREATE VIEW {s}.outbox_cursor_id_seq AS SELECT 1 AS last_value, true AS is_called`},
	{"event_delivery_id_seq", `CREATE TABLE {s}.event_delivery_id_seq (last_value bigint)`},
	{"outbox_pkey", `CREATE TABLE {s}.outbox_pkey ()`},
	{"outbox_pending", `CREATE VIEW {s}.outbox_pending AS SELECT 1 AS n`},
}

// What a stranger has named like a sequence of outbox is not taken for it. Other names are the stranger's own affair.
func TestMigrateTakesNoSequencesOfOthers(t *testing.T) {
	t.Parallel()
	for _, tt := range ofOutbox {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h, owner, mallory := openSchema(t)
			_, err := mallory.Exec(background, h.sql(`CREATE TABLE {s}.event_log (id bigserial); CREATE TABLE {s}.outboxes (); CREATE SEQUENCE {s}.outbox_notes_id_seq;
				CREATE FUNCTION {s}.outboxes() RETURNS int LANGUAGE sql AS 'SELECT 1';`+tt.create), pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			cfg := outbox.MigrateConfig{Schema: h.schema, Logger: slog.New(slog.DiscardHandler)}
			err = outbox.Migrate(background, owner, cfg)
			require.ErrorIs(t, err, outbox.ErrForeignObjects)
			require.ErrorContains(t, err, tt.name)
			require.NotContains(t, err.Error(), "event_log")
			require.NotContains(t, err.Error(), "outboxes")
			require.NotContains(t, err.Error(), "outbox_notes")
			kind := regexp.MustCompile(`CREATE (\w+)`).FindStringSubmatch(tt.create)[1]
			_, err = mallory.Exec(background, h.sql(`DROP `+kind+` {s}.`+tt.name))
			require.NoError(t, err)
			require.NoError(t, outbox.Migrate(background, owner, cfg))
		})
	}
}

// A file fails where a sequence of outbox did not get its name, whichever role has taken the name.
func TestMigrationsWantTheirSequences(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	f := &schemaFixture{db: db, schema: schema}
	for i, taken := range []string{"outbox_delayed_id_seq", "", "outbox_failed_id_seq", "event_handled_id_seq", "outbox_audit_id_seq"} {
		sql, err := fs.ReadFile(migrations.FS, files(t)[i])
		require.NoError(t, err)
		if taken != "" {
			f.exec(t, `CREATE SEQUENCE {s}.`+taken)
			err = f.tryScript(string(sql))
			require.ErrorContains(t, err, "drop them: ")
			require.ErrorContains(t, err, taken)
			f.exec(t, `DROP SEQUENCE {s}.`+taken)
		}
		f.script(t, string(sql))
	}
}

var (
	comments   = regexp.MustCompile(`(?m)^\s*--.*$`)
	ownDefined = regexp.MustCompile(`CREATE FUNCTION @schema@\.(outbox_\w+)\(`)
	ownCalled  = regexp.MustCompile(`(FUNCTION )?@schema@\.(outbox_\w+)\(`)
	withoutFit = regexp.MustCompile(`^('[^']*'|-?\d+|NULL)$`)
)

// arguments returns what stands between parentheses that begin before a text, separated by commas.
func arguments(text string) (all []string) {
	depth, start, quoted := 0, 0, false
	for i, c := range text {
		switch {
		case c == '\'':
			quoted = !quoted
		case quoted:
		case c == '(' || c == '[':
			depth++
		case depth > 0 && (c == ')' || c == ']'):
			depth--
		case depth == 0 && (c == ')' || c == ','):
			if one := strings.TrimSpace(text[start:i]); one != "" {
				all = append(all, one)
			}
			if start = i + 1; c == ')' {
				return all
			}
		}
	}
	return all
}

// Each call in the files fits the function exactly: it leaves no argument out, and no argument is without a type.
// PostgreSQL would prefer a function of another role that fits better.
func TestMigrationsCallTheirOwnFunctions(t *testing.T) {
	t.Parallel()
	parameters, texts, calls := map[string]int{}, map[string]string{}, 0
	for _, name := range files(t) {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		texts[name] = comments.ReplaceAllString(string(sql), "")
		require.Equal(t, strings.Count(texts[name], "SELECT outbox_define(current_schema(), "),
			strings.Count(texts[name], "\n], definitions => ARRAY[")+strings.Count(texts[name], "\n], '{}'::text[]);\n"), "%s: all arguments of outbox_define", name)
		for _, at := range ownDefined.FindAllStringSubmatchIndex(texts[name], -1) {
			for _, parameter := range arguments(texts[name][at[1]:]) {
				if !strings.HasPrefix(parameter, "OUT ") {
					parameters[texts[name][at[2]:at[3]]]++
				}
			}
		}
	}
	for name, text := range texts {
		for _, at := range ownCalled.FindAllStringSubmatchIndex(text, -1) {
			if at[2] >= 0 { // a definition
				continue
			}
			function, given := text[at[4]:at[5]], arguments(text[at[1]:])
			require.Len(t, given, parameters[function], "%s: %s(%s)", name, function, strings.Join(given, ", "))
			for _, one := range given {
				require.NotRegexp(t, withoutFit, one, "%s: %s", name, function)
			}
			calls++
		}
	}
	require.Greater(t, calls, 50)
}
