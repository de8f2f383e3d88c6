package itest

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
)

// A role can do nothing but what the tables in internal/doc/roles.md say, also if it has CREATE on the database. The
// flag -update writes the tables anew.
func TestRolesCannot(t *testing.T) {
	inEachPlace(t, 0, func(t *testing.T, h *relayFixture) {
		r := newRoles(t, h)
		h.commit(t, numbered("key", 1, 1)...)
		databaseRights.Lock()
		_, err := h.db.Exec(background, fmt.Sprintf("GRANT CREATE ON DATABASE %s TO %s",
			pgx.Identifier{h.db.Config().ConnConfig.Database}.Sanitize(), strings.Join(r.names(), ", ")))
		databaseRights.Unlock()
		require.NoError(t, err)
		logins := map[string]*pgxpool.Pool{}
		for _, role := range r.parts {
			logins[role] = r.as(t, role)
		}
		requireRolesDoc(t, "tables", r.tablesDoc(t, logins))
		requireRolesDoc(t, "functions", r.functionsDoc(t, logins))
	})
}

// tablesDoc tries everything on each table in each role, and returns what was permitted as a table of Markdown.
func (r *roles) tablesDoc(t *testing.T, logins map[string]*pgxpool.Pool) string {
	t.Helper()
	rows, err := r.db.Query(background, `
		SELECT c.table_name::text, array_agg(c.column_name::text ORDER BY c.ordinal_position)
		  FROM information_schema.columns AS c JOIN information_schema.tables USING (table_schema, table_name)
		 WHERE c.table_schema = $1 GROUP BY c.table_name ORDER BY c.table_name`, r.schema)
	require.NoError(t, err)
	type table struct {
		Name    string
		Columns []string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[table])
	require.NoError(t, err)
	require.NotEmpty(t, tables)
	var doc strings.Builder
	fmt.Fprintf(&doc, "| table | %s |\n|---|%s\n", strings.Join(r.parts, " | "), strings.Repeat("---|", len(r.parts)))
	for _, table := range tables {
		fmt.Fprintf(&doc, "| `%s` |", table.Name)
		for _, role := range r.parts {
			permitted := r.permitted(t, logins[role], table.Name, table.Columns)
			if role != "relay" && strings.Contains(permitted, "LOCK") {
				t.Errorf("%s may lock %s, and so stop all others: %s", role, table.Name, permitted)
			}
			fmt.Fprintf(&doc, " %s |", permitted)
		}
		doc.WriteString("\n")
	}
	return doc.String()
}

// permitted returns what a role may do with a table. It names the columns if these are not all and at most four.
func (r *roles) permitted(t *testing.T, db *pgxpool.Pool, table string, columns []string) string {
	t.Helper()
	name := pgx.Identifier{r.schema, table}.Sanitize()
	may := func(sql string) bool { // a statement with missing values fails later than one without the right to it
		tx, err := db.Begin(background)
		require.NoError(t, err)
		_, err = tx.Exec(background, sql)
		require.NoError(t, tx.Rollback(background))
		requireAnswer(t, err)
		if ofView(err) {
			return false
		}
		return !isDenied(err) || strings.Contains(err.Error(), "row-level security") // which looks at what is written
	}
	var all []string
	for _, each := range []struct{ kind, sql string }{
		{"SELECT", `SELECT %[2]s FROM %[1]s`}, {"INSERT", `INSERT INTO %s (%s) VALUES (DEFAULT)`}, {"UPDATE", `UPDATE %s SET %[2]s = DEFAULT`},
	} {
		var permitted []string
		for _, c := range columns {
			if may(fmt.Sprintf(each.sql, name, c)) {
				permitted = append(permitted, c)
			}
		}
		switch n := len(permitted); {
		case n == len(columns):
			all = append(all, each.kind)
		case n > 4:
			all = append(all, fmt.Sprintf("%s of %d columns", each.kind, n))
		case n > 0:
			all = append(all, fmt.Sprintf("%s of `%s`", each.kind, strings.Join(permitted, "`, `")))
		}
	}
	for _, each := range []struct{ kind, sql string }{
		{"DELETE", `DELETE FROM %s`}, {"TRUNCATE", `TRUNCATE %s`}, {"LOCK", `LOCK TABLE %s IN ACCESS EXCLUSIVE MODE`},
		{"TRIGGER", `CREATE TRIGGER x AFTER INSERT ON %s EXECUTE FUNCTION suppress_redundant_updates_trigger()`},
	} {
		if may(fmt.Sprintf(each.sql, name)) {
			all = append(all, each.kind)
		}
	}
	return strings.Join(all, ", ")
}

// requireAnswer fails unless err is nil or an error of a statement: others say nothing about rights.
func requireAnswer(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		var answer *pgconn.PgError
		require.ErrorAs(t, err, &answer)
		require.NotEqual(t, "53", answer.Code[:2], "PostgreSQL lacks something: %v", err)
	}
}

// functionsDoc calls each function in each role, and returns who may as a table of Markdown.
func (r *roles) functionsDoc(t *testing.T, logins map[string]*pgxpool.Pool) string {
	t.Helper()
	rows, err := r.db.Query(background, `
		SELECT p.proname::text, format('%I.%I(%s)', n.nspname, p.proname, (
		       SELECT string_agg('NULL::' || format_type(a, NULL), ', ' ORDER BY i) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (a, i)))
		  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
		 WHERE n.nspname = $1 AND p.prorettype <> 'trigger'::regtype ORDER BY 1, 2`, r.schema)
	require.NoError(t, err)
	type function struct{ Name, Call string }
	functions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	callers := map[string][]string{}
	for _, f := range functions {
		var who []string
		for _, role := range r.parts {
			if _, err := logins[role].Exec(background, `SELECT `+f.Call); !isDenied(err) {
				requireAnswer(t, err)
				who = append(who, role)
			}
		}
		by := strings.Join(who, ", ")
		if name := "`" + f.Name + "`"; !slices.Contains(callers[by], name) {
			callers[by] = append(callers[by], name)
		}
	}
	var doc strings.Builder
	doc.WriteString("| roles | functions |\n|---|---|\n")
	for _, by := range slices.Sorted(maps.Keys(callers)) {
		fmt.Fprintf(&doc, "| %s | %s |\n", cmp.Or(by, "none"), strings.Join(callers[by], ", "))
	}
	return doc.String()
}

var updateRoles = flag.Bool("update", false, "write the tables of internal/doc/roles.md anew")

// requireRolesDoc compares a part of internal/doc/roles.md between two comments, or writes it.
func requireRolesDoc(t *testing.T, part, want string) {
	t.Helper()
	const file = "../doc/roles.md"
	doc, err := os.ReadFile(file)
	require.NoError(t, err)
	begin, end := "<!-- "+part+" -->\n", "<!-- /"+part+" -->"
	before, rest, found := strings.Cut(string(doc), begin)
	require.True(t, found, begin)
	got, after, found := strings.Cut(rest, end)
	require.True(t, found, end)
	if *updateRoles {
		require.NoError(t, os.WriteFile(file, []byte(before+begin+want+end+after), 0o600))
		return
	}
	require.Equal(t, got, want, "go test -run TestRolesCannot -update writes internal/doc/roles.md")
}

// escalations are statements that roles may try outside their tables. {s} is the schema, {text} its
// name as a text, {owner} the owner of the tables.
var escalations = map[string][]string{
	"writer": {
		`INSERT INTO {s}.outbox ({columns}) VALUES ({values}) RETURNING payload`,
		`INSERT INTO {s}.outbox ({columns}) VALUES ({values}) ON CONFLICT (id) DO NOTHING`,
		`INSERT INTO {s}.outbox ({columns}) VALUES ({values}) ON CONFLICT (id) DO UPDATE SET payload = excluded.payload`,
		`INSERT INTO {s}.outbox ({columns}, id) VALUES ({values}, 1)`,
		`INSERT INTO {s}.outbox ({columns}, xid) VALUES ({values}, '3')`,
		`INSERT INTO {s}.outbox ({columns}, created_at) VALUES ({values}, now() - interval '1 day')`,
		`SELECT setval(format('%I.outbox_id_seq', {text}), 1)`,
		`COPY {s}.outbox ({columns}) TO STDOUT`,
	},
	"relay": {
		`INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key, created_at) VALUES ('kim', 'edit', 'x', 'r', 'k', now() - interval '1 day')`,
		`INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key, login) VALUES ('kim', 'edit', 'x', 'r', 'k', 'kim')`,
		`INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key, id) VALUES ('kim', 'edit', 'x', 'r', 'k', 1)`,
		`UPDATE {s}.outbox_audit SET reason = 'x'`,
		`DELETE FROM {s}.outbox_archiver`,
		`UPDATE {s}.outbox_archiver SET name = 'x'`,
		`SELECT {s}.outbox_stop_archive('kim', 'why')`,
		`UPDATE {s}.outbox SET topic = 'elsewhere'`,
		`SELECT setval(format('%I.outbox_id_seq', {text}), 1)`,
		`DROP TABLE {s}.outbox_cursor`,
	},
	"worker": {
		`UPDATE {s}.event_delivery SET payload = '{}'`,
		`UPDATE {s}.event_delivery SET consumer_group = 'theirs'`,
		`UPDATE {s}.event_delivery SET event_id = gen_random_uuid()`,
		`UPDATE {s}.event_delivery SET resolved_at = now(), resolved_by = 'kim', note = 'x'`,
		`UPDATE {s}.event_delivery SET recorded_at = now()`,
		`INSERT INTO {s}.event_delivery SELECT * FROM {s}.event_delivery`,
		`INSERT INTO {s}.event_delivery ({delivery}) SELECT {delivery} FROM {s}.event_delivery WHERE consumer_group = 'theirs'`,
		`INSERT INTO {s}.event_delivery ({delivery}, id) SELECT {delivery}, 1 FROM {s}.event_delivery WHERE consumer_group = 'mine'`,
		`INSERT INTO {s}.event_delivery ({delivery}, resolved_by) SELECT {delivery}, 'x' FROM {s}.event_delivery WHERE consumer_group = 'mine'`,
		`INSERT INTO {s}.event_subscription (consumer_group) VALUES ('another')`,
		`INSERT INTO {s}.outbox_cursor ({cursor}) SELECT 'worker:theirs', {position}`,
		`INSERT INTO {s}.outbox_cursor ({cursor}) SELECT 'mine', {position}`,
		`INSERT INTO {s}.outbox_cursor ({cursor}) SELECT 'default', {position}`,
		`INSERT INTO {s}.outbox_cursor (id, {cursor}) SELECT 9223372036854775807, 'worker:mine', {position}`,
		`INSERT INTO {s}.outbox_archiver (name, epoch) VALUES ('worker:mine', 1000)`,
		`UPDATE {s}.outbox_cursor SET snapshot = pg_current_snapshot()`,
		`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('default', 'mallory', 1000, 'infinity', '0')`,
		`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('worker:theirs', 'mallory', 1000, 'infinity', '0')
			ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, epoch = excluded.epoch, expires_at = excluded.expires_at`,
		`UPDATE {s}.outbox_lease SET name = 'default' WHERE name = 'worker:mine'`,
		`UPDATE {s}.event_subscription SET state = 'left', relay = 'r'`,
		`DELETE FROM {s}.event_subscription`,
		`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('theirs', 't', 'new', 'a')`,
		`UPDATE {s}.outbox SET xid = '3'`,
		`DELETE FROM {s}.outbox`,
		`INSERT INTO {s}.outbox ({columns}) VALUES ({values})`,
		`INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('*', session_user)`,
		`SELECT {s}.outbox_requeue_deliveries('{1}', 'kim', 'why')`,
		`SELECT {s}.outbox_edit_delivery(1, '{}', 'kim', 'why')`,
		`SELECT {s}.outbox_cut_to_kafka('{mine}', 'r', 'kim', 'why')`,
		`SELECT {s}.outbox_finish_cut('r', true, 'kim', 'why')`,
		`LOCK TABLE {s}.event_subscription IN SHARE MODE`,
	},
	"inbox": {
		`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('theirs', 't', 'new', 'a')`,
		`UPDATE {s}.event_handled SET handled_at = now()`,
		`SELECT {s}.outbox_remove_handled('{"(0,1)"}', 'infinity')`,
		`LOCK TABLE {s}.event_handled IN SHARE MODE`,
	},
	"consumer": {
		`UPDATE {s}.event_delivery SET payload = '{}'`,
		`UPDATE {s}.event_delivery SET event_id = gen_random_uuid()`,
		`UPDATE {s}.event_delivery SET consumer_group = 'theirs'`,
		`UPDATE {s}.event_delivery SET resolved_at = now(), resolved_by = 'kim', note = 'x'`,
		`SELECT {s}.outbox_requeue_deliveries('{1}', 'kim', 'why')`,
		`SELECT {s}.outbox_edit_delivery(1, '{}', 'kim', 'why')`,
		`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('theirs', 't', 'new', 'a')`,
		`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('theirs', 't', 'i', 'a')
			ON CONFLICT (consumer_group, aggregate_type, aggregate_id, action) DO UPDATE SET handled_at = '-infinity'`,
		`INSERT INTO {s}.event_handled (id, consumer_group, aggregate_type, aggregate_id, action) VALUES (1000, 'mine', 't', 'new', 'a')`,
		`UPDATE {s}.event_handled SET consumer_group = 'theirs'`,
		`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset) VALUES ('theirs', 't', gen_random_uuid(), 0, 1000)`,
		`UPDATE {s}.consumer_start SET consumer_group = 'theirs' WHERE consumer_group = 'mine'`,
		`INSERT INTO {s}.consumer_handler (consumer_group, topic, action, event_type) VALUES ('theirs', 't', 'a', 'e')`,
		`INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset) VALUES ('theirs', 't', gen_random_uuid(), 0, 'a', 'e', 1)`,
		`SELECT {s}.outbox_forget_action('theirs', 'a', 'kim', 'why')`,
		`INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('*', session_user)`,
		`UPDATE {s}.consumer_group_role SET consumer_group = '*'`,
		`SELECT payload FROM {s}.outbox`,
		`SELECT aggregate_id FROM {s}.outbox`,
		`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('default', 'mallory', 1000, 'infinity', '0')`,
		`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('mine', 'mallory', 1000, 'infinity', '0')`,
		`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('consumer:theirs', 'mallory', 1000, 'infinity', '0')
			ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, epoch = excluded.epoch, expires_at = excluded.expires_at`,
		`UPDATE {s}.outbox_lease SET name = 'default' WHERE name = 'consumer:mine'`,
		`DELETE FROM {s}.consumer_pause`,
		`ALTER TABLE {s}.event_handled DISABLE ROW LEVEL SECURITY`,
		`DROP POLICY event_handled_write ON {s}.event_handled`,
		`SET LOCAL row_security = off; DELETE FROM {s}.event_handled`,
	},
	"reader": {
		`LOCK TABLE {s}.outbox IN SHARE MODE`,
		`SELECT FROM {s}.outbox FOR UPDATE`,
		`SELECT nextval(format('%I.outbox_id_seq', {text}))`,
	},
	"operator": {
		`UPDATE {s}.outbox_failed SET topic = 'elsewhere', partition_key = 'k', event_type = 'acme.gift.granted.v1', payload = '{}', status = 'parked'`,
		`UPDATE {s}.outbox_failed SET status = 'resolved'`,
		`INSERT INTO {s}.outbox_failed SELECT * FROM {s}.outbox_failed`,
		`UPDATE {s}.event_delivery SET status = 'DEAD'`,
		`UPDATE {s}.event_delivery SET status = 'PENDING', locked_by = NULL, locked_until = NULL`,
		`DELETE FROM {s}.event_delivery`,
		`UPDATE {s}.event_subscription SET state = 'left', relay = 'r'`,
		`SELECT {s}.outbox_promote('mine', '{1}')`,
		`SELECT {s}.outbox_lock_groups('{mine}', 'r')`,
		`SELECT {s}.outbox_lock_cut('r')`,
		`SELECT {s}.outbox_finish_deliveries('mine', 'w', '{1}', '{1}', '{1}')`,
		`INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key) VALUES ('somebody else', 'edit', 'x', 'r', 'k')`,
		`INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key, created_at) VALUES ('kim', 'edit', 'x', 'r', 'k', now() - interval '1 day')`,
		`DELETE FROM {s}.outbox_audit`,
		`SELECT nextval(format('%I.outbox_audit_id_seq', {text}))`,
		`UPDATE {s}.consumer_start SET position = 1000`,
		`INSERT INTO {s}.consumer_pause (consumer_group, topic, operator, reason) VALUES ('g', '', 'kim', 'x')`,
		`LOCK TABLE {s}.outbox_failed IN SHARE MODE`,
		`SELECT FROM {s}.outbox_failed FOR UPDATE`,
	},
	"": { // everybody
		`SET LOCAL ROLE {owner}`,
		`SET LOCAL SESSION AUTHORIZATION {owner}`,
		`CREATE OR REPLACE FUNCTION {s}.outbox_relays() RETURNS text[] LANGUAGE sql AS 'SELECT ''{}''::text[]'`,
		`ALTER FUNCTION {s}.outbox_relays() SET search_path = {s}`,
		`ALTER FUNCTION {s}.outbox_relays() SECURITY INVOKER`,
		`CREATE RULE x AS ON INSERT TO {s}.outbox DO INSTEAD NOTHING`,
		`CREATE POLICY x ON {s}.event_handled`,
		`ALTER TABLE {s}.outbox OWNER TO CURRENT_USER`,
		`ALTER TABLE {s}.outbox ALTER COLUMN xid SET DEFAULT '3'`,
		`CREATE INDEX x ON {s}.outbox ((pg_sleep(1)))`,
		`ALTER SCHEMA {s} OWNER TO CURRENT_USER`,
		`ALTER DEFAULT PRIVILEGES FOR ROLE {owner} GRANT ALL ON TABLES TO PUBLIC`,
		`CREATE EVENT TRIGGER x ON ddl_command_end EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
		`COPY {s}.outbox TO PROGRAM 'cat'`,
		`ALTER ROLE {owner} PASSWORD 'x'`,
	},
}

// Each way that we know to more rights than those of a role is closed.
func TestRolesCannotEscalate(t *testing.T) {
	inEachPlace(t, 0, func(t *testing.T, h *relayFixture) {
		r := newRoles(t, h)
		h.commit(t, numbered("key", 1, 1)...)
		r.requireNoEscalation(t)
	})
}

// requireNoEscalation tries the escalations.
func (r *roles) requireNoEscalation(t *testing.T) {
	t.Helper()
	h := r.relayFixture
	r.giveGroup(t, "consumer", "mine")
	if slices.Contains(r.parts, "worker") {
		r.giveGroup(t, "worker", "mine")
	}
	if slices.Contains(r.parts, "inbox") {
		r.giveGroup(t, "inbox", "mine")
	}
	h.seedGroups(t)
	var owner string
	require.NoError(t, h.db.QueryRow(background, `SELECT current_user`).Scan(&owner))
	replace := strings.NewReplacer("{s}", pgx.Identifier{h.schema}.Sanitize(), "{text}", "'"+strings.ReplaceAll(h.schema, "'", "''")+"'",
		"{owner}", pgx.Identifier{owner}.Sanitize(),
		"{delivery}", `consumer_group, action, stream, position, status, attempt_count, max_attempts, next_retry_at, locked_by, locked_until, created_at, updated_at,
			event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, recorded_at`,
		"{cursor}", "relay, last_processed_id, snapshot, highest_id, system_identifier, epoch",
		"{position}", "1000, pg_current_snapshot(), 1000, system_identifier, 1000 FROM pg_control_system()",
		"{columns}", "event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at",
		"{values}", "gen_random_uuid(), 't', 's', 'a', 'i', '{}', 'application/json', now()")
	for _, role := range r.parts {
		db := r.as(t, role)
		for _, sql := range slices.Concat(escalations[role], escalations[""]) {
			err := tryScript(db, replace.Replace(sql))
			require.True(t, isDenied(err), "%s: %s: %v", role, sql, err)
		}
	}
	for _, role := range slices.Sorted(maps.Keys(hiddenRows)) { // a worker removes the delivery
		statements := hiddenRows[role]
		if !slices.Contains(r.parts, role) {
			continue
		}
		db := r.as(t, role)
		for _, sql := range statements {
			tag, err := db.Exec(background, h.sql(sql))
			require.NoError(t, err)
			require.Zero(t, tag.RowsAffected(), "%s: %s", role, sql)
			tag, err = db.Exec(background, strings.ReplaceAll(h.sql(sql), "theirs", "mine"))
			require.NoError(t, err)
			require.EqualValues(t, 1, tag.RowsAffected(), "%s: %s", role, sql)
		}
	}
	for _, table := range []string{"event_handled", "event_delivery", "event_member", "event_subscription", "consumer_gap", "consumer_start"} {
		require.Equal(t, 1, h.countWhere(t, `SELECT count(*) FROM {s}.`+table+` WHERE consumer_group = 'theirs'`), table)
	}
}

// seedGroups gives the groups mine and theirs, and relays of these names, a row in each table.
func (h *relayFixture) seedGroups(t *testing.T) {
	t.Helper()
	_, err := h.db.Exec(background, h.sql(`
		INSERT INTO {s}.event_subscription (consumer_group) VALUES ('mine'), ('theirs');
		INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes) VALUES ('mine', 'm', false, now(), '1 h', '{}'), ('theirs', 'm', false, now(), '1 h', '{}');
		INSERT INTO {s}.event_delivery (consumer_group, action, stream, position, status, attempt_count, max_attempts, next_retry_at, locked_by, locked_until,
		       created_at, updated_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, recorded_at)
		SELECT g, 'a', 't', 1, 'PROCESSING', 1, 10, now(), 'w', now(), now(), now(), gen_random_uuid(), 't', 's', 'a', 'i', '{}', 'application/json', now(), now()
		  FROM unnest('{mine,theirs}'::text[]) AS g;
		INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT name, 0, '1:1:', 0, 1, 1 FROM unnest('{mine,theirs,worker:mine,worker:theirs}'::text[]) AS name;
		INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts)
		SELECT name, 'h', 1, now(), '1 s' FROM unnest('{mine,theirs,worker:mine,worker:theirs,consumer:mine,consumer:theirs}'::text[]) AS name;
		INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('mine', 't', 'i', 'a'), ('theirs', 't', 'i', 'a');
		INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
		SELECT g, 't', gen_random_uuid(), 0, 'a', 'e', 5 FROM unnest('{mine,theirs}'::text[]) AS g;
		INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position, saved_at)
		SELECT g, 't', gen_random_uuid(), 0, 0, 5, now() - interval '31 days' FROM unnest('{mine,theirs}'::text[]) AS g;
		UPDATE {s}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = now() WHERE consumer_group = 'theirs'`))
	require.NoError(t, err)
}

// hiddenRows are statements about rows of another group: what a policy hides is not an error. The
// same about rows of the role's own group succeed.
var hiddenRows = map[string][]string{
	"consumer": {
		`UPDATE {s}.event_handled SET handled_at = '-infinity', answer = decode(repeat('f0', 40), 'hex') WHERE consumer_group = 'theirs'`,
		`SELECT FROM generate_series(1, {s}.outbox_remove_handled(ARRAY(SELECT ctid FROM {s}.event_handled WHERE consumer_group = 'theirs'), 'infinity'))`,
		`UPDATE {s}.event_delivery SET payload_bytes = NULL, record = NULL, position = 7, dead_letter = NULL WHERE consumer_group = 'theirs'`,
		`UPDATE {s}.consumer_start SET position = 1000 WHERE consumer_group = 'theirs'`,
		`UPDATE {s}.consumer_gap SET from_offset = 1000 WHERE consumer_group = 'theirs'`,
		`SELECT FROM generate_series(1, (SELECT {s}.outbox_remove_gaps('theirs', array_agg(topic), array_agg(topic_id), array_agg(partition), array_agg(action),
			array_agg(event_type), array_agg(version)) FROM {s}.consumer_gap WHERE consumer_group = 'theirs'))`,
		`SELECT FROM generate_series(1, {s}.outbox_remove_topics('theirs', '{t}', ARRAY[gen_random_uuid()]))`,
		// Relays may have the name of a group.
		`UPDATE {s}.outbox_lease SET holder = 'mallory' WHERE name IN ('theirs', 'consumer:theirs')`,
		`SELECT FROM {s}.outbox_lease WHERE name IN ('theirs', 'consumer:theirs') FOR UPDATE`,
	},
	"worker": {
		`UPDATE {s}.event_subscription SET changed_at = now() WHERE consumer_group = 'theirs'`,
		`UPDATE {s}.event_member SET renewed_at = now() WHERE consumer_group = 'theirs'`,
		`SELECT FROM generate_series(1, {s}.outbox_remove_member('theirs', 'm'))`,
		`UPDATE {s}.event_delivery SET locked_by = 'x' WHERE consumer_group = 'theirs'`,
		`UPDATE {s}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = now() WHERE consumer_group = 'theirs'`,
		`SELECT FROM {s}.event_delivery WHERE consumer_group = 'theirs' FOR UPDATE`,
		`SELECT FROM generate_series(1, {s}.outbox_remove_deliveries(ARRAY(SELECT ctid FROM {s}.event_delivery WHERE consumer_group = 'theirs'), 'infinity'))`,
		// Relays may have the name of a group.
		`UPDATE {s}.outbox_lease SET holder = 'mallory' WHERE name IN ('theirs', 'worker:theirs')`,
		`SELECT FROM {s}.outbox_lease WHERE name IN ('theirs', 'worker:theirs') FOR UPDATE`,
		`SELECT FROM generate_series(1, {s}.outbox_remove_cursors(ARRAY(SELECT ctid FROM {s}.outbox_cursor WHERE relay IN ('theirs', 'worker:theirs'))))`,
	},
}

// The id of a note is drawn from a sequence. Where one is taken, be it by the consumer of another
// group that may set ids, or because the sequence is that of an older backup, no event counts
// as handled that is not.
func TestTakenIDsHideNoEvent(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	_, err := s.db.Exec(background, s.sql(`INSERT INTO {s}.event_handled (id, consumer_group, aggregate_type, aggregate_id, action)
		SELECT n, 'mallory', 't', n::text, 'a' FROM generate_series(1, 3) AS n`))
	require.NoError(t, err)
	c := s.groupConsumer(t, "theirs", outbox.ConsumerConfig{}, outbox.Handle("COUNTED", s.count))
	record := s.saleRecord(uuid.NewString(), oneSale)
	require.Eventually(t, func() bool { return c.Deliver(background, record) == nil }, testenv.Patience, 10*time.Millisecond)
	require.Len(t, s.counts(t), 1)

	_, err = s.db.Exec(background, s.sql(`INSERT INTO {s}.event_handled (id, consumer_group, aggregate_type, aggregate_id, action)
		SELECT n, 'mallory', 't', n::text, 'a' FROM generate_series(20, 60) AS n`))
	require.NoError(t, err)
	s.sendTo(t, 1, 50)
	testenv.Run(t, s.groupConsumer(t, "also theirs", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count)).Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 50 }, testenv.Patience, 10*time.Millisecond)
}

// tryScript runs statements in a transaction, which it rolls back.
func tryScript(db *pgxpool.Pool, sql string) error {
	tx, err := db.Begin(background)
	if err != nil {
		return err
	}
	_, err = tx.Conn().PgConn().Exec(background, sql).ReadAll()
	return errors.Join(err, tx.Rollback(background))
}

// planted are functions and operators that fit arguments of outbox's statements better than
// those of PostgreSQL, or that stand before them. They keep who has run them.
const planted = `
CREATE TABLE {s}.caught (who text, what text);
GRANT ALL ON {s}.caught TO PUBLIC;
CREATE FUNCTION {s}.caught(what text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
	EXECUTE format('INSERT INTO %I.caught VALUES (current_user, %L)', {text}, what); END $$;
CREATE FUNCTION {s}.same(a oid, b regclass) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
	PERFORM {s}.caught('oid = regclass'); RETURN a OPERATOR(pg_catalog.=) b::oid; END $$;
CREATE OPERATOR {s}.= (FUNCTION = {s}.same, LEFTARG = oid, RIGHTARG = regclass);
CREATE FUNCTION {s}.same(a varchar, b varchar) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
	PERFORM {s}.caught('varchar = varchar'); RETURN a::text OPERATOR(pg_catalog.=) b::text; END $$;
CREATE OPERATOR {s}.= (FUNCTION = {s}.same, LEFTARG = varchar, RIGHTARG = varchar);
CREATE FUNCTION {s}.same(a varchar, b text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
	PERFORM {s}.caught('varchar = text'); RETURN a::text OPERATOR(pg_catalog.=) b; END $$;
CREATE OPERATOR {s}.= (FUNCTION = {s}.same, LEFTARG = varchar, RIGHTARG = text);
CREATE FUNCTION {s}.more(a varchar, b varchar) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
	PERFORM {s}.caught('varchar > varchar'); RETURN a::text OPERATOR(pg_catalog.>) b::text; END $$;
CREATE OPERATOR {s}.> (FUNCTION = {s}.more, LEFTARG = varchar, RIGHTARG = varchar);
CREATE FUNCTION {s}.more(a numeric, b bigint) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
	PERFORM {s}.caught('numeric >= bigint'); RETURN a OPERATOR(pg_catalog.>=) b::numeric; END $$;
CREATE OPERATOR {s}.>= (FUNCTION = {s}.more, LEFTARG = numeric, RIGHTARG = bigint);
CREATE FUNCTION {s}.step(a bigint[], b bigint) RETURNS bigint[] LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('array_agg(bigint)'); RETURN pg_catalog.array_append(a, b); END $$;
CREATE AGGREGATE {s}.array_agg(bigint) (SFUNC = {s}.step, STYPE = bigint[]);
CREATE FUNCTION {s}.step(a text[], b text) RETURNS text[] LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('array_agg(text)'); RETURN pg_catalog.array_append(a, b); END $$;
CREATE AGGREGATE {s}.array_agg(text) (SFUNC = {s}.step, STYPE = text[]);
CREATE FUNCTION {s}.step(a jsonb, b jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('jsonb_agg(jsonb)'); RETURN a OPERATOR(pg_catalog.||) b; END $$;
CREATE AGGREGATE {s}.jsonb_agg(jsonb) (SFUNC = {s}.step, STYPE = jsonb, INITCOND = '[]');
CREATE FUNCTION {s}.step(a bigint, b text) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('count(text)'); RETURN a OPERATOR(pg_catalog.+) 1; END $$;
CREATE AGGREGATE {s}.count(text) (SFUNC = {s}.step, STYPE = bigint, INITCOND = '0');
CREATE FUNCTION {s}.step(a xid8, b xid8, c int, d xid8) RETURNS xid8 LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('lead'); RETURN d; END $$;
CREATE AGGREGATE {s}.lead(xid8, int, xid8) (SFUNC = {s}.step, STYPE = xid8);
CREATE FUNCTION {s}.num_nonnulls(a jsonb, b bytea) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
	PERFORM {s}.caught('num_nonnulls'); RETURN 1; END $$;
CREATE FUNCTION {s}.format(a text, b text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('format(text, text)'); RETURN pg_catalog.format(a, VARIADIC ARRAY[b]); END $$;
CREATE FUNCTION {s}.format(a text, b name) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('format(text, name)'); RETURN pg_catalog.format(a, VARIADIC ARRAY[b]); END $$;
CREATE FUNCTION {s}.set_config(a text, b name, c boolean) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('set_config'); RETURN pg_catalog.set_config(a, b::text, c); END $$;
CREATE FUNCTION {s}.pg_has_role(a regrole, b text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
	PERFORM {s}.caught('pg_has_role'); RETURN true; END $$`

// newMallory returns a pool of a role that may do nothing but connect, and use the schema.
func newMallory(t *testing.T, h *relayFixture) (*pgxpool.Pool, string) {
	t.Helper()
	r := &roles{relayFixture: h}
	name := fmt.Sprintf("mallory_%.8s", uuid.NewString())
	_, err := h.db.Exec(background, h.sql(fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s'; GRANT USAGE ON SCHEMA {s} TO %[1]s", name, rolePassword)))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := h.db.Exec(background, fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %[1]s", name))
		require.NoError(t, err)
	})
	return r.connect(t, name), name
}

// plant makes what planted says.
func plant(t *testing.T, db *pgxpool.Pool, schema string) {
	t.Helper()
	_, err := db.Exec(background, strings.NewReplacer("{s}", pgx.Identifier{schema}.Sanitize(), "{text}", "'"+strings.ReplaceAll(schema, "'", "''")+"'").Replace(planted),
		pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
}

// caught returns who has run what was planted.
func (h *relayFixture) caught(t *testing.T) []string {
	t.Helper()
	rows, err := h.db.Query(background, h.sql(`SELECT DISTINCT who || ' ran ' || what FROM {s}.caught ORDER BY 1`))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// temporaryTables are in front of those of outbox.
const temporaryTables = `SET search_path = pg_temp, {s}; CREATE TEMPORARY TABLE outbox_partitioning (only_row boolean, rows bigint, cut bigint);
	CREATE TEMPORARY TABLE outbox_cursor (relay text); CREATE TEMPORARY TABLE outbox_lease (name text, holder text, epoch bigint);
	CREATE TEMPORARY TABLE pg_class (oid oid, relname name); CREATE TEMPORARY TABLE pg_inherits (inhrelid oid, inhparent oid);
	CREATE TEMPORARY TABLE event_subscription (consumer_group text); CREATE TEMPORARY TABLE event_delivery (consumer_group text);
	INSERT INTO outbox_lease VALUES ('r', 'h', 1);`

// cut moves a group to Kafka, back, and takes it back, as an operator: in a session with temporary tables, and
// without. These functions must be the first of their transactions.
func (r *roles) cut(t *testing.T, temporary string) {
	t.Helper()
	const position = `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT %s, 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system();`
	session, err := r.as(t, "operator").Acquire(background)
	require.NoError(t, err)
	defer session.Release()
	for _, cut := range []struct{ before, call string }{
		{`INSERT INTO {s}.event_subscription (consumer_group) VALUES ('g');` + fmt.Sprintf(position, "'worker:g'"), `outbox_cut_to_kafka('{g}', 'q', 'kim', 'why')`},
		{``, `outbox_cancel_cut('q', 'kim', 'why')`},
		{`UPDATE {s}.event_subscription SET state = 'left', relay = 'q'; DELETE FROM {s}.outbox_lease;` + fmt.Sprintf(position, "'q'"),
			`outbox_cut_to_postgres('{g}', 'q', '{}', 'kim', 'why')`},
		{``, `outbox_finish_cut('q', false, 'kim', 'why')`},
	} {
		_, err := r.db.Exec(background, r.sql(cut.before), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		for _, set := range []string{temporary, "DISCARD TEMP; SET search_path = {s}"} {
			_, err = session.Conn().PgConn().Exec(background, r.sql(set)).ReadAll()
			require.NoError(t, err)
			tx, err := session.Begin(background)
			require.NoError(t, err)
			_, err = tx.Exec(background, r.sql(`SELECT {s}.`+cut.call))
			require.NoError(t, err, cut.call)
			require.NoError(t, tx.Rollback(background))
		}
		_, err = session.Exec(background, r.sql(`SELECT {s}.`+cut.call))
		require.NoError(t, err, cut.call)
	}
}

// Where a stranger may create in the schema, he does not get the rights of the owner by the
// functions that run with them. (He gets those of the roles whose search_path has it: the
// doctor reports it.)
func TestFunctionsRunNothingOfOthers(t *testing.T) {
	inEachPlace(t, 10, func(t *testing.T, h *relayFixture) {
		r := newRoles(t, h)
		h.commit(t, numbered("key", 1, 1)...)
		mallory, _ := newMallory(t, h)
		plant(t, mallory, h.schema)
		for role, calls := range map[string][]string{
			"relay": {`SELECT * FROM {s}.outbox_partitions()`, `SELECT {s}.outbox_relays()`, `SELECT {s}.outbox_make_partitions()`,
				`SELECT {s}.outbox_drop_partition('outbox_min_10', true, '1:1:', now(), '{}', 'r', 'h', 1)`,
				`SELECT {s}.outbox_drop_partition('x"; DROP TABLE outbox; --', true, '1:1:', now(), '{}', 'r', 'h', 1)`},
			"operator": {`SELECT {s}.outbox_retry_failed('{1}', 'kim', 'why')`, `SELECT {s}.outbox_resolve_failed('{1}', 'kim', 'why')`,
				`SELECT {s}.outbox_edit_failed(1, '{}', 'kim', 'why')`, `SELECT {s}.outbox_hold_key('r', 'k', 'kim', 'why')`,
				`SELECT {s}.outbox_release_key('r', 'k', 'kim', 'why')`, `SELECT {s}.outbox_pause_consumer('g', 't', 'kim', 'why')`,
				`SELECT {s}.outbox_resume_consumer('g', 't', 'kim', 'why')`, `SELECT {s}.outbox_audit_read(1, 'kim', 'why')`,
				`SELECT {s}.outbox_audit_read_recorded(1, 'kim', 'why')`, `SELECT {s}.outbox_audit_read_delivery(1, 'kim', 'why')`,
				`SELECT {s}.outbox_edit_delivery(1, '{}', 'kim', 'why')`, `SELECT {s}.outbox_audit_edit('t', 'k', 'g', 'a', 'x', 'kim', 'why')`,
				`SELECT {s}.outbox_requeue_deliveries('{1,2}', 'kim', 'why')`, `SELECT {s}.outbox_resolve_deliveries('{1,2}', 'kim', 'why')`,
				`SELECT {s}.outbox_hold_deliveries('{1,2}', 'kim', 'why')`, `SELECT {s}.outbox_release_deliveries('{1,2}', 'kim', 'why')`,
				`SELECT {s}.outbox_rewind_consumer('g', '{t}', ARRAY[]::uuid[], '{0}', '{1}', 'kim', 'why')`,
				`SELECT {s}.outbox_audit_replay('t', 'g', 'kim', 'why')`, `SELECT {s}.outbox_cancel_delayed(ARRAY[gen_random_uuid()], 'kim', 'why')`, `SELECT {s}.outbox_forget_handled('g', '{t}', '{i}', '{o}', '{b}', now(), 'kim', 'why')`},
			"consumer": {`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('product-statistics', 't', 'i', 'a')`,
				`SELECT {s}.outbox_remove_gaps('product-statistics', '{t}', ARRAY[gen_random_uuid()], '{0}', '{a}', '{e}', '{1}')`,
				`SELECT {s}.outbox_remove_topics('product-statistics', '{t}', ARRAY[gen_random_uuid()])`},
			"worker": {`SELECT {s}.outbox_lock_keys('product-statistics', '{1,2}')`, `SELECT {s}.outbox_promote('product-statistics', '{1,2}')`,
				`SELECT {s}.outbox_finish_deliveries('product-statistics', 'w', '{}', '{}', '{}')`,
				`SELECT {s}.outbox_remove_handled('{"(0,1)"}', now())`, `SELECT {s}.outbox_remove_deliveries('{"(0,1)"}', now())`,
				`SELECT {s}.outbox_remove_cursors('{"(0,1)"}')`, `SELECT {s}.outbox_remove_member('product-statistics', NULL)`,
				`SELECT {s}.outbox_move_due(NULL, '{}')`},
			"writer": {`SELECT {s}.outbox_cancel(gen_random_uuid())`},
		} {
			db := r.as(t, role)
			for _, call := range calls { // with a temporary table of every name, found first
				require.NoError(t, tryScript(db, h.sql(temporaryTables+call)), "%s: %s", role, call)
				require.NoError(t, tryScript(db, h.sql("SET LOCAL search_path = {s};"+call)), "%s: %s", role, call)
				_, err := db.Exec(background, h.sql(call))
				require.NoError(t, err)
			}
		}
		r.cut(t, temporaryTables)
		_, err := h.db.Exec(background, h.sql(`SELECT {s}.outbox_partition(), {s}.outbox_prepare_partitions(10), {s}.outbox_revoke_grants('outbox_default')`))
		require.NoError(t, err)
		for _, caught := range h.caught(t) {
			require.Regexp(t, `^outbox_\w+_login ran `, caught, "a role's own statement, and not the owner")
		}
		require.Equal(t, 1, h.count(t, "outbox"))
		require.Positive(t, len(h.partitions(t)))
	})
}

// A role that could create in the schema before Migrate gains no rights by Migrate.
func TestMigrateRunsNothingOfOthers(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db, schema := testenv.Schema(t)
	h := &relayFixture{db: db, schema: schema}
	owner := fmt.Sprintf("owner_%.8s", uuid.NewString())
	_, err := db.Exec(background, h.sql(fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD '%s'; ALTER SCHEMA {s} OWNER TO %[1]s; GRANT CREATE ON SCHEMA {s} TO PUBLIC`, owner, rolePassword)))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := db.Exec(background, h.sql(fmt.Sprintf(`DROP OWNED BY %s CASCADE; DROP ROLE %[1]s; CREATE SCHEMA IF NOT EXISTS {s}`, owner)))
		require.NoError(t, err)
	})
	mallory, name := newMallory(t, h)
	plant(t, mallory, schema)
	_, err = mallory.Exec(background, h.sql(`CREATE VIEW {s}.outbox_migration AS SELECT 100 AS version FROM {s}.caught('the table of migrations')`))
	require.NoError(t, err)

	migrator := (&roles{relayFixture: h}).connect(t, owner)
	var log testenv.Buffer
	cfg := outbox.MigrateConfig{Schema: schema, PartitionRows: 100, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	_, err = outbox.MigrationStatus(background, migrator, cfg)
	require.NoError(t, err)
	err = outbox.Migrate(background, migrator, cfg)
	require.ErrorIs(t, err, outbox.ErrForeignObjects)
	for _, what := range []string{name, "num_nonnulls(jsonb,bytea)", "operator", "outbox_migration"} {
		require.ErrorContains(t, err, what)
	}
	require.Empty(t, h.caught(t))
	require.Contains(t, log.String(), "revoked from PUBLIC")
	_, err = mallory.Exec(background, h.sql(`CREATE FUNCTION {s}.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()'`))
	require.True(t, isDenied(err), "%v", err)

	_, err = mallory.Exec(background, "DROP OWNED BY "+name+" CASCADE")
	require.NoError(t, err)
	require.NoError(t, outbox.Migrate(background, migrator, cfg))
	require.Len(t, applied(t, db, schema), len(files(t)))
}

// Tables of a stranger that look as if all files had been applied are not taken for outbox's own.
func TestMigrateTakesNoTablesOfOthers(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db, schema := testenv.Schema(t)
	h := &relayFixture{db: db, schema: schema}
	_, err := db.Exec(background, h.sql(`GRANT CREATE ON SCHEMA {s} TO PUBLIC`))
	require.NoError(t, err)
	mallory, name := newMallory(t, h)
	_, err = mallory.Exec(background, h.sql(`CREATE TABLE {s}.outbox_migration AS SELECT 1000 AS version, 'x' AS name, now() AS applied_at`))
	require.NoError(t, err)
	for _, version := range []int{1000, len(files(t)), 0} {
		_, err = mallory.Exec(background, h.sql(`UPDATE {s}.outbox_migration SET version = $1`), version)
		require.NoError(t, err)
		err = outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema})
		require.ErrorIs(t, err, outbox.ErrForeignObjects, version)
		require.ErrorContains(t, err, name)
	}
}

// What was put in the place of PostgreSQL's own before another tool applied the files is found
// by the last of them.
func TestMigrationsByHandRunNothingOfOthers(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	f := &schemaFixture{db: db, schema: schema}
	plant(t, f.db, f.schema)
	last := len(files(t)) - 1
	for _, name := range files(t)[:last] {
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		f.script(t, string(sql))
	}
	sql, err := fs.ReadFile(migrations.FS, files(t)[last])
	require.NoError(t, err)
	err = f.tryScript(string(sql))
	require.ErrorContains(t, err, "num_nonnulls")
	require.ErrorContains(t, err, "outbox_one_payload")
}

// A partition has no rights of its own, neither from before outbox was partitioned nor by
// default.
func TestRightsCoverPartitions(t *testing.T) {
	inEachPlace(t, 0, func(t *testing.T, h *relayFixture) {
		r := newRoles(t, h)
		role := "outbox_reader" + r.suffix
		for _, sql := range []string{
			`ALTER DEFAULT PRIVILEGES IN SCHEMA {s} GRANT ALL ON TABLES TO ` + role, `GRANT UPDATE (payload), SELECT ON {s}.outbox TO ` + role,
		} {
			_, err := h.db.Exec(background, h.sql(sql))
			require.NoError(t, err)
		}
		require.NoError(t, outbox.Migrate(background, h.db, outbox.MigrateConfig{Schema: h.schema, PartitionRows: 10}))
		reader := r.as(t, "reader")
		_, err := reader.Exec(background, h.sql(`SELECT FROM {s}.outbox`))
		require.NoError(t, err)
		_, err = reader.Exec(background, h.sql(`DELETE FROM {s}.outbox`))
		require.True(t, isDenied(err), "by default, on the new table of this name: %v", err)
		_, err = h.db.Exec(background, h.sql(`REVOKE ALL ON {s}.outbox FROM `+role))
		require.NoError(t, err)
		for _, p := range append(h.partitions(t), "outbox_default", "outbox") {
			for _, sql := range []string{`SELECT FROM {t}`, `UPDATE {t} SET payload = payload`, `DELETE FROM {t}`} {
				err := tryScript(reader, strings.ReplaceAll(sql, "{t}", pgx.Identifier{h.schema, p}.Sanitize()))
				require.True(t, isDenied(err), "%s of %s: %v", sql, p, err)
			}
		}
	})
}

// ofView reports whether nobody may do something because it is to a view.
func ofView(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "55000" || pg.Code == "42809") && strings.Contains(err.Error(), "outbox_pending")
}

func isDenied(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "42501"
}
