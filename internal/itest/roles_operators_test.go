package itest

import (
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// A role that ALTER DEFAULT PRIVILEGES gives all new tables, as in a database where one role migrates and another one
// works, writes for all groups. It may not change for which groups it may write, and call no functions of operators.
func TestRightsByDefault(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a role of sessions
	db, schema := testenv.Schema(t)
	f := &schemaFixture{db: db, schema: schema}
	role := "outbox_default_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	f.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() { f.exec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	f.exec(t, `GRANT USAGE ON SCHEMA {s} TO `+role)
	for _, what := range []string{"TABLES", "SEQUENCES", "FUNCTIONS"} {
		f.exec(t, `ALTER DEFAULT PRIVILEGES IN SCHEMA {s} GRANT ALL ON `+what+` TO `+role)
	}
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	user := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["role"] = role })

	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(background, user, func(tx pgx.Tx) error { return rec.Record(background, tx, good) }))
	for _, sql := range []string{
		`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at) VALUES ('default', 'h', 1, now()), ('worker:any', 'h', 1, now())`,
		`INSERT INTO {s}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES (0, '1:1:', 0, 1, 1)`,
		`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('any', 't', 'i', 'a')`,
		`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ('any', 't', gen_random_uuid(), -1)`,
		`INSERT INTO {s}.consumer_handler (consumer_group, topic, action, event_type) VALUES ('any', 't', 'a', 'e')`,
		`INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset) VALUES ('any', 't', gen_random_uuid(), 0, 'a', 'e', 1)`,
		`INSERT INTO {s}.event_subscription (consumer_group) VALUES ('any')`,
	} {
		tag, err := user.Exec(background, f.sql(sql))
		require.NoError(t, err, sql)
		require.NotZero(t, tag.RowsAffected(), sql)
	}
	for _, sql := range []string{
		`SELECT {s}.outbox_lock_keys('any', '{1}')`,
		`SELECT {s}.outbox_lock_keys_shared('any', '{1}')`,
		`SELECT {s}.outbox_promote('any', '{1}', '{0}')`,
		`SELECT {s}.outbox_finish_deliveries('any', 'w', '{}', '{}', '{}')`,
	} {
		_, err := user.Exec(background, f.sql(sql))
		require.NoError(t, err, sql)
	}
	for _, sql := range []string{
		`INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('*', session_user)`,
		`UPDATE {s}.consumer_group_role SET consumer_group = '*'`,
		`DELETE FROM {s}.consumer_group_role`,
		`SELECT {s}.outbox_retry_failed('{1}', 'kim', 'why')`,
		`SELECT {s}.outbox_hold_key('r', 'k', 'kim', 'why')`,
		`SELECT {s}.outbox_define('public', '{SELECT}')`,
		`SELECT {s}.outbox_revoke_grants('outbox')`,
	} {
		_, err := user.Exec(background, f.sql(sql))
		require.True(t, isDenied(err), "%s: %v", sql, err)
	}
}

// An operator of this release, on the tables of an earlier one, which has no such functions, says what is to be done.
func TestOperatorsBehind(t *testing.T) {
	t.Parallel()
	f := migrated(t)
	_, err := f.db.Exec(background, f.sql(insertEvents), 3)
	require.NoError(t, err)
	f.exec(t, insertFailures)
	f.exec(t, `DROP FUNCTION {s}.outbox_retry_failed, {s}.outbox_resolve_failed, {s}.outbox_edit_failed, {s}.outbox_hold_key, {s}.outbox_release_key,
		{s}.outbox_pause_consumer, {s}.outbox_resume_consumer; ALTER TABLE {s}.outbox_audit DROP COLUMN handler`)
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
	f := migrated(t)
	_, err := f.db.Exec(background, f.sql(insertEvents), 3)
	require.NoError(t, err)
	f.exec(t, insertFailures)
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
		`SELECT {s}.outbox_forget_action('g', 'a', 'kim', '')`:                         "22023",
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
