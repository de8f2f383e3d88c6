package outbox_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxops"
)

// rolesOfBefore are those of docs/roles.md before 0010_least_privilege.sql.
const rolesOfBefore = `
CREATE ROLE outbox_writer;
GRANT USAGE ON SCHEMA public TO outbox_writer;
GRANT INSERT (event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type, topic, partition_key,
              headers, occurred_at, size) ON outbox TO outbox_writer;
GRANT USAGE ON SEQUENCE outbox_id_seq TO outbox_writer;
CREATE ROLE outbox_relay;
GRANT USAGE ON SCHEMA public TO outbox_relay;
GRANT SELECT, DELETE ON outbox TO outbox_relay;
GRANT UPDATE (xid) ON outbox TO outbox_relay;
GRANT SELECT ON SEQUENCE outbox_id_seq TO outbox_relay;
GRANT SELECT, INSERT, DELETE ON outbox_cursor TO outbox_relay;
GRANT SELECT, INSERT, UPDATE ON outbox_lease TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_failed TO outbox_relay;
GRANT SELECT, INSERT, DELETE ON outbox_audit TO outbox_relay;
GRANT SELECT, DELETE ON event_handled TO outbox_relay;
GRANT SELECT ON consumer_start TO outbox_relay;
GRANT USAGE ON SEQUENCE outbox_cursor_id_seq, outbox_failed_id_seq, outbox_audit_id_seq TO outbox_relay;
GRANT EXECUTE ON FUNCTION outbox_partitions(), outbox_relays(), outbox_make_partitions(),
      outbox_drop_partition(name, boolean, pg_snapshot, timestamptz, text[], text, text, bigint) TO outbox_relay;
CREATE ROLE outbox_consumer;
GRANT USAGE ON SCHEMA public TO outbox_consumer;
GRANT SELECT, INSERT, DELETE ON event_handled TO outbox_consumer;
GRANT UPDATE (handled_at) ON event_handled TO outbox_consumer;
GRANT USAGE ON SEQUENCE event_handled_id_seq TO outbox_consumer;
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_start TO outbox_consumer;
GRANT SELECT ON consumer_pause TO outbox_consumer;
CREATE ROLE outbox_reader;
GRANT USAGE ON SCHEMA public TO outbox_reader;
GRANT SELECT ON outbox, outbox_cursor, outbox_lease, outbox_failed, outbox_audit, event_handled, consumer_start,
      consumer_pause TO outbox_reader;
CREATE ROLE outbox_operator;
GRANT outbox_reader TO outbox_operator;
GRANT UPDATE ON outbox_failed TO outbox_operator;
GRANT INSERT ON outbox_audit TO outbox_operator;
GRANT USAGE ON SEQUENCE outbox_audit_id_seq TO outbox_operator;
GRANT INSERT, UPDATE ON consumer_start TO outbox_operator;
GRANT INSERT, DELETE ON consumer_pause TO outbox_operator;`

// statementsOfBefore are what the release before sent in these roles, shortened.
var statementsOfBefore = map[string][]string{
	"writer": {oldInsert},
	"relay": {`
		WITH chosen AS MATERIALIZED (
		    SELECT id FROM {s}.outbox_failed WHERE status = 'dead' ORDER BY id FOR UPDATE
		), changed AS (
		    UPDATE {s}.outbox_failed AS f SET status = 'parked', retry_count = 0, held = false, next_retry_at = now() WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING f.*
		)
		INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key, failed_id, outbox_id, event_id)
		SELECT 'relay ' || left(relay, 94), 'retry', 'revived: ' || error_class, relay, parking_key, id, outbox_id, event_id FROM changed`,
		`DELETE FROM {s}.event_handled WHERE ctid = ANY (ARRAY(SELECT ctid FROM {s}.event_handled))`,
		`SELECT {s}.outbox_make_partitions()`,
		`INSERT INTO {s}.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ('default', 'h', 1, now(), '1 s')
		     ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, epoch = l.epoch + 1 WHERE l.expires_at <= clock_timestamp()`,
		`INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		     SELECT 'default', 0, '1:1:', 0, 1, epoch FROM {s}.outbox_lease WHERE name = 'default' FOR SHARE`,
		`DELETE FROM {s}.outbox_cursor`},
	"consumer": {
		`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source) VALUES ('any', 't', 'i', 'a', 's')
		     ON CONFLICT DO NOTHING RETURNING aggregate_type`,
		`INSERT INTO {s}.consumer_start AS s (consumer_group, topic, topic_id, partition, start_offset, position) VALUES ('any', 't', '00000000-0000-0000-0000-000000000001', 0, 1, 1)
		     ON CONFLICT (consumer_group, topic, topic_id, partition) DO UPDATE SET position = excluded.position`,
		`UPDATE {s}.event_handled SET handled_at = now() WHERE consumer_group = 'any'`,
		`SELECT FROM {s}.consumer_pause`},
	"operator": {`
		WITH changed AS (
		    UPDATE {s}.outbox_failed SET held = true WHERE id = ANY (ARRAY(SELECT id FROM {s}.outbox_failed ORDER BY id FOR UPDATE)) RETURNING id
		)
		INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key) SELECT 'kim', 'hold', 'why', 'default', 'k' WHERE EXISTS (SELECT FROM changed)`,
		`INSERT INTO {s}.consumer_start AS s (consumer_group, topic, topic_id, partition, start_offset, position) VALUES ('any', 't', '00000000-0000-0000-0000-000000000001', 0, 1, 1)
		     ON CONFLICT (consumer_group, topic, topic_id, partition) DO UPDATE SET position = excluded.position`,
		`INSERT INTO {s}.consumer_pause (operator, reason, consumer_group, topic) VALUES ('kim', 'why', 'any', '')`,
		`DELETE FROM {s}.consumer_pause`},
}

// While a new release is rolled out, processes of both work on the new tables, in the roles
// of before.
func TestRolesOfBefore(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, 9)
	r := grantRoles(t, &relayFixture{db: f.db, schema: f.schema}, rolesOfBefore)
	require.NoError(t, outbox.Migrate(background, f.db, outbox.MigrateConfig{Schema: f.schema, PartitionRows: 1000}))
	_, err := f.db.Exec(background, f.sql(oldInsert), 3)
	require.NoError(t, err)
	f.exec(t, oldFailures)
	for _, role := range []string{"writer", "consumer", "operator", "relay"} {
		db := r.as(t, role)
		for _, sql := range statementsOfBefore[role] {
			tag, err := db.Exec(background, strings.ReplaceAll(f.sql(sql), "$1", "1"))
			require.NoError(t, err, "%s: %s", role, sql)
			require.False(t, tag.RowsAffected() == 0 && regexp.MustCompile("event_handled|outbox_lease|outbox_cursor").MatchString(sql), "%s: %s", role, sql)
		}
	}
	operator := r.as(t, "operator")
	f.exec(t, `UPDATE {s}.outbox_failed SET held = false, status = 'dead'`)
	failures, err := outboxops.NewFailures(operator, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	n, err := failures.RetryAll(background, outboxops.FailureFilter{}, outboxops.BulkConfig{}, kim)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	consumers, err := outboxops.NewConsumers(operator, outboxops.ConsumersConfig{Schema: f.schema})
	require.NoError(t, err)
	require.NoError(t, consumers.Pause(background, "g", "", kim))
	require.NoError(t, consumers.Resume(background, "g", "", kim))
	for _, role := range []string{"writer", "consumer"} {
		_, err = r.as(t, role).Exec(background, f.sql(`SELECT {s}.outbox_hold_key('r', 'k', 'kim', 'why')`))
		require.True(t, isDenied(err), "%s: %v", role, err)
	}

	// What docs/roles.md says to do then leaves these roles the rights of the new ones.
	doc, err := os.ReadFile("docs/roles.md")
	require.NoError(t, err)
	revoke := regexp.MustCompile("(?s)\\*\\*Roles from before.\\*\\*.*?```\n(.*?)```").FindSubmatch(doc)
	require.NotNil(t, revoke)
	f.script(t, regexp.MustCompile(`\boutbox_(relay|consumer|reader|operator)\b`).ReplaceAllString(string(revoke[1]), "outbox_${1}"+r.suffix))
	r.requireNoMore(t)
	r.requireNoEscalation(t)
}

// Rights to columns count like those to their table, and who is given all new tables by default
// may not write down for which groups he may write.
func TestRightsAreFoundByTheMigration(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, 9)
	r := grantRoles(t, &relayFixture{db: f.db, schema: f.schema}, rolesOfBefore)
	consumer := "outbox_consumer" + r.suffix
	f.exec(t, `REVOKE ALL ON {s}.event_handled, {s}.consumer_start FROM `+consumer)
	f.exec(t, `GRANT SELECT (consumer_group, handled_at, aggregate_type, aggregate_id, action, event_source), UPDATE (handled_at),
		INSERT (consumer_group, aggregate_type, aggregate_id, action, event_source) ON {s}.event_handled TO `+consumer)
	relay := "outbox_relay" + r.suffix
	f.exec(t, `REVOKE ALL ON {s}.event_handled, {s}.consumer_start, {s}.outbox_lease FROM `+relay)
	f.exec(t, `GRANT SELECT, INSERT, UPDATE (holder, epoch, expires_at, lasts) ON {s}.outbox_lease TO `+relay)
	f.exec(t, `ALTER DEFAULT PRIVILEGES IN SCHEMA {s} GRANT ALL ON TABLES TO PUBLIC`)
	require.NoError(t, outbox.Migrate(background, f.db, outbox.MigrateConfig{Schema: f.schema}))
	f.exec(t, `ALTER DEFAULT PRIVILEGES IN SCHEMA {s} REVOKE ALL ON TABLES FROM PUBLIC`)
	for _, sql := range statementsOfBefore["consumer"] {
		if strings.Contains(sql, "event_handled") {
			_, err := r.as(t, "consumer").Exec(background, f.sql(sql))
			require.NoError(t, err, sql)
		}
	}
	for _, sql := range statementsOfBefore["relay"] {
		if strings.Contains(sql, "outbox_lease") || strings.Contains(sql, "outbox_cursor") {
			tag, err := r.as(t, "relay").Exec(background, f.sql(sql))
			require.NoError(t, err, sql)
			require.EqualValues(t, 1, tag.RowsAffected(), sql)
		}
	}
	for _, role := range []string{"writer", "relay", "consumer", "reader", "operator"} {
		for _, sql := range []string{`INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('*', session_user)`,
			`UPDATE {s}.consumer_group_role SET consumer_group = '*'`, `DELETE FROM {s}.consumer_group_role`} {
			_, err := r.as(t, role).Exec(background, f.sql(sql))
			require.True(t, isDenied(err), "%s: %s: %v", role, sql, err)
		}
	}
}

// An operator of this release, on tables of the one before, says what is to be done.
func TestOperatorsOnTablesOfBefore(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, 9)
	_, err := f.db.Exec(background, f.sql(oldInsert), 3)
	require.NoError(t, err)
	f.exec(t, oldFailures)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	consumers, err := outboxops.NewConsumers(f.db, outboxops.ConsumersConfig{Schema: f.schema})
	require.NoError(t, err)
	id := outboxops.FailureID{Kind: outboxops.KindEvent, Number: 1}
	for name, do := range map[string]func() error{
		"retry":   func() error { return failures.Retry(background, id, kim) },
		"resolve": func() error { return failures.Resolve(background, id, kim) },
		"edit":    func() error { return failures.Edit(background, id, []byte("{}"), kim) },
		"hold":    func() error { return failures.Hold(background, id, kim) },
		"release": func() error { return failures.Release(background, id, kim) },
		"pause":   func() error { return consumers.Pause(background, "g", "", kim) },
		"resume":  func() error { return consumers.Resume(background, "g", "", kim) },
		"audit": func() error {
			_, err := failures.Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
			return err
		},
	} {
		require.ErrorIs(t, do(), outbox.ErrNotMigrated, name)
	}
}

// What a function cannot be told: nothing without who and why, no payload of another kind, and
// no position ahead.
func TestOperatorsFunctions(t *testing.T) {
	t.Parallel()
	f := migratedTo(t, len(files(t)))
	_, err := f.db.Exec(background, f.sql(oldInsert), 3)
	require.NoError(t, err)
	f.exec(t, oldFailures)
	f.exec(t, `UPDATE {s}.outbox_failed SET status = 'dead', headers = '{"a": "b"}'`)
	f.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT 'g', 't', '00000000-0000-0000-0000-000000000001', n, 0, nullif(10 * n, 20) FROM generate_series(0, 2) AS n`)
	for sql, code := range map[string]string{
		`SELECT {s}.outbox_retry_failed('{1}', '', 'why')`:                             "22023",
		`SELECT {s}.outbox_retry_failed('{1}', NULL, 'why')`:                           "22023",
		`SELECT {s}.outbox_resolve_failed('{1}', 'kim', ' ')`:                          "22023",
		`SELECT {s}.outbox_hold_key('r', 'k', repeat('x', 101), 'why')`:                "22023",
		`SELECT {s}.outbox_release_key('r', 'k', 'kim', repeat('x', 10001))`:           "22023",
		`SELECT {s}.outbox_edit_failed(1, NULL, 'kim', 'why')`:                         "22023",
		`SELECT {s}.outbox_edit_failed(1, 'no json', 'kim', 'why')`:                    "22P02",
		`SELECT {s}.outbox_edit_failed(1, '{"a": 1e131000}', 'kim', 'why')`:            "",
		`SELECT {s}.outbox_pause_consumer('g', 't', 'kim', '')`:                        "22023",
		`SELECT {s}.outbox_resume_consumer('g', 't', '', 'why')`:                       "22023",
		`SELECT {s}.outbox_rewind_consumer('g', '{t}', NULL, NULL, NULL, 'kim', NULL)`: "22023",
		`SELECT {s}.outbox_audit_replay('t', '', 'kim', '')`:                           "22023",
		`SELECT {s}.outbox_forget_handled('g', '{}', '{}', '{}', '{}', '', 'why')`:     "22023",
		`SELECT {s}.outbox_forget_handled('', '{}', '{}', '{}', '{}', 'kim', 'why')`:   "22023",
	} {
		err := tryScript(f.db, f.sql(sql))
		require.Equal(t, code, pg.Code(err), "%s: %v", sql, err)
	}
	require.Zero(t, f.count(t, "outbox_audit"))

	var positions []*int64
	require.NoError(t, f.db.QueryRow(background, f.sql(`
		WITH done AS MATERIALIZED (
		    SELECT {s}.outbox_rewind_consumer('g', ARRAY['t', 't', 't'], array_fill('00000000-0000-0000-0000-000000000001'::uuid, ARRAY[3]), '{0,1,2}', '{5,5,5}', 'kim', 'why'))
		SELECT ARRAY[n] FROM done AS d (n)`)).Scan(&positions))
	require.EqualValues(t, 2, *positions[0])
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT array_agg(position ORDER BY partition) FROM {s}.consumer_start`)).Scan(&positions))
	require.EqualValues(t, 0, *positions[0], "not ahead")
	require.EqualValues(t, 5, *positions[1])
	require.Nil(t, positions[2], "the group has not begun with it")
	require.Equal(t, 1, f.count(t, "outbox_audit WHERE action = 'rewind' AND consumer_group = 'g' AND parking_key = 't/' AND login = session_user"))
}
