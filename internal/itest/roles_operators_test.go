package itest

import (
	"fmt"
	"strings"
	"testing"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
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
		`SELECT {s}.outbox_blocked('any', '{a}', '{1}', '{d}', now())`,
		`SELECT {s}.outbox_promote('any', '{1}', '{0}')`,
		`SELECT {s}.outbox_finish_deliveries('any', 'w', '{}', '{}', '{}')`,
		`SELECT {s}.outbox_remove_handled('{}', now())`,
		`SELECT {s}.outbox_remove_deliveries('{}', now())`,
		`SELECT {s}.outbox_remove_cursors('{}')`,
		`SELECT {s}.outbox_remove_member('any', 'm')`,
		`SELECT {s}.outbox_remove_topics('any', '{}', '{}')`,
		`SELECT {s}.outbox_remove_gaps('any', '{}', '{}', '{}', '{}', '{}', '{}')`,
		`SELECT {s}.outbox_move_due(NULL, '{}')`,
		`SELECT {s}.outbox_cancel(gen_random_uuid())`,
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
	f.exec(t, `DROP FUNCTION {s}.outbox_retry_failed, {s}.outbox_resolve_failed, {s}.outbox_edit_failed, {s}.outbox_edit_delivery, {s}.outbox_hold_key, {s}.outbox_release_key,
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
	f.exec(t, `INSERT INTO {s}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES (0, '1:1:', 0, 1, 1)`)
	f.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT 'g', 't', '00000000-0000-0000-0000-000000000001', n, 0, nullif(10 * n, 20) FROM generate_series(0, 2) AS n`)
	for sql, code := range map[string]string{
		`SELECT {s}.outbox_retry_failed('{1}', '', 'why')`:                                  "22023",
		`SELECT {s}.outbox_retry_failed('{1}', NULL, 'why')`:                                "22023",
		`SELECT {s}.outbox_resolve_failed('{1}', 'kim', ' ')`:                               "22023",
		`SELECT {s}.outbox_hold_key('r', 'k', repeat('x', 101), 'why')`:                     "22023",
		`SELECT {s}.outbox_release_key('r', 'k', 'kim', repeat('x', 10001))`:                "22023",
		`SELECT {s}.outbox_edit_failed(1, NULL, 'kim', 'why')`:                              "22023",
		`SELECT {s}.outbox_edit_failed(1, 'no json', 'kim', 'why')`:                         "22P02",
		`SELECT {s}.outbox_edit_failed(1, '{"a": 1e131000}', 'kim', 'why')`:                 "",
		`SELECT {s}.outbox_pause_consumer('g', 't', 'kim', '')`:                             "22023",
		`SELECT {s}.outbox_resume_consumer('g', 't', '', 'why')`:                            "22023",
		`SELECT {s}.outbox_rewind_consumer('g', '{t}', NULL, NULL, NULL, 'kim', NULL)`:      "22023",
		`SELECT {s}.outbox_forget_action('g', 'a', 'kim', '')`:                              "22023",
		`SELECT {s}.outbox_stop_archive('kim', '')`:                                         "22023",
		`SELECT {s}.outbox_audit_replay('t', '', 'kim', '')`:                                "22023",
		`SELECT {s}.outbox_audit_edit('t', 'k', 'g', 'a', 'x', 'kim', '')`:                  "22023",
		`SELECT {s}.outbox_cancel_delayed('{}', 'kim', '')`:                                 "22023",
		`SELECT {s}.outbox_forget_handled('g', '{}', '{}', '{}', '{}', now(), '', 'why')`:   "22023",
		`SELECT {s}.outbox_forget_handled('', '{}', '{}', '{}', '{}', now(), 'kim', 'why')`: "22023",
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

// An operator has a name that can be printed and read, and a reason has words: in SQL, and in Go, which checks first.
func TestOperatorsHaveNames(t *testing.T) {
	t.Parallel()
	f := migrated(t)
	_, err := f.db.Exec(background, f.sql(insertEvents), 3)
	require.NoError(t, err)
	f.exec(t, insertFailures)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	id := outboxops.FailureID{Kind: outboxops.KindEvent, Number: 1}
	try := func(operator, reason string) (sql, inGo error) {
		_, sql = f.db.Exec(background, f.sql(`SELECT {s}.outbox_check_audit($1, $2)`), operator, reason)
		inGo = failures.AuditRead(background, id, outboxops.AuditInfo{Operator: operator, Reason: reason})
		return sql, inGo
	}
	var taken []string
	reject := func(operator, reason string) {
		sql, inGo := try(operator, reason)
		if sql == nil || inGo == nil {
			taken = append(taken, fmt.Sprintf("%+.20q %+.20q: SQL says %v, Go %v", operator, reason, sql, inGo))
			return
		}
		require.Equal(t, "22023", pg.Code(sql), "%+q: %v", operator, sql)
	}
	const why = "JIRA-17"
	for _, name := range []string{"kim", "Kim Lee", "kim@example.org", "O'Neil", `CORP\kim`, "7", "Жанна", "金", "e\u0301", "कि", "ქეთი"} {
		sql, inGo := try(name, why)
		require.NoError(t, sql, "%+q", name)
		require.NoError(t, inGo, "%+q", name)
	}
	for _, name := range []string{"", " ", "\t", "\u200b", "\u00a0", "\u3164", "-", "...", "kim\t", "kim\n", "k\u200bim", "\ufeffkim", "kim\u202e", "kim\u2028", "kim\u0085",
		"kim\u00a0lee", "kim\ufe0f", "kim\ue000", "kim\U000e0041", strings.Repeat("x", 101)} {
		reject(name, why)
	}
	for _, reason := range []string{why, "two\nlines\t", "\u200bкак", "因", "2"} {
		sql, inGo := try("kim", reason)
		require.NoError(t, sql, "%+q", reason)
		require.NoError(t, inGo, "%+q", reason)
	}
	for _, reason := range []string{"", " ", "\t\n", "\u200b\u200b", "\u00a0", "\u3164", "--", "…", "😀", strings.Repeat("x", 10_001)} {
		reject("kim", reason)
	}
	require.Empty(t, taken)
}

// SQL has no tables of Unicode that are the same everywhere. It takes each character and letter that Go takes. In the
// plane of all living scripts it takes no hidden character that Go refuses, and among Latin ones no other letter.
func TestCharactersOfNamesInSQL(t *testing.T) {
	t.Parallel()
	f := migrated(t)
	rows, err := f.db.Query(background, f.sql(`
		WITH source AS (SELECT prosrc FROM pg_proc WHERE oid = '{s}.outbox_check_audit'::regproc),
		classes AS MATERIALIZED (
		    SELECT regexp_replace((regexp_match(prosrc, 'hidden\s+constant text := ([^;]+)'))[1], '''|\s', '', 'g') AS hidden,
		           regexp_replace((regexp_match(prosrc, 'letters constant text := ([^;]+)'))[1], '''|\s', '', 'g') AS letters
		      FROM source)
		SELECT n, chr(n) ~ hidden, chr(n) ~ letters FROM classes, generate_series(1, 1114111) AS n WHERE n NOT BETWEEN 55296 AND 57343`))
	require.NoError(t, err)
	var number rune
	var hidden, readable bool
	_, err = pgx.ForEachRow(rows, []any{&number, &hidden, &readable}, func() error {
		if want := check.Operator("x"+string(number)) != nil; want != hidden && (hidden || number <= '\uffff') {
			t.Errorf("%U: SQL hides it: %v, Go %v", number, hidden, want)
		}
		if want := check.IsReadable(string(number)); want != (readable && !hidden) && (want || number <= unicode.MaxLatin1) {
			t.Errorf("%U: SQL says that it is a letter: %v, Go %v", number, readable, want)
		}
		return nil
	})
	require.NoError(t, err)
}

// What functions write about names is no longer than names are, and only about what is there: the audit keeps it for
// a year.
func TestAuditTakesNoLongNames(t *testing.T) {
	t.Parallel()
	f := migrated(t)
	const id = `'00000000-0000-0000-0000-000000000001'`
	f.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT 'g', t, `+id+`, 0, 0, 5 FROM unnest(ARRAY['t', 'u']) AS t`)
	f.exec(t, `INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('g', 'e', 'i', 'a')`)
	rewind := func(topics string) string {
		return `SELECT {s}.outbox_rewind_consumer('g', a.t, array_fill(` + id + `::uuid, ARRAY[cardinality(a.t)]), array_fill(0, ARRAY[cardinality(a.t)]),
			array_fill(9::bigint, ARRAY[cardinality(a.t)]), 'kim', 'why') FROM (SELECT ` + topics + `) AS a (t)`
	}
	audited := func() []string {
		rows, err := f.db.Query(background, f.sql(`SELECT left(action || ' ' || coalesce(consumer_group, '') || ' ' || parking_key, 40) FROM {s}.outbox_audit ORDER BY id`))
		require.NoError(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	const long = `repeat('x', 2000000)`
	var taken []string
	for _, sql := range []string{
		rewind(`ARRAY[` + long + `]`), rewind(`ARRAY['t', repeat('x', 250)]`), rewind(`ARRAY['a/b']`), rewind(`ARRAY['']`), rewind(`ARRAY['..']`), rewind(`ARRAY[E't\n']`),
		rewind(`array_agg('t' || n) FROM generate_series(1, 1001) AS n`),
		`SELECT {s}.outbox_audit_replay(` + long + `, 'g', 'kim', 'why')`, `SELECT {s}.outbox_audit_replay('a/b', 'g', 'kim', 'why')`,
		`SELECT {s}.outbox_audit_replay('', repeat('x', 256), 'kim', 'why')`, `SELECT {s}.outbox_audit_replay('..', '', 'kim', 'why')`,
		`SELECT {s}.outbox_forget_handled(` + long + `, '{e}', '{i}', '{o}', '{b}', now(), 'kim', 'why')`,
		`SELECT {s}.outbox_pause_consumer('g', E'\x1b[2J', 'kim', 'why')`, `SELECT {s}.outbox_pause_consumer(` + long + `, '', 'kim', 'why')`,
		`SELECT {s}.outbox_pause_consumer('', 't', 'kim', 'why')`, `SELECT {s}.outbox_pause_consumer('g', ` + long + `, 'kim', 'why')`,
	} {
		if err := tryScript(f.db, f.sql(sql)); pg.Code(err) != "22023" {
			taken = append(taken, fmt.Sprintf("%s: %.100v", sql, err))
		}
	}
	require.Empty(t, taken)
	require.Empty(t, audited())

	f.exec(t, rewind(`ARRAY['t', 'elsewhere', 'u', 't']`))
	f.exec(t, `SELECT {s}.outbox_audit_replay('', '', 'kim', 'why'), {s}.outbox_audit_replay('t', 'g', 'kim', 'why'), {s}.outbox_audit_replay(NULL, NULL, 'kim', 'why')`)
	f.exec(t, `SELECT {s}.outbox_forget_handled('h', '{e}', '{i}', '{o}', '{b}', now(), 'kim', 'why'), {s}.outbox_forget_handled('g', '{e}', '{i}', '{o}', '{b}', now(), 'kim', 'why')`)
	f.exec(t, `SELECT {s}.outbox_pause_consumer('g', 't', 'kim', 'why'), {s}.outbox_pause_consumer('g', '', 'kim', 'why')`)
	require.ElementsMatch(t, []string{"rewind g t/", "rewind g u/", "replay  /", "replay g t/", "replay  /", "forget g /", "pause g t/", "pause g /"}, audited())
}

// Events that an action has missed are not given up without a trace, also if no handler of it is registered.
func TestForgottenGapsAreAudited(t *testing.T) {
	t.Parallel()
	f := migrated(t)
	f.exec(t, `INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
		VALUES ('g', 't', '00000000-0000-0000-0000-000000000001', 0, 'a', 'e', 5)`)
	f.exec(t, `SELECT {s}.outbox_forget_action('g', 'b', 'kim', 'why'), {s}.outbox_forget_action('g', 'a', 'kim', 'why'), {s}.outbox_forget_action('g', 'a', 'kim', 'again')`)
	var gaps int
	var audited string
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT (SELECT count(*) FROM {s}.consumer_gap),
		coalesce((SELECT string_agg(concat_ws(' ', action, consumer_group, parking_key, reason), ', ') FROM {s}.outbox_audit), '')`)).Scan(&gaps, &audited))
	require.Zero(t, gaps)
	require.Equal(t, "forget-action g /a why", audited)
}
