package itest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// removals are calls of functions that remove rows of all groups that the role may write for, by the tables.
var removals = map[string]string{
	"event_handled":  `SELECT {s}.outbox_remove_handled(ARRAY(SELECT ctid FROM {s}.event_handled), 'infinity')`,
	"event_delivery": `SELECT {s}.outbox_remove_deliveries(ARRAY(SELECT ctid FROM {s}.event_delivery), 'infinity')`,
	"outbox_cursor":  `SELECT {s}.outbox_remove_cursors(ARRAY(SELECT ctid FROM {s}.outbox_cursor))`,
	"event_member":   `SELECT sum({s}.outbox_remove_member(g, NULL))::bigint FROM unnest('{mine,theirs}'::text[]) AS g`,
	"consumer_start": `SELECT sum({s}.outbox_remove_topics(g, '{t}', ARRAY[gen_random_uuid()]))::bigint FROM unnest('{mine,theirs}'::text[]) AS g`,
	"consumer_gap": `SELECT sum(n)::bigint FROM (SELECT {s}.outbox_remove_gaps(consumer_group, array_agg(topic), array_agg(topic_id), array_agg(partition),
		array_agg(action), array_agg(event_type), array_agg(version)) AS n FROM {s}.consumer_gap GROUP BY consumer_group) AS g`,
}

// removers are rights of a role, and of how many of two groups it then removes rows.
var removers = []struct {
	name, rights string
	groups       int64
}{
	{"a role without groups", ``, 0},
	{"a role with a group", `INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('mine', {name})`, 1},
	{"a role with the group of a role", `INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('mine', 'outbox_consumer{suffix}')`, 1},
	{"a group of all roles", `INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('mine', 'public')`, 1},
	{"a group of a role that is gone", `INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('mine', 'no such role')`, 0},
	{"a role with all groups", `INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ('*', {name})`, 2},
	{"a role that may write all data", `GRANT pg_write_all_data TO {role}`, 2},
	{"a role that policies do not restrict", `ALTER ROLE {role} BYPASSRLS`, 2},
	{"a role that is a member of the owner", `GRANT {owner} TO {role}`, 2},
	{"a superuser", `ALTER ROLE {role} SUPERUSER`, 2},
}

// A role removes the same rows by functions as by DELETE, which policies restrict. It does not matter that the
// functions run as the owner, nor that the login has more rights than the role that was set.
func TestFunctionsRemoveForTheirCaller(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	r := newRoles(t, h)
	h.seedGroups(t)
	_, err := h.db.Exec(background, h.sql(`UPDATE {s}.event_member SET renewed_at = now() - interval '2 days';
		UPDATE {s}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = now()`))
	require.NoError(t, err)
	var owner string
	require.NoError(t, h.db.QueryRow(background, `SELECT current_user`).Scan(&owner))
	for _, remover := range removers {
		for _, set := range []string{"SET LOCAL ROLE", "SET LOCAL SESSION AUTHORIZATION"} {
			name := `it's "a" rôle ` + uuid.NewString()[:8]
			replace := strings.NewReplacer("{role}", pgx.Identifier{name}.Sanitize(), "{name}", "'"+strings.ReplaceAll(name, "'", "''")+"'", "{suffix}", r.suffix,
				"{owner}", pgx.Identifier{owner}.Sanitize(), "{s}", pgx.Identifier{h.schema}.Sanitize(), "{set}", set)
			tx, err := h.db.Begin(background)
			require.NoError(t, err)
			defer tx.Rollback(background)
			_, err = tx.Exec(background, replace.Replace(fmt.Sprintf(`CREATE ROLE {role} IN ROLE outbox_consumer{suffix}, outbox_worker{suffix};
				GRANT DELETE ON ALL TABLES IN SCHEMA {s} TO {role}; %s; {set} {role}`, remover.rights)), pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err, remover.name)
			for table, call := range removals {
				var removed, deleted int64
				err := pgx.BeginFunc(background, tx, func(tx pgx.Tx) error {
					require.NoError(t, tx.QueryRow(background, h.sql(call)).Scan(&removed), call)
					return pgx.ErrNoRows // rolls back
				})
				require.ErrorIs(t, err, pgx.ErrNoRows)
				require.NoError(t, tx.QueryRow(background, h.sql(`WITH gone AS (DELETE FROM {s}.`+table+` RETURNING 1) SELECT count(*) FROM gone`)).Scan(&deleted))
				require.Equal(t, deleted, removed, "%s, %s: %s", remover.name, set, table)
				if table != "outbox_cursor" { // which has relays, too
					require.Equal(t, remover.groups, removed, "%s, %s: %s", remover.name, set, table)
				}
			}
			require.NoError(t, tx.Rollback(background))
		}
	}
}

// A row that another transaction changes while a function waits for it stays: a note is young again, a delivery
// requeued, a process alive, a gap extended, a position saved.
func TestFunctionsRemoveNothingNewer(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	h.seedGroups(t)
	for change, table := range map[string]string{
		`UPDATE {s}.event_handled SET handled_at = now()`:                       "event_handled",
		`UPDATE {s}.event_delivery SET status = 'PENDING', processed_at = NULL`: "event_delivery",
		`UPDATE {s}.event_delivery SET processed_at = now()`:                    "event_delivery",
		`UPDATE {s}.event_member SET renewed_at = now()`:                        "event_member",
		`UPDATE {s}.consumer_gap SET version = version + 1`:                     "consumer_gap",
		`UPDATE {s}.consumer_start SET saved_at = now()`:                        "consumer_start",
	} {
		_, err := h.db.Exec(background, h.sql(`UPDATE {s}.event_member SET renewed_at = now() - interval '2 days';
			UPDATE {s}.event_handled SET handled_at = now() - interval '2 days';
			UPDATE {s}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = now() - interval '2 days'`))
		require.NoError(t, err)
		tx, err := h.db.Begin(background)
		require.NoError(t, err)
		defer tx.Rollback(background)
		_, err = tx.Exec(background, h.sql(change))
		require.NoError(t, err)
		call := h.sql(strings.ReplaceAll(removals[table], "'infinity'", "now() - interval '1 day'"))
		if table == "consumer_start" { // whose function removes the gap, which does not wait
			call = h.sql(`SELECT {s}.outbox_remove_topics('mine', '{t}', ARRAY[gen_random_uuid()])`)
		}
		removed := make(chan int64, 1)
		go func() {
			n := int64(-1)
			if err := h.db.QueryRow(background, call).Scan(&n); err != nil {
				t.Error(err)
			}
			removed <- n
		}()
		require.Eventually(t, func() bool {
			return h.countWhere(t, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%outbox_remove_%'
				AND query LIKE '%' || replace('{s}', '"', '') || '%'`) > 0
		}, testenv.Patience, 10*time.Millisecond, change)
		require.NoError(t, tx.Commit(background))
		require.Zero(t, <-removed, change)
	}
}
