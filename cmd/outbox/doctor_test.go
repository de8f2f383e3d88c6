package main

import (
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
)

// doctorJSON is the document of doctor.
type doctorJSON struct {
	Database string    `json:"database"`
	Schema   string    `json:"schema"`
	Kafka    string    `json:"kafka"`
	Checks   int       `json:"checks"`
	Findings []finding `json:"findings"`
}

// newClinic returns a shop whose only problems are made by the test. Other tests on the cluster may have
// transactions open. It sets up sessions: call testenv.Direct first.
func newClinic(t testing.TB) *commandFixture {
	t.Helper()
	d := newCommandFixture(t).migrate(t) // not a used schema, which has dead rows and statistics
	// Before version 15 everybody may create in public, which the doctor finds.
	d.vars["DATABASE_URL"] = d.url("&options=-c%20idle_in_transaction_session_timeout%3D60000%20-c%20search_path%3Dpg_catalog")
	return d
}

// findings runs the doctor. The exit code must match the findings.
func (d *commandFixture) findings(t testing.TB, args ...string) []finding {
	t.Helper()
	a := d.call(t, append([]string{"doctor", "--json", "--open-for", "1h"}, args...)...)
	require.Empty(t, a.err)
	var out doctorJSON
	unmarshal(t, a.out, &out)
	require.Equal(t, areProblems(out.Findings), a.code == exitProblems, a.out)
	require.Contains(t, []int{exitOK, exitProblems}, a.code)
	require.Positive(t, out.Checks)
	for _, f := range out.Findings {
		require.Contains(t, findingIDs(), f.ID, "--only and --skip know it")
		require.NotEmpty(t, f.What)
		require.NotEmpty(t, f.Means, f.ID)
		require.NotEmpty(t, f.Do, f.ID)
	}
	return out.Findings
}

// requireFinding requires one finding and nothing else.
func (d *commandFixture) requireFinding(t testing.TB, id, severity, what string, args ...string) finding {
	t.Helper()
	all := d.findings(t, args...)
	require.Len(t, all, 1, "%v", all)
	require.Equal(t, id, all[0].ID)
	require.Equal(t, severity, all[0].Severity)
	require.Contains(t, all[0].What, what)
	return all[0]
}

// Where nothing is wrong nothing is found.
func TestDoctorFindsNothing(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t).withKafka(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	d.relay(t)
	d.record(t, "a", "b")
	d.requireSent(t)
	d.requireFinding(t, "kafka.auto_create", severityNote, "auto.create.topics.enable") // so the broker of the tests is
	require.Empty(t, d.findings(t, "--skip", "kafka.auto_create"))
	require.Empty(t, d.findings(t, "--only", "tables,relay"))
	d.change = terminal
	text := d.ok(t, "doctor", "--open-for", "1h", "--skip", "kafka")
	require.Contains(t, text, "Nothing is wrong: ")
	require.Contains(t, text, "database ")
	requireNarrow(t, text)
}

// faults are changes that break the tables of a shop, with the findings of the doctor.
var faults = []struct {
	name, breaks       string // {s} is the schema
	id, severity, what string
}{
	{"index dropped", `DROP INDEX {s}.outbox_xid_id_idx`, "tables.index", severityError, "outbox_xid_id_idx of outbox is missing"},
	{"index altered", `DROP INDEX {s}.idx_outbox_failed_dead; CREATE INDEX idx_outbox_failed_dead ON {s}.outbox_failed (id)`,
		"tables.index", severityWarning, "idx_outbox_failed_dead of outbox_failed is altered"},
	{"unique index added", `CREATE UNIQUE INDEX mine ON {s}.outbox (event_id)`, "tables.index", severityWarning, "index mine of outbox is not of outbox"},
	{"constraint dropped", `ALTER TABLE {s}.outbox DROP CONSTRAINT outbox_one_payload`, "tables.constraint", severityError, "outbox_one_payload of outbox is missing"},
	{"constraint altered", `ALTER TABLE {s}.outbox_failed DROP CONSTRAINT outbox_failed_status, ADD CONSTRAINT outbox_failed_status CHECK (status <> '')`,
		"tables.constraint", severityWarning, "outbox_failed_status of outbox_failed is altered"},
	{"constraint added", `ALTER TABLE {s}.outbox ADD CONSTRAINT mine CHECK (aggregate_id <> '')`, "tables.constraint", severityWarning, "mine of outbox is not of outbox"},
	{"column dropped", `ALTER TABLE {s}.outbox_audit DROP COLUMN payload_bytes`, "tables.column", severityError, "payload_bytes of outbox_audit is missing"},
	{"column altered", `ALTER TABLE {s}.outbox_failed ALTER COLUMN retry_count TYPE bigint`, "tables.column", severityWarning, "retry_count of outbox_failed is altered: bigint"},
	{"default dropped", `ALTER TABLE {s}.outbox ALTER COLUMN xid DROP DEFAULT`, "tables.column", severityWarning, "xid of outbox is altered"},
	{"column added", `ALTER TABLE {s}.outbox ADD COLUMN mine int NOT NULL DEFAULT 0; ALTER TABLE {s}.outbox ALTER COLUMN mine DROP DEFAULT`, "tables.column", severityWarning, "mine of outbox is not of outbox"},
	{"table dropped", `DROP TABLE {s}.event_handled`, "tables.table", severityError, "table event_handled is missing"},
	{"trigger added", `CREATE TRIGGER mine BEFORE UPDATE ON {s}.outbox FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
		"tables.trigger", severityWarning, "trigger mine of outbox is not of outbox"},
	{"policy dropped", `DROP POLICY event_handled_write ON {s}.event_handled`, "tables.policy", severityError, "event_handled_write of event_handled is missing"},
	{"policy added", `CREATE POLICY mine ON {s}.consumer_start USING (true)`, "tables.policy", severityWarning, "policy mine of consumer_start is not of outbox"},
	{"row security off", `ALTER TABLE {s}.consumer_start DISABLE ROW LEVEL SECURITY`, "tables.security", severityError, "consumer_start has no row level security"},
	{"delayed events published", `CREATE PUBLICATION {s} FOR TABLE {s}.outbox, {s}.outbox_delayed`, "tables.published", severityWarning, "delayed events are published by"},
	{"autovacuum off", `ALTER TABLE {s}.outbox SET (autovacuum_enabled = off)`, "tables.autovacuum", severityWarning, "autovacuum is off for outbox"},
	{"sequence cached", `ALTER SEQUENCE {s}.outbox_id_seq CACHE 20`, "sequence.cache", severityError, "CACHE 20"},
	{"sequence behind", `SELECT setval('{s}.outbox_id_seq', max(id), false) FROM {s}.outbox`, "sequence.behind", severityError, "behind id"},
	{"sequence set back", `ALTER SEQUENCE {s}.outbox_id_seq RESTART WITH 1`, "sequence.behind", severityError, "is at 0, behind id"},
	{"sequence behind a failed event", `UPDATE {s}.outbox_failed SET outbox_id = 1000`, "sequence.behind", severityError, "behind id 1000"},
	{"sequence set ahead", `ALTER SEQUENCE {s}.outbox_id_seq RESTART WITH 100000`, "", "", ""},
	{"sequence missing", `ALTER SEQUENCE {s}.outbox_id_seq OWNED BY NONE`, "sequence.missing", severityError, "no sequence of its own"},
	{"migration unknown", `INSERT INTO {s}.outbox_migration VALUES (1000, '1000_later.sql')`, "migrations.ahead", severityError, "1000_later.sql"},
	{"dead", `UPDATE {s}.outbox_failed SET status = 'dead'`, "failed.dead", severityWarning, "1 event is dead"},
	{"parked", `UPDATE {s}.outbox_failed SET status = 'waiting', next_retry_at = now() + '4 min'`, "failed.parked", severityWarning, "1 key is parked"},
	{"held", `UPDATE {s}.outbox_failed SET status = 'waiting', held = true`, "failed.held", severityWarning, "1 key is held"},
	{"type without topic", `WITH keep AS MATERIALIZED (SELECT set_config('outbox.keep_xid', 'on', true))
		UPDATE {s}.outbox SET topic = NULL, event_type = 'nowhere' FROM keep`, "events.topic", severityError, "nowhere"},
	{"nothing harmful", `CREATE INDEX mine ON {s}.outbox (aggregate_id, id); ALTER TABLE {s}.outbox ADD COLUMN mine int`, "", "", ""},
}

// Each thing that is broken is found, and nothing else.
func TestDoctorFindsWhatIsBroken(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for _, test := range faults {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d := newClinic(t)
			d.relay(t)
			d.record(t, "a")
			d.requireSent(t)
			d.fail(t, outbox.StatusResolved, "b")
			require.Empty(t, d.findings(t))
			for _, statement := range strings.Split(test.breaks, ";") {
				d.exec(t, statement)
			}
			if test.id == "" {
				require.Empty(t, d.findings(t))
				return
			}
			d.requireFinding(t, test.id, test.severity, test.what)
			d.change = terminal
			text := d.call(t, "doctor", "--open-for", "1h").out
			requireNarrowOrStatement(t, text)
			require.Contains(t, text, "["+test.id+"]")
		})
	}
}

// requireNarrowOrStatement allows for words that cannot be broken.
func requireNarrowOrStatement(t testing.TB, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if len(strings.Fields(line)) > 1 {
			requireNarrow(t, line)
		}
	}
}

// requireSent waits until nothing is pending: a leader says only about a second after its lease whether it works, which
// the doctor notes while events are pending.
func (d *commandFixture) requireSent(t testing.TB) {
	t.Helper()
	require.Eventually(t, func() bool { return d.pending(t) == 0 }, testenv.Patience, 10*time.Millisecond)
}

func (d *commandFixture) pending(t testing.TB) int64 {
	t.Helper()
	relays, err := d.inspector(t).Relays(background)
	require.NoError(t, err)
	require.Len(t, relays, 1)
	return relays[0].Pending
}

// The doctor compares tables with the result of Migrate.
func TestExpectedTables(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	e := &env{db: d.db, globals: globals{schema: d.schema}}
	have, err := things(background, e)
	require.NoError(t, err)
	var lines []string
	for _, thing := range have {
		require.NotContains(t, thing.definition, "\n", "a line of the file is a thing")
		lines = append(lines, strings.Join([]string{thing.kind, thing.table, thing.name, thing.definition}, "\t")+"\n")
	}
	slices.Sort(lines)
	requireFile(t, "expected.txt", strings.Join(lines, ""))
	if !*update { // it is compiled in
		require.Empty(t, compare(expected(), have))
	}
}

func TestDoctorWithoutDatabase(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.vars["DATABASE_URL"] = "postgres://someone:hunter22@127.0.0.1:1/nowhere?connect_timeout=2"
	f := d.requireFinding(t, "database.connect", severityError, "someone@127.0.0.1:1/nowhere")
	require.NotContains(t, fmt.Sprint(f), "hunter22")
}

// Tables that are missing, elsewhere, or made by another tool.
func TestDoctorOnMigrations(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.requireFinding(t, "migrations.none", severityError, "schema public", "--schema", "public")
	for _, f := range d.findings(t, "--schema", "public", "--kafka", strings.Join(testenv.Brokers(t), ",")) {
		require.False(t, strings.HasPrefix(f.ID, "doctor."), "it looks at tables that are not there: %v", f)
	}
	d.exec(t, `DELETE FROM {s}.outbox_migration`)
	d.relay(t)
	require.Empty(t, d.findings(t), "another tool has made them")
	if _, err := outbox.MigrationStatus(background, d.db, outbox.MigrateConfig{Schema: d.schema}); err != nil {
		t.Fatal(err)
	}
	all := []outbox.Migration{{Version: 1, Name: "1", AppliedAt: time.Now()}, {Version: 2, Name: "2_new.sql"}}
	doc := &doctor{e: &env{}}
	require.False(t, doc.checkMigrations(all))
	require.Equal(t, "migrations.pending", doc.findings[0].ID)
	require.Contains(t, doc.findings[0].What, "2_new.sql")
}

// Partitions are no alteration, and are looked at like tables.
func TestDoctorOnPartitions(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.ok(t, "migrate", "up", "--partition-rows", "1000")
	d.relay(t)
	d.record(t, "a")
	d.requireSent(t)
	require.Empty(t, d.findings(t))
	var partition string
	require.NoError(t, d.db.QueryRow(background, `SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
		WHERE inhparent = to_regclass($1) LIMIT 1`, pgx.Identifier{d.schema, "outbox"}.Sanitize()).Scan(&partition))
	d.exec(t, "ALTER TABLE {s}."+pgx.Identifier{partition}.Sanitize()+" SET (autovacuum_enabled = off)")
	d.requireFinding(t, "tables.autovacuum", severityWarning, partition)
}

// No process leads, or none ever has, and recorded events get old.
func TestDoctorOnRelays(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.requireFinding(t, "relay.none", severityNote, "no relay has run here yet")
	d.relay(t)()
	f := d.requireFinding(t, "relay.leader", severityError, "relay default: no process leads")
	require.Contains(t, f.Do, "Relay.Run")
	d.record(t, "a")
	require.Eventually(t, func() bool {
		all := d.findings(t, "--max-age", "50ms", "--skip", "relay.leader")
		return len(all) == 1 && all[0].ID == "relay.backlog"
	}, testenv.Patience, 20*time.Millisecond)
}

// Groups that read in Kafka, and whose last relay has ended by a cut.
func TestDoctorOnEndedRelay(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('r', 'outbox cut', 1, 'infinity', '0');
		INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ('mail', 'orders', gen_random_uuid(), -1), ('stats', 'orders', gen_random_uuid(), -1);
		INSERT INTO {s}.event_subscription (consumer_group) VALUES ('stats')`)
	f := d.requireFinding(t, "relay.ended", severityWarning, "group mail reads from Kafka, where no relay sends: relay r has ended by a cut")
	require.Contains(t, f.Do, "DELETE FROM")
	require.Len(t, d.findings(t, "--only", "relay.ended"), 1)
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group, state, started) VALUES ('mail', 'starting', 0)`)
	f = d.requireFinding(t, "relay.ended", severityWarning, "group mail reads from Kafka, where no relay sends: relay r has ended by a cut")
	require.Contains(t, f.Do, `"outbox_cursor" WHERE relay = 'worker:mail'`, "its position keeps rows of outbox")
	require.Len(t, d.findings(t, "--only", "relay.ended"), 1, "mail reads from Kafka once it has the events of the archive")
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('other', 0, '1:1:', 0, 1, 1)`)
	require.Len(t, d.findings(t, "--only", "relay.ended"), 1, "other does not run")
	d.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('other', 'host/1', 1, now() + interval '1 h', '30s')`)
	require.Empty(t, d.findings(t, "--only", "relay.ended"))
}

// The doctor finds transactions that were left open, with their owners, and prepared transactions.
func TestDoctorOnTransactions(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.relay(t)
	named := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = d.topic })
	tx, err := named.Begin(background)
	require.NoError(t, err)
	require.NoError(t, d.rec.Record(background, tx, happened{Key: "open", At: time.Now()}))
	find := func(what string) func() bool {
		return func() bool {
			var out doctorJSON
			unmarshal(t, d.call(t, "doctor", "--json", "--open-for", "50ms").out, &out)
			i := slices.IndexFunc(out.Findings, func(f finding) bool { return strings.Contains(f.What, what) })
			return i >= 0 && strings.Contains(out.Findings[i].Means, "wait for its commit") && strings.HasPrefix(out.Findings[i].ID, "transaction.")
		}
	}
	require.Eventually(t, find(d.topic), testenv.Patience, 20*time.Millisecond)
	require.NoError(t, tx.Rollback(background))
	require.False(t, find(d.topic)())

	gid := "cli-" + uuid.NewString()
	tx, err = named.Begin(background)
	require.NoError(t, err)
	require.NoError(t, d.rec.Record(background, tx, happened{Key: "prepared", At: time.Now()}))
	_, err = tx.Exec(background, "PREPARE TRANSACTION '"+gid+"'")
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(background)) // there is none any more
	require.Eventually(t, find(gid), testenv.Patience, 20*time.Millisecond)
	d.exec(t, "ROLLBACK PREPARED '"+gid+"'")
	require.False(t, find(gid)())
}

// The roles of docs/roles.md have all necessary privileges. The doctor finds each privilege that is taken
// away.
func TestDoctorOnPrivileges(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.ok(t, "migrate", "up", "--partition-rows", "1000")
	d.relay(t)
	doc, err := os.ReadFile("../../docs/roles.md")
	require.NoError(t, err)
	suffix := fmt.Sprintf("_%.8s", uuid.NewString())
	schema := pgx.Identifier{d.schema}.Sanitize()
	var grants []string
	require.NoError(t, pgx.BeginFunc(background, d.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, "SET LOCAL search_path = "+schema)
		require.NoError(t, err)
		for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllSubmatch(doc, -1) {
			sql := regexp.MustCompile(`\boutbox_(writer|relay|consumer|worker|inbox|reader|operator)\b`).ReplaceAllString(string(block[1]), "outbox_${1}"+suffix)
			for _, statement := range strings.Split(strings.ReplaceAll(sql, "SCHEMA public", "SCHEMA "+schema), ";") {
				if statement = strings.TrimSpace(statement); strings.HasPrefix(statement, "GRANT") || strings.HasPrefix(statement, "INSERT") {
					grants = append(grants, statement)
				}
				if _, err := tx.Exec(background, statement); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	parts := []string{"writer", "relay", "consumer", "worker", "inbox", "reader", "operator"}
	var as []string
	for _, p := range parts {
		as = append(as, p+"=outbox_"+p+suffix)
		t.Cleanup(func() {
			d.exec(t, "DROP OWNED BY outbox_"+p+suffix)
			d.exec(t, "DROP ROLE outbox_"+p+suffix)
		})
	}
	find := func() []finding { return d.findings(t, "--as", strings.Join(as, ","), "--only", "privileges,doctor") }
	require.Empty(t, find())
	require.Greater(t, len(grants), 15)
	run := func(statement string) {
		require.NoError(t, pgx.BeginFunc(background, d.db, func(tx pgx.Tx) error {
			if _, err := tx.Exec(background, "SET LOCAL search_path = "+schema); err != nil {
				return err
			}
			_, err := tx.Conn().PgConn().Exec(background, statement).ReadAll()
			return err
		}), statement)
	}
	revoke := func(grant string) string {
		if strings.HasPrefix(grant, "INSERT") {
			return fmt.Sprintf("DELETE FROM consumer_group_role WHERE role = '%s'", regexp.MustCompile(`outbox_(relay|consumer|worker|inbox)_\w+`).FindString(grant))
		}
		return strings.Replace(strings.Replace(grant, "GRANT", "REVOKE", 1), " TO ", " FROM ", 1)
	}
	for _, grant := range grants {
		run(revoke(grant))
		all := find()
		require.NotEmpty(t, all, grant)
		for _, f := range all {
			require.True(t, strings.HasPrefix(f.ID, "privileges."), f.ID)
		}
		run(grant)
		require.Empty(t, find(), grant)
	}
	for _, grant := range grants { // the doctor's advice solves the problem
		run(revoke(grant))
	}
	for _, f := range find() {
		run(f.Do)
	}
	require.Empty(t, find())

	// The doctor finds unnecessary privileges, and privileges that let other roles act with these rights.
	for _, test := range []struct{ grant, id, what string }{
		{"GRANT UPDATE ON outbox_failed TO outbox_operator", "privileges.excess", "has UPDATE on outbox_failed"},
		{"GRANT INSERT ON outbox_audit TO outbox_relay", "privileges.excess", "has INSERT on outbox_audit"},
		{"GRANT UPDATE ON event_delivery TO outbox_operator", "privileges.excess", "has UPDATE on event_delivery"},
		{"GRANT UPDATE (payload) ON event_delivery TO outbox_worker", "privileges.excess", "has UPDATE on event_delivery (payload)"},
		{"GRANT EXECUTE ON FUNCTION outbox_requeue_deliveries(bigint[], text, text) TO outbox_worker", "privileges.excess", "has EXECUTE on function outbox_requeue_deliveries"},
		{"GRANT INSERT ON event_handled TO outbox_consumer", "privileges.excess", "has INSERT on event_handled"},
		{"GRANT UPDATE ON event_handled TO outbox_consumer", "privileges.excess", "has UPDATE on event_handled"},
		{"GRANT INSERT ON outbox TO outbox_writer", "privileges.excess", "has INSERT on outbox"},
		{"GRANT EXECUTE ON FUNCTION outbox_hold_key(text, text, text, text) TO outbox_relay", "privileges.excess", "has EXECUTE on function outbox_hold_key"},
		{"GRANT UPDATE (topic) ON outbox TO outbox_relay", "privileges.excess", "has UPDATE on outbox (topic)"},
		{"GRANT SELECT (payload) ON outbox TO outbox_writer", "privileges.excess", "has SELECT on outbox (payload)"},
		{"GRANT UPDATE ON SEQUENCE outbox_id_seq TO outbox_writer", "privileges.excess", "has UPDATE on sequence outbox_id_seq"},
		{"GRANT TRUNCATE ON event_handled TO outbox_consumer", "privileges.excess", "has TRUNCATE on event_handled"},
		{"GRANT SELECT ON outbox_default TO outbox_reader", "privileges.partitions", "has SELECT on partition outbox_default itself"},
		{"GRANT CREATE ON SCHEMA " + schema + " TO PUBLIC", "privileges.schema", "everybody may create in schema"},
		{"GRANT CREATE ON SCHEMA " + schema + " TO outbox_writer", "privileges.schema", "may create in schema"},
	} {
		run(regexp.MustCompile(`\b(outbox_(?:writer|relay|consumer|worker|inbox|reader|operator))\b`).ReplaceAllString(test.grant, "${1}"+suffix))
		all := find()
		require.Len(t, all, 1, "%s: %v", test.grant, all)
		require.Equal(t, test.id, all[0].ID)
		require.Contains(t, all[0].What, test.what)
		run(all[0].Do)
		require.Empty(t, find(), all[0].Do)
	}
	// The working role is a member of the role that has the rights.
	member := "shop" + suffix
	run("CREATE ROLE " + member + " IN ROLE outbox_relay" + suffix)
	t.Cleanup(func() { d.exec(t, "DROP ROLE "+member) })
	run("GRANT INSERT ON outbox_audit TO PUBLIC, outbox_relay" + suffix)
	all := d.findings(t, "--as", "relay="+member, "--only", "privileges,doctor")
	require.Len(t, all, 1)
	run(all[0].Do)
	require.Empty(t, d.findings(t, "--as", "relay="+member, "--only", "privileges,doctor"))
	require.Empty(t, find())

	consumer := "outbox_consumer" + suffix
	run("INSERT INTO consumer_group_role (consumer_group, role) VALUES ('*', '" + consumer + "'), ('g', 'nobody here')")
	all = find()
	require.Len(t, all, 2)
	require.Contains(t, all[0].What, "role "+consumer+" may write for all consumer groups")
	require.Contains(t, all[1].What, "names role nobody here")
	run("DELETE FROM consumer_group_role WHERE role = 'nobody here' OR consumer_group = '*' AND role = '" + consumer + "'")
	run("GRANT pg_write_all_data TO " + consumer)
	require.True(t, slices.ContainsFunc(find(), func(f finding) bool {
		return strings.Contains(f.What, "role "+consumer+" may write for all consumer groups, as it may write all data")
	}))
	run("REVOKE pg_write_all_data FROM " + consumer)
	run("GRANT CREATE ON SCHEMA " + schema + " TO " + consumer)
	run("SET LOCAL ROLE " + consumer + "; CREATE FUNCTION " + schema + ".format(text, text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'")
	run("REVOKE CREATE ON SCHEMA " + schema + " FROM " + consumer)
	all = find()
	require.Len(t, all, 1)
	require.Equal(t, "privileges.foreign", all[0].ID)
	require.Contains(t, all[0].What, "format(text,text) of role "+consumer)
	run("DROP FUNCTION " + schema + ".format(text, text)")

	d.requireFinding(t, "privileges.role", severityError, `no role "nobody here"`, "--as", "relay=nobody here")
}

// Statements of outbox look for functions and operators in all schemas of search_path, which often include
// public.
func TestDoctorOnOtherSchemasOfThePath(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.relay(t)
	suffix := uuid.NewString()[:8]
	session, ofRole, role := `of the "session" `+suffix, "of_role_"+suffix, "cli_"+suffix
	for _, schema := range []string{session, ofRole} {
		quoted := pgx.Identifier{schema}.Sanitize()
		d.exec(t, "CREATE SCHEMA "+quoted)
		d.exec(t, "GRANT CREATE ON SCHEMA "+quoted+" TO PUBLIC")
		t.Cleanup(func() { d.exec(t, "DROP SCHEMA "+quoted) })
	}
	d.exec(t, fmt.Sprintf(`CREATE ROLE %s; ALTER ROLE %[1]s SET search_path = nowhere, %s`, role, ofRole))
	t.Cleanup(func() { d.exec(t, "DROP ROLE "+role) })
	d.vars["DATABASE_URL"] = d.url("&search_path=" + url.PathEscape(pgx.Identifier{session}.Sanitize()))
	find := func(args ...string) []finding {
		return d.findings(t, append([]string{"--only", "privileges.schema,doctor"}, args...)...)
	}
	all := find()
	require.Len(t, all, 1)
	require.Contains(t, all[0].What, "everybody may create in schema "+session)
	require.Equal(t, severityError, all[0].Severity)
	all = find("--as", "reader="+role)
	require.Len(t, all, 2)
	require.Contains(t, all[1].What, "everybody may create in schema "+ofRole)
	for _, f := range all {
		d.exec(t, f.Do)
	}
	require.Empty(t, find("--as", "reader="+role))
}

// A role that may not read gets a finding, and the rest goes on.
func TestDoctorMayNotLook(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	role := fmt.Sprintf("cli_%.8s", uuid.NewString())
	d.exec(t, "CREATE ROLE "+role)
	d.exec(t, "GRANT USAGE ON SCHEMA {s} TO "+role)
	t.Cleanup(func() {
		d.exec(t, "DROP OWNED BY "+role)
		d.exec(t, "DROP ROLE "+role)
	})
	d.vars["DATABASE_URL"] = d.url("&options=-c%20role%3D" + role)
	var ids []string
	for _, f := range d.findings(t) {
		ids = append(ids, f.ID)
	}
	require.Contains(t, ids, "doctor.migrations")
}

// Clocks that differ.
func TestDoctorOnClock(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.relay(t)
	for offset, want := range map[time.Duration]string{time.Hour: " ahead of that", -time.Hour: " behind that"} {
		d.change = func(e *env) { e.now = func() time.Time { return time.Now().Add(offset) } }
		require.Contains(t, d.requireFinding(t, "clock", severityWarning, "the clock of this machine").What, want)
	}
}

// The doctor sees the settings of the session. It judges settings of the server in the same way.
func TestDoctorOnSettings(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.relay(t)
	d.vars["DATABASE_URL"] = d.url("&options=-c%20idle_in_transaction_session_timeout%3D0%20-c%20search_path%3Dpg_catalog")
	d.requireFinding(t, "server.idle_in_transaction", severityNote, "is 0")
	d.vars["DATABASE_URL"] = d.url("&options=-c%20idle_in_transaction_session_timeout%3D60000%20-c%20synchronous_commit%3Doff%20-c%20search_path%3Dpg_catalog")
	d.requireFinding(t, "server.synchronous_commit", severityWarning, "is off")

	good := map[string]string{"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "autovacuum": "on", "track_counts": "on",
		"idle_in_transaction_session_timeout": "1000", "server_version_num": "140000", "in_hot_standby": "off"}
	require.Empty(t, settingFindings(good))
	for setting, bad := range map[string]string{"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "autovacuum": "off",
		"track_counts": "off", "idle_in_transaction_session_timeout": "0", "server_version_num": "130012", "in_hot_standby": "on"} {
		was := good[setting]
		good[setting] = bad
		require.Len(t, settingFindings(good), 1, setting)
		good[setting] = was
	}
	rows, err := d.db.Query(background, `SELECT name FROM pg_settings`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for setting := range good {
		require.Contains(t, names, setting, "that is what PostgreSQL calls it")
	}
	require.Empty(t, connectionFindings(89, 100))
	require.Len(t, connectionFindings(90, 100), 1)
}

// The doctor names a database with another encoding than UTF8, and a role whose sessions have another one.
func TestDoctorOnEncodings(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.vars["DATABASE_URL"] = d.url("&client_encoding=LATIN1")
	d.requireFinding(t, "server.encoding", severityError, "client_encoding LATIN1", "--only", "server.encoding")

	name := "latin1_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err := d.db.Exec(background, "CREATE DATABASE "+name+" ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := d.db.Exec(background, "DROP DATABASE "+name+" WITH (FORCE)")
		require.NoError(t, err)
	})
	there := commandFixtureAt(t, testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Database = name }), "public")
	there.requireFinding(t, "server.encoding", severityError, "database "+name+" has the encoding LATIN1", "--only", "server.encoding")
}

// The lock table must have room for all partitions: on a server with PostgreSQL's own
// settings for 711.
func TestDoctorOnManyPartitions(t *testing.T) {
	t.Parallel()
	require.Empty(t, partitionFindings(0, 64, 100))
	require.Empty(t, partitionFindings(711, 64, 100))
	found := partitionFindings(712, 64, 100)
	require.Len(t, found, 1)
	require.Contains(t, found[0].What, "made for 711")
	require.Contains(t, found[0].Do, "max_locks_per_transaction to 65 or more")
	require.Empty(t, partitionFindings(712, 65, 100))

	testenv.Direct(t)
	d := newClinic(t)
	require.NoError(t, outbox.Migrate(background, d.db, outbox.MigrateConfig{Schema: d.schema, PartitionRows: 10}))
	require.Empty(t, d.findings(t, "--only", "tables.partitions"))
}

// A slot that nothing reads holds WAL.
func TestDoctorOnSlots(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	name := strings.ReplaceAll("cli_"+uuid.NewString(), "-", "_")
	d.exec(t, `SELECT pg_create_physical_replication_slot($1, true)`, name)
	t.Cleanup(func() { d.exec(t, `SELECT pg_drop_replication_slot($1)`, name) })
	e := &env{db: d.db, globals: globals{schema: d.schema}}
	doc := &doctor{e: e}
	require.NoError(t, doc.slots(background))
	require.False(t, slices.ContainsFunc(doc.findings, func(f finding) bool { return strings.Contains(f.What, name) }), "it holds little")
	require.Eventually(t, func() bool {
		d.record(t, "wal")
		doc.findings = nil
		require.NoError(t, doc.slotsAbove(background, 0))
		return slices.ContainsFunc(doc.findings, func(f finding) bool {
			return f.ID == "server.slot" && strings.Contains(f.What, name) && strings.Contains(f.What, "nothing reads it")
		})
	}, testenv.Patience, 20*time.Millisecond)
}

// The table has dead rows of rolled-back transactions.
func TestDoctorOnBloat(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.relay(t)
	d.exec(t, `ALTER TABLE {s}.outbox SET (autovacuum_enabled = off)`)
	tx, err := d.db.Begin(background)
	require.NoError(t, err)
	_, err = tx.Exec(background, strings.ReplaceAll(`INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT gen_random_uuid(), 't', 's', 'a', 'i', '{}', 'application/json', now() FROM generate_series(1, 100001)`, "{s}", pgx.Identifier{d.schema}.Sanitize()))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(background))
	require.Eventually(t, func() bool {
		all := d.findings(t, "--skip", "tables.autovacuum,transaction")
		return len(all) == 1 && all[0].ID == "tables.bloat" && strings.Contains(all[0].What, "outbox has 100,001 dead rows")
	}, testenv.Patience, 50*time.Millisecond)
}

func TestDoctorOnKafka(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t).withKafka(t)
	d.relay(t)()
	const skip = "relay,kafka.auto_create"
	d.record(t, "a")
	d.requireFinding(t, "kafka.topic.missing", severityError, d.topic, "--skip", skip)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	require.Eventually(t, func() bool { return len(d.findings(t, "--skip", skip)) == 0 }, testenv.Patience, 50*time.Millisecond)
	for _, test := range []struct{ setting, value, id, severity string }{
		{"min.insync.replicas", "2", "kafka.topic.min_insync", severityError},
		{"max.message.bytes", "900000", "kafka.topic.max_message_bytes", severityWarning},
		{"cleanup.policy", "compact", "kafka.topic.compacted", severityWarning},
	} {
		other := newClinic(t).withKafka(t)
		testenv.CreateTopic(t, other.brokers, other.topic, 1, test.setting, test.value)
		other.record(t, "a")
		require.Eventually(t, func() bool {
			all := other.findings(t, "--skip", skip)
			return len(all) == 1 && all[0].ID == test.id && all[0].Severity == test.severity && strings.Contains(all[0].What, test.setting)
		}, testenv.Patience, 50*time.Millisecond, test.setting)
	}
	d.vars["KAFKA_BROKERS"] = "127.0.0.1:1"
	d.requireFinding(t, "kafka.connect", severityError, "127.0.0.1:1", "--skip", skip, "--timeout", "2s")

	good := outboxtopics.Info{Topic: "t", Partitions: 3, Replicas: 3, InSync: 3, Settings: map[string]string{"min.insync.replicas": "2", "max.message.bytes": "1048588"}}
	require.Empty(t, topicFindings(good))
	down := good
	down.InSync, down.Leaderless = 1, 1
	all := topicFindings(down)
	require.Len(t, all, 2)
	require.Equal(t, "kafka.topic.leader", all[0].ID)
	require.Equal(t, "kafka.topic.in_sync", all[1].ID)
}

// A slot that has lost its WAL holds none, and threatens no disk.
func TestDoctorOnLostSlot(t *testing.T) {
	t.Parallel()
	for _, active := range []bool{true, false} {
		f := slotFinding("x", active, true, 0)
		require.Equal(t, "replication slot x has lost WAL that it kept for its reader", f.What)
		require.NotContains(t, f.Means+f.Do, "disk")
	}
	require.Contains(t, slotFinding("x", false, false, 2<<30).What, "holds 2,048 MiB of WAL, and nothing reads it")
}
