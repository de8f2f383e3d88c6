package cursor_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// lock changes rows of outbox_failed in a transaction that stays open, and returns a function that rolls it back.
func (d *fixture) lock(t *testing.T, where string) (rollback func()) {
	t.Helper()
	tx, err := d.DB.Begin(context.Background())
	require.NoError(t, err)
	tag, err := tx.Exec(context.Background(), pg.InSchema(`UPDATE {schema}.outbox_failed SET held = held WHERE `+where, d.Schema))
	require.NoError(t, err)
	require.NotZero(t, tag.RowsAffected())
	rollback = func() { _ = tx.Rollback(context.Background()) }
	t.Cleanup(rollback)
	return rollback
}

// parkedRow is a row of InsertParked, as a retrier knows it.
func parkedRow(n int64) *cursor.FailedRow {
	return &cursor.FailedRow{Event: envelope.Event{ID: n, EventID: []byte(testenv.ParkedID(n))}, Row: n}
}

// rows returns the rows of outbox_failed, by what an expression says of each.
func (d *fixture) rows(t *testing.T, expression string) []string {
	t.Helper()
	found, err := d.DB.Query(context.Background(), pg.InSchema(`SELECT `+expression+` FROM {schema}.outbox_failed AS f ORDER BY outbox_id`, d.Schema))
	require.NoError(t, err)
	all, err := pgx.CollectRows(found, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// Keys get their heads although another transaction has locked rows. A key of which such a row would have to change
// stays as it is until it can be changed as a whole.
func TestPromoteLeavesLockedRows(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	d.InsertParked(t, 6, 3) // of each key a head and one behind it
	d.Exec(t, `DELETE FROM {schema}.outbox_failed WHERE outbox_id IN (1, 2)`)
	d.Exec(t, `INSERT INTO {schema}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload,
		content_type, occurred_at, created_at, status) SELECT relay, 2, parking_key, gen_random_uuid(), event_type, source, aggregate_type, aggregate_id,
		payload, content_type, occurred_at, created_at, 'parked' FROM {schema}.outbox_failed WHERE outbox_id = 3`) // an operator retries a dead event
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead' WHERE outbox_id = 6`)
	state := func() []string { return d.rows(t, `format('%s %s', outbox_id, status)`) }
	before := []string{"2 parked", "3 waiting", "4 parked", "5 parked", "6 dead"}
	require.Equal(t, before, state())
	keys := []string{"b-events/key-0", "b-events/key-1", "b-events/key-2"}

	rollback := d.lock(t, `outbox_id IN (3, 4)`)
	left, err := failed.Promote(ctx, statements, l, keys)
	require.NoError(t, err)
	require.Equal(t, 3, left)
	require.Equal(t, []string{"2 parked", "3 waiting", "4 parked", "5 waiting", "6 dead"}, state())
	rollback()
	left, err = failed.Promote(ctx, statements, l, keys)
	require.NoError(t, err)
	require.Zero(t, left)
	require.Equal(t, []string{"2 waiting", "3 parked", "4 waiting", "5 waiting", "6 dead"}, state())
}

// With PassFailedKeys every parked row becomes a head, and a class of dead events is retried, except for what another
// transaction has locked.
func TestLockedRowsDelayNoOthers(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	d.InsertParked(t, 4, 4)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead', error_class = 'c', next_retry_at = now() - '1 h'::interval`)
	state := func() []string { return d.rows(t, `format('%s %s', outbox_id, status)`) }

	rollback := d.lock(t, `outbox_id = 2`)
	require.NoError(t, failed.RetryDead(ctx, l, map[string]time.Duration{"c": time.Minute}))
	require.Equal(t, []string{"1 parked", "2 dead", "3 parked", "4 parked"}, state())
	rollback()
	require.NoError(t, failed.RetryDead(ctx, l, map[string]time.Duration{"c": time.Minute}))

	rollback = d.lock(t, `outbox_id = 3`)
	require.NoError(t, failed.PromoteAll(ctx, statements, l))
	require.Equal(t, []string{"1 waiting", "2 waiting", "3 parked", "4 waiting"}, state())
	rollback()
	require.NoError(t, failed.PromoteAll(ctx, statements, l))
	require.Equal(t, []string{"1 waiting", "2 waiting", "3 waiting", "4 waiting"}, state())
}

// A dead event whose key an operator holds is not retried by itself, unless each dead event holds its key.
func TestHeldDeadEventsStay(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.InsertParked(t, 2, 2)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead', error_class = 'c', next_retry_at = now() - '1 h'::interval`)
	d.Exec(t, `SELECT {schema}.outbox_hold_key(relay, parking_key, 'kim', 'why') FROM {schema}.outbox_failed WHERE outbox_id = 1`)
	state := func() []string { return d.rows(t, `format('%s %s', outbox_id, status)`) }
	after := map[string]time.Duration{"c": time.Minute}
	require.NoError(t, cursor.NewFailed(d.DB, d.Schema, "default", false).RetryDead(ctx, l, after))
	require.Equal(t, []string{"1 dead", "2 parked"}, state())
	require.NoError(t, cursor.NewFailed(d.DB, d.Schema, "default", true).RetryDead(ctx, l, after))
	require.Equal(t, []string{"1 parked", "2 parked"}, state())
}

// The results of locked rows are named, and all others are saved, whether rows are removed or kept.
func TestResultsOfLockedRowsAreLeft(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{false, true} {
		t.Run(fmt.Sprint("keep: ", keep), func(t *testing.T) {
			t.Parallel()
			d, ctx := newFixture(t), context.Background()
			l, err := d.leases.Acquire(ctx)
			require.NoError(t, err)
			failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
			d.InsertParked(t, 8, 4)
			results := []cursor.RetryResult{
				{Event: parkedRow(1), Row: 1, Status: statusResolved}, {Event: parkedRow(2), Row: 2, Status: statusResolved},
				{Event: parkedRow(3), Row: 3, Status: statusFailed, Count: 1}, {Event: parkedRow(4), Row: 4, Status: statusFailed, Count: 1},
			}
			rollback := d.lock(t, `id IN (2, 4, 5)`) // 5 is behind 1
			save := func(results ...cursor.RetryResult) cursor.Saved {
				saved, err := failed.SaveResults(ctx, l, results, keep)
				require.NoError(t, err)
				slices.Sort(saved.Rows)
				slices.Sort(saved.Locked)
				return saved
			}
			require.Equal(t, cursor.Saved{Rows: []int64{1, 3}, Locked: []int64{2, 4}, Headless: []string{"b-events/key-1"}}, save(results...))
			rollback()
			require.Equal(t, cursor.Saved{Rows: []int64{2, 4}, Locked: []int64{}, Headless: []string{"b-events/key-2"}}, save(results[1], results[3]))
			require.Equal(t, cursor.Saved{Rows: []int64{}, Locked: []int64{}, Headless: []string{}}, save(results[0], results[1]), "they are gone, or resolved")
			want := []string{"3 failed 1", "4 failed 1", "5 parked 0", "6 parked 0", "7 parked 0", "8 parked 0"}
			if keep {
				want = append([]string{"1 resolved 0", "2 resolved 0"}, want...)
			}
			require.Equal(t, want, d.rows(t, `format('%s %s %s', id, status, retry_count)`))
		})
	}
}

// Heads that another transaction has locked are not sent, and neither are those of some keys.
func TestLockedHeadsAreNotDue(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	d.InsertParked(t, 4, 4)
	due := func() (ids []int64) {
		found, err := failed.Due(ctx, "", false, pgtype.Timestamptz{}, []string{"b-events/key-3"})
		require.NoError(t, err)
		for _, e := range found {
			ids = append(ids, e.Row)
		}
		return ids
	}
	rollback := d.lock(t, `id = 1`)
	require.Equal(t, []int64{2, 4}, due())
	rollback()
	require.Equal(t, []int64{1, 2, 4}, due())
	first, err := failed.First(ctx, []string{""}, []string{"b-events/key-1", "b-events/key-2"})
	require.NoError(t, err)
	require.Len(t, first, 1)
	require.EqualValues(t, 3, first[0].Row)
}

// The cursor moves past an event whose row is in outbox_failed already, while an operator is changing that row.
func TestMoveWaitsForNoOperator(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	l, p := d.opened(t)
	p.Last, p.Highest = 1, 1
	_, err := d.cursors.Move(context.Background(), l, p, someFailure)
	require.NoError(t, err)
	require.Equal(t, 1, d.Count(t, "outbox_failed"))
	d.Exec(t, `DELETE FROM {schema}.outbox_cursor WHERE last_processed_id = 1`) // a crash has lost it
	d.lock(t, `outbox_id = 1`)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err = d.cursors.Move(ctx, l, p, someFailure)
	require.NoError(t, err)
	require.Equal(t, 1, d.Count(t, "outbox_failed"))
}

// A retrier has sent the head of a key and goes on with the events behind it. Meanwhile the session has written another
// head. No event overtakes that one.
func TestParkedEndsAtAnotherHead(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", true)
	parked := func() (ids []int64) {
		found, err := failed.Parked(ctx, []string{"b-events/key-0", "b-events/key-1"})
		require.NoError(t, err)
		for _, e := range found {
			ids = append(ids, e.Row)
		}
		return ids
	}
	d.InsertParked(t, 6, 2) // 1, 3 and 5 are of one key
	require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, parked())
	for _, head := range []string{`status = 'failed'`, `status = 'waiting', place = 't/1'`, `status = 'dead', held = true`} {
		d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'parked', place = '', held = false WHERE id = 3`)
		require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, parked())
		d.Exec(t, `UPDATE {schema}.outbox_failed SET `+head+` WHERE id = 3`)
		require.Equal(t, []int64{1, 2, 4, 6}, parked(), head)
	}
}
