package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// A group of workers begins with the archive, after a start that was interrupted.
func TestGroupStart(t *testing.T) {
	t.Parallel()
	d := newCutShop(t)
	for args, want := range map[string]string{
		"group start":                            "group start: want NAME",
		"group start stats":                      "--from archive is missing",
		"group start stats --from archive --yes": "--reason is missing",
	} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitUsage, a.code)
		require.Contains(t, a.err, want)
	}
	a := d.call(t, "group", "start", "stats", "--from", "archive")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "outbox archive create makes it")
	d.ok(t, "archive", "create")
	d.record(t, "a", "b", "a")
	const columns = `id, event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type, topic, partition_key,
		headers, occurred_at, created_at, size`
	d.exec(t, `WITH gone AS (DELETE FROM {s}.outbox WHERE id <= 2 RETURNING *)
		INSERT INTO {s}.outbox_archive (`+columns+`) SELECT `+columns+` FROM gone`)
	require.Contains(t, d.ok(t, "group", "start", "stats", "--from", "archive"), "Group stats is new. The first event has outbox id 1; the archive ends with 2, outbox begins with 3")

	start := []string{"group", "start", "stats", "--from", "archive", "--yes", "--reason", "a new view"}
	ctx, interrupt := context.WithTimeout(background, 3*time.Second)
	defer interrupt()
	a = d.callWithin(t, ctx, start...)
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "waiting: no process of the group runs")
	require.Contains(t, a.err, "to go on: outbox group start stats --from archive")
	require.Contains(t, d.ok(t, "cut", "status"), "starting")
	require.Contains(t, d.ok(t, "consumers"), "group stats: starting since")
	require.Contains(t, d.ok(t, "group", "start", "stats", "--from", "archive"), "Group stats is starting: it has the events up to outbox id 0 of 3")

	d.worker(t)
	a = d.call(t, start...)
	require.Equal(t, exitOK, a.code, a.err)
	require.Contains(t, a.out, "Group stats has all events before the cut, up to outbox id 3, and goes on by itself: 3 deliveries made.")
	handled := func() (n int) {
		require.NoError(t, d.db.QueryRow(background, `SELECT count(*) FROM `+pgx.Identifier{d.schema, "effect"}.Sanitize()).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return handled() == 3 }, testenv.Patience, 10*time.Millisecond)
	require.Contains(t, d.ok(t, "audit", "--action", "start-group"), "a new view")
	a = d.call(t, start...)
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "the group has begun already")
}
