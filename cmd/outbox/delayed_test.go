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

const sqlDelay = `
INSERT INTO {s}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT now() + make_interval(secs => $2), gen_random_uuid(), 'test.thing.happened.v1', 'test', 'Thing', $1, '1', 'application/json', now()`

// Delayed events are shown, cancelled and moved.
func TestDelayedCommands(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Contains(t, d.ok(t, "events", "delayed"), "0 events wait.")
	d.exec(t, sqlDelay, "due", -60.0)
	d.exec(t, sqlDelay, "later", 3600.0)
	d.exec(t, sqlDelay, "never", 7200.0)
	out := d.ok(t, "events", "delayed")
	require.Contains(t, out, "Thing/later")
	require.Contains(t, out, "3 events wait, the oldest has been due for 1m0")
	requireNarrow(t, out)
	var list struct {
		Waiting, Rejected int
		Late              float64 `json:"late_seconds"`
		Events            []delayedJSON
	}
	d.json(t, &list, exitOK, "events", "delayed", "--limit", "3")
	require.Equal(t, 3, list.Waiting)
	require.Equal(t, "thing-events", list.Events[2].Topic)
	id := list.Events[2].EventID
	require.Contains(t, d.ok(t, "events", "cancel", id, "--reason", "no longer needed"), "Cancelled 1 event of 1.")
	require.Contains(t, d.ok(t, "events", "cancel", id, "--reason", "no longer needed"), "Cancelled 0 events of 1.")
	require.Contains(t, d.ok(t, "audit"), "cancel")
	require.Equal(t, exitUsage, d.call(t, "events", "cancel", id).code, "no reason")
	require.Equal(t, exitUsage, d.call(t, "events", "cancel", "7", "--reason", "why").code)
	require.Equal(t, exitUsage, d.call(t, "events", "delayed", "--limit", "0").code)

	require.Contains(t, d.ok(t, "events", "move", "--once"), "Moved 1 event.")
	require.Contains(t, d.ok(t, "events", "list"), "Thing/due")
	require.Contains(t, d.ok(t, "events", "move", "--once"), "Moved 0 events.")
	d.exec(t, `UPDATE {s}.outbox_delayed SET rejected_at = now(), rejection = '23505: taken'`)
	require.Contains(t, d.ok(t, "events", "delayed"), "0 events wait, 1 is rejected: --rejected.")
	require.Contains(t, d.ok(t, "events", "delayed", "--rejected"), "23505: taken")

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan int)
	var output, errs testenv.Buffer
	go func() { ended <- d.start(ctx, &output, &errs, "events", "move") }()
	d.exec(t, sqlDelay, "soon", 0.5)
	require.Eventually(t, func() bool { return strings.Contains(d.ok(t, "events", "list"), "Thing/soon") }, testenv.Patience, 50*time.Millisecond)
	stop()
	require.Equal(t, exitOK, <-ended, errs.String())
}

// A move of what is due that is interrupted says so, because events may be left.
func TestMoveOnceIsInterrupted(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	const due = 10_000 // more than one look takes
	d.exec(t, strings.Replace(sqlDelay, "$1", "n::text", 1)+` FROM generate_series(1, $1::int) AS n`, due, -60.0)
	d.exec(t, `CREATE FUNCTION {s}.is_slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END $$`)
	d.exec(t, `CREATE TRIGGER is_slow BEFORE INSERT ON {s}.outbox FOR EACH STATEMENT EXECUTE FUNCTION {s}.is_slow()`)

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan int)
	var output, errs testenv.Buffer
	go func() { ended <- d.start(ctx, &output, &errs, "events", "move", "--once") }()
	require.Eventually(t, func() bool {
		var sleeps bool
		require.NoError(t, d.db.QueryRow(background, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query LIKE '%' || $1 || '%')`, d.schema).Scan(&sleeps))
		return sleeps
	}, testenv.Patience, 10*time.Millisecond)
	stop()
	require.Equal(t, exitError, <-ended, output.String())
	require.Regexp(t, `^Moved [\d,]+ events\.\n$`, output.String())
	require.Contains(t, errs.String(), "interrupted")
	require.Contains(t, d.ok(t, "events", "delayed"), ",000 events wait, the oldest")
	d.exec(t, `DROP TRIGGER is_slow ON {s}.outbox`)
	d.ok(t, "events", "move", "--once")
	require.Contains(t, d.ok(t, "events", "delayed"), "0 events wait.")
}

const sqlReject = `
CREATE FUNCTION {s}.rejects() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.aggregate_id LIKE 'bad%' THEN
        PERFORM pg_sleep(0.02);
        RAISE check_violation;
    END IF;
    RETURN NEW;
END $$`

// A move of what is due goes on behind events that outbox rejects, however long that takes. It says how many they are,
// and does not end as if all were moved.
func TestMoveOnceIsRejected(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	const bad = 100 // more than a round rejects
	d.exec(t, strings.Replace(sqlDelay, "$1", "'bad-' || n", 1)+` FROM generate_series(1, $1::int) AS n`, bad, -60.0)
	d.exec(t, sqlDelay, "good", -30.0)
	d.exec(t, sqlReject)
	d.exec(t, `CREATE TRIGGER rejects BEFORE INSERT ON {s}.outbox FOR EACH ROW EXECUTE FUNCTION {s}.rejects()`)

	a := d.call(t, "events", "move", "--once")
	require.Equal(t, exitProblems, a.code, a.err)
	require.Equal(t, "Moved 1 event.\n100 events were rejected: outbox events delayed --rejected\n", a.out)
	require.Contains(t, d.ok(t, "events", "list"), "Thing/good")
	require.Contains(t, d.ok(t, "events", "delayed"), "0 events wait, 100 are rejected: --rejected.")
	require.Equal(t, "Moved 0 events.\n", d.ok(t, "events", "move", "--once"), "they are shown, and not tried again")
}

// A move of what is due does not end as if all were moved while another session keeps it from moving, or has locked
// an event.
func TestMoveOnceIsHeldUp(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.exec(t, sqlDelay, "due", -60.0)
	for says, lock := range map[string]string{
		"Another session moves events, and some are left.":      `LOCK TABLE {s}.outbox_mover IN SHARE UPDATE EXCLUSIVE MODE`,
		"Transactions have locked events of 1 key, which wait.": `DELETE FROM {s}.outbox_delayed`,
	} {
		tx, err := d.db.Begin(background)
		require.NoError(t, err)
		defer tx.Rollback(background)
		_, err = tx.Exec(background, strings.ReplaceAll(lock, "{s}", pgx.Identifier{d.schema}.Sanitize()))
		require.NoError(t, err)
		a := d.call(t, "events", "move", "--once")
		require.Equal(t, exitProblems, a.code, a.out)
		require.Equal(t, "Moved 0 events.\n"+says+"\n", a.out)
		var out struct {
			Moved, Rejected int
			Blocked         int `json:"blocked_keys"`
			Busy, Left      bool
		}
		d.json(t, &out, exitProblems, "events", "move", "--once")
		require.True(t, out.Left)
		require.Equal(t, out.Busy, out.Blocked == 0)
		require.NoError(t, tx.Rollback(background))
	}
	require.Equal(t, "Moved 1 event.\n", d.ok(t, "events", "move", "--once"))
}
