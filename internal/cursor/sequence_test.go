package cursor_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// remedy returns the statement that an error of checkSequence contains.
func remedy(t *testing.T, err error) (sql string) {
	t.Helper()
	_, sql, found := strings.Cut(err.Error(), "then: ")
	require.True(t, found, err.Error())
	return sql
}

// IDs that restart are found when a relay begins to lead, whatever is left that has the
// higher ones. What the error says sets it right, for other relays too.
func TestSequenceBehind(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"TRUNCATE RESTART IDENTITY, and the cursor remembers": `TRUNCATE {schema}.outbox RESTART IDENTITY`,
		"the sequence is set back":                            `SELECT setval('{schema}.outbox_id_seq', 4)`,
		"no cursor, but rows": `
			TRUNCATE {schema}.outbox_cursor; SELECT setval('{schema}.outbox_id_seq', 1)`,
		"the sequence of the positions": `
			UPDATE {schema}.outbox_cursor SET id = id + 100; SELECT setval('{schema}.outbox_cursor_id_seq', 3)`,
		"the sequence of the positions is restarted": `ALTER SEQUENCE {schema}.outbox_cursor_id_seq RESTART`,
		"both sequences": `ALTER SEQUENCE {schema}.outbox_id_seq RESTART; ALTER SEQUENCE {schema}.outbox_cursor_id_seq RESTART`,
		"no cursor, but failed rows": `
			TRUNCATE {schema}.outbox RESTART IDENTITY; TRUNCATE {schema}.outbox_cursor;
			INSERT INTO {schema}.outbox_failed
			       (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, status)
			SELECT 5, 'k', gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now(), 'dead'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newFixture(t)
			d.Insert(t, 6)
			d.sendUpTo(t, "default", 5)
			d.sendUpTo(t, "other", 6)
			d.ExecAll(t, change)
			_, _, _, err := d.arrive(t, "default")
			require.ErrorIs(t, err, cursor.ErrSequenceBehind)
			d.Exec(t, remedy(t, err))
			for _, relay := range []string{"default", "other"} {
				_, _, _, err = d.arrive(t, relay)
				require.NoError(t, err)
			}
			d.Insert(t, 1)
		})
	}
}

// Other ways to say the same of a sequence are none to complain about.
func TestSequenceIsAhead(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	_, _, _, err := d.arrive(t, "default") // nothing was ever recorded
	require.NoError(t, err)
	d.Insert(t, 6)
	d.sendUpTo(t, "default", 6)
	d.Exec(t, `ALTER SEQUENCE {schema}.outbox_id_seq RESTART WITH 7`) // the next one
	_, _, _, err = d.arrive(t, "default")
	require.NoError(t, err)
	d.Exec(t, `ALTER SEQUENCE {schema}.outbox_id_seq RESTART WITH 6`)
	_, _, _, err = d.arrive(t, "default")
	require.ErrorIs(t, err, cursor.ErrSequenceBehind)
	d.Exec(t, `SELECT setval('{schema}.outbox_id_seq', 6), setval('{schema}.outbox_cursor_id_seq', (SELECT max(id) + 1 FROM {schema}.outbox_cursor), false)`)
	_, _, _, err = d.arrive(t, "default")
	require.NoError(t, err)
}

// A role's statement_timeout must not keep a relay from beginning to lead, however many
// rows there are, or were until retention removed them.
func TestLoadOverManyRows(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `ALTER TABLE {schema}.outbox SET (autovacuum_enabled = false)`)
	d.Insert(t, retained)
	d.Exec(t, `
		INSERT INTO {schema}.outbox_failed
		       (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, status)
		SELECT id, 'k', event_id, event_type, source, aggregate_type, aggregate_id, '{}', content_type, occurred_at, created_at, 'resolved'
		  FROM {schema}.outbox WHERE id % 10 = 0`)
	_, _, _, err := d.arrive(t, "default")
	require.NoError(t, err)
	look := func(limit int) {
		t.Helper()
		tx, err := d.DB.Begin(ctx)
		require.NoError(t, err)
		defer tx.Rollback(ctx)
		_, err = tx.Exec(ctx, pg.PlannerSettings)
		require.NoError(t, err)
		start := time.Now()
		buffers, plan := testenv.Explain(t, tx, strings.ReplaceAll(d.cursors.SQLSequence, "$1", "'default'"))
		t.Logf("%d buffers, %v", buffers, time.Since(start).Round(time.Millisecond))
		require.LessOrEqual(t, buffers, limit, "%s", plan)
	}
	look(maxPollBuffers)
	d.Exec(t, `DELETE FROM {schema}.outbox`)
	d.Exec(t, `DELETE FROM {schema}.outbox_failed`)
	look(maxPollBuffers)
}

// An event that Kafka rejects is not lost although its id is the one of an event from
// before the ids restarted, whose row is kept. Nor does that row become a head again.
func TestFailureWithAnIDFromBefore(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.opened(t)
	id, err := d.cursors.Move(ctx, l, p, someFailure)
	require.NoError(t, err)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved', resolved_at = now()`)
	d.Exec(t, `TRUNCATE {schema}.outbox RESTART IDENTITY`)
	d.Insert(t, 1) // its id is 1 again
	p.CursorID, p.Last, p.Highest = id, 3, 3
	next, events, _, err := d.cursors.Open(ctx, l, p, 10)
	require.NoError(t, err)
	require.Equal(t, []int64{1}, ids(events))
	next.Last = 1
	_, err = d.cursors.Move(ctx, l, next, someFailure)
	require.NoError(t, err)
	require.Equal(t, 1, d.Count(t, "outbox_failed AS f JOIN {schema}.outbox AS o USING (event_id) WHERE f.status = 'failed'"))

	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'parked' WHERE status = 'failed'`) // without a head
	_, err = cursor.NewFailed(d.DB, d.Schema, "default", false).Promote(context.Background(), statements, l, []string{someFailure[0].Key})
	require.NoError(t, err)
	require.Equal(t, 1, d.Count(t, "outbox_failed WHERE status = 'waiting'"))
	require.Equal(t, 1, d.Count(t, "outbox_failed WHERE status = 'resolved'"))
}
