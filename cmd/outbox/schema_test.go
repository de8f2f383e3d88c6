package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// Commands work in a schema whose name has quotes, spaces and capitals, and 63 bytes, and the
// doctor finds nothing there.
func TestSchemaWithQuotes(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db := testenv.Pool(t, nil)
	schema := fmt.Sprintf(`we"ird 's Schäma %.8s`, uuid.NewString())
	schema += strings.Repeat("x", 63-len(schema))
	t.Cleanup(func() {
		_, err := db.Exec(background, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
		require.NoError(t, err)
	})
	d := commandFixtureAt(t, db, schema)
	d.vars["DATABASE_URL"] = d.url("&options=-c%20idle_in_transaction_session_timeout%3D60000%20-c%20search_path%3Dpg_catalog")
	require.Contains(t, d.ok(t, "migrate", "up", "--partition-rows", "10"), "0007_roles.sql")
	d.migrate(t)
	d.relay(t)
	d.record(t, "a")
	d.requireSent(t)
	_, err := db.Exec(background, `INSERT INTO `+pgx.Identifier{schema, "outbox_failed"}.Sanitize()+` (outbox_id, parking_key, event_id, event_type, source,
		aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, created_at, status)
		VALUES (1000, $1::text || '/k', gen_random_uuid(), 'test.thing.happened.v1', 'test', 'Thing', 'k', '{}', 'application/json', $1, now(), now(), $2)`,
		d.topic, outbox.StatusDead)
	require.NoError(t, err)
	require.Contains(t, d.ok(t, "failures", "list"), "event-1")
	for _, args := range [][]string{
		{"migrate", "status"}, {"status"}, {"failures", "show", "event-1"}, {"failures", "hold", "event-1", "--reason", "x"},
		{"failures", "release", "event-1", "--reason", "x"}, {"failures", "resolve", "event-1", "--reason", "x"},
		{"consumer", "pause", "--group", "g", "--reason", "x"}, {"consumers"}, {"consumer", "resume", "--group", "g", "--reason", "x"},
	} {
		a := d.call(t, args...)
		require.Contains(t, []int{exitOK, exitProblems}, a.code, "%v: %s%s", args, a.out, a.err)
	}
	require.Equal(t, map[string]int{outbox.StatusResolved: 1}, d.statuses(t))
	require.Empty(t, d.findings(t, "--skip", "sequence.behind,kafka"))
}
