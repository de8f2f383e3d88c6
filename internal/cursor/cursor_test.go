package cursor_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// fixture is what a relay works with, in a schema of the test's own.
type fixture struct {
	*testenv.Tables
	cursors *cursor.Store
	leases  *lease.Store
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	d := testenv.NewTables(t)
	return &fixture{d, cursor.NewStore(d.DB, d.Schema, "default"), lease.NewStore(d.DB, d.Schema, "default", time.Minute)}
}

// takeOver lets another process take the lease.
func (d *fixture) takeOver(t *testing.T) *lease.Lease {
	t.Helper()
	d.Exec(t, `UPDATE {schema}.outbox_lease SET expires_at = '-infinity'`)
	l, err := lease.NewStore(d.DB, d.Schema, "default", time.Minute).Acquire(context.Background())
	require.NoError(t, err)
	return l
}

// opened returns a position with an open window of which one event was read.
func (d *fixture) opened(t *testing.T) (*lease.Lease, cursor.Position) {
	t.Helper()
	ctx := context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	d.Insert(t, 3)
	p, events, large, err := d.cursors.Open(ctx, l, p, 3)
	require.NoError(t, err)
	require.False(t, large)
	require.Len(t, events, 3)
	p.Last, p.Highest = events[0].ID, events[0].ID
	return l, p
}

// Values of outbox_failed.status.
const (
	statusFailed   = "failed"
	statusDead     = "dead"
	statusResolved = "resolved"
)

var someFailure = []cursor.Failure{{
	Event: &envelope.Event{ID: 1}, Key: "b-events/k", Status: statusFailed, Class: "message_too_large", Err: errors.New("too large"),
}}

// A process that lost the lease can neither move the cursor nor record a failure, even if it still
// takes the lease for its own.
func TestLostLeaseMovesNothing(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.opened(t)
	d.takeOver(t)
	before := d.Count(t, "outbox_cursor")
	_, err := d.cursors.Move(ctx, l, p, nil)
	require.ErrorIs(t, err, cursor.ErrStale)
	_, err = d.cursors.Move(ctx, l, p, someFailure)
	require.ErrorIs(t, err, cursor.ErrStale)
	_, _, _, err = d.cursors.Open(ctx, l, p, 10)
	require.ErrorIs(t, err, lease.ErrLeaseLost)
	_, err = cursor.NewStore(d.DB, d.Schema, "other").Load(ctx, l)
	require.ErrorIs(t, err, lease.ErrLeaseLost)
	require.ErrorIs(t, d.leases.Renew(ctx, l), lease.ErrLeaseLost)
	require.Equal(t, before, d.Count(t, "outbox_cursor"))
	require.Zero(t, d.Count(t, "outbox_failed"))
}

// A move that meets a takeover in progress waits for it and then fails: had it
// looked only at what was committed when it began, it would pass.
func TestMoveWaitsForTakeover(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.opened(t)
	for name, failures := range map[string][]cursor.Failure{"move": nil, "move with a rejection": someFailure} {
		t.Run(name, func(t *testing.T) {
			takeover, err := d.DB.Begin(ctx)
			require.NoError(t, err)
			defer takeover.Rollback(ctx)
			_, err = takeover.Exec(ctx, pg.InSchema(`UPDATE {schema}.outbox_lease SET holder = 'other', epoch = epoch + 1`, d.Schema))
			require.NoError(t, err)
			moved := make(chan error, 1)
			go func() {
				_, err := d.cursors.Move(ctx, l, p, failures)
				moved <- err
			}()
			var pid int // PgBouncer tells its clients another one
			require.NoError(t, takeover.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid))
			require.Eventually(t, func() bool {
				var waiting int
				err := d.DB.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid))`, pid).Scan(&waiting)
				return err == nil && waiting == 1
			}, time.Minute, time.Millisecond)
			require.NoError(t, takeover.Commit(ctx))
			require.ErrorIs(t, <-moved, cursor.ErrStale)
			require.Zero(t, d.Count(t, "outbox_failed"))
			d.Exec(t, `UPDATE {schema}.outbox_lease SET holder = $1, epoch = $2`, l.Holder, l.Epoch)
		})
	}
}

// If the newest row vanished in a crash, or another process added one, the cursor is not
// where the relay expects it.
func TestChangedCursorIsStale(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"vanished": `DELETE FROM {schema}.outbox_cursor WHERE id = (SELECT max(id) FROM {schema}.outbox_cursor)`,
		"added": `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		          SELECT last_processed_id, snapshot, highest_id, system_identifier, epoch FROM {schema}.outbox_cursor LIMIT 1`,
	} {
		t.Run(name, func(t *testing.T) {
			d, ctx := newFixture(t), context.Background()
			l, p := d.opened(t)
			d.Exec(t, change)
			before := d.Count(t, "outbox_cursor")
			_, err := d.cursors.Move(ctx, l, p, nil)
			require.ErrorIs(t, err, cursor.ErrStale)
			_, err = d.cursors.Move(ctx, l, p, someFailure)
			require.ErrorIs(t, err, cursor.ErrStale)
			_, _, _, err = d.cursors.Open(ctx, l, p, 10)
			require.ErrorIs(t, err, cursor.ErrStale)
			p.Window = "" // also when there is nothing to end
			_, _, _, err = d.cursors.Open(ctx, l, p, 10)
			require.ErrorIs(t, err, cursor.ErrStale)
			require.Equal(t, before, d.Count(t, "outbox_cursor"))
			require.Zero(t, d.Count(t, "outbox_failed"))
		})
	}
}

// A window does not change: what commits later is not in it, and what was
// attempted of it is not read again by the next holder.
func TestWindowIsResumed(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)

	late, err := d.DB.Begin(ctx) // takes ids in the middle and commits later
	require.NoError(t, err)
	d.Insert(t, 5)
	_, err = late.Exec(ctx, pg.InSchema(`
		INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'late', '{}', 'application/json', now() FROM generate_series(1, 2)`, d.Schema))
	require.NoError(t, err)
	d.Insert(t, 5)

	p, events, large, err := d.cursors.Open(ctx, l, p, 9)
	require.NoError(t, err)
	require.True(t, large, "ten events")
	require.Empty(t, events)
	require.Equal(t, []int64{1, 2, 3, 4, 5, 8, 9, 10, 11, 12}, remaining(t, d.cursors, p))
	require.NoError(t, late.Commit(ctx))
	d.Insert(t, 5)
	p.Last, p.Highest = 4, 4
	_, err = d.cursors.Move(ctx, l, p, nil)
	require.NoError(t, err)

	l = d.takeOver(t)
	p, err = d.cursors.Load(ctx, l)
	require.NoError(t, err)
	require.Equal(t, []int64{5, 8, 9, 10, 11, 12}, remaining(t, d.cursors, p))
	p.Last, p.Highest = 12, 12
	p, events, large, err = d.cursors.Open(ctx, l, p, 7)
	require.NoError(t, err)
	require.False(t, large)
	require.Equal(t, []int64{6, 7, 13, 14, 15, 16, 17}, ids(events))
	require.Zero(t, p.Last)
}

// remaining returns the ids of the open window that are left, read in small pages.
func remaining(t *testing.T, c *cursor.Store, p cursor.Position) []int64 {
	t.Helper()
	var all cursor.IDSet
	u, err := cursor.UnpagedOf(p)
	require.NoError(t, err)
	for len(u.Ranges) > 0 {
		var ids []int64
		ids, u, err = c.Page(context.Background(), p, u, 3)
		require.NoError(t, err)
		require.LessOrEqual(t, len(ids), 3)
		for _, id := range ids {
			all.Add(id)
		}
	}
	return all.First(all.Len())
}

func ids(events []envelope.Event) (all []int64) {
	for _, e := range events {
		all = append(all, e.ID)
	}
	return all
}

// The poll of an idle relay neither locks nor writes nor takes a transaction id.
func TestIdleOpen(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	next := func() (xid string) {
		require.NoError(t, d.DB.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())`).Scan(&xid))
		return xid
	}
	require.Eventually(t, func() bool { // unless another client of this server took one
		before := next()
		idle, events, large, err := d.cursors.Open(ctx, l, p, 10)
		require.NoError(t, err)
		require.False(t, large)
		require.Empty(t, events)
		require.Equal(t, p, idle)
		return next() == before
	}, time.Minute, time.Millisecond)
}

// A crash or a failover takes the row that announced the open window. Its ids may
// be others' by now: nothing is read by them.
func TestVanishedWindowIsNotRead(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	_, p := d.opened(t)
	ids := remaining(t, d.cursors, p)
	require.Len(t, ids, 2)
	for name, change := range map[string]string{
		"another lease's":   `UPDATE {schema}.outbox_cursor SET epoch = epoch + 1 WHERE id = $1`,
		"another relay's":   `UPDATE {schema}.outbox_cursor SET relay = 'other' WHERE id = $1`,
		"nobody's any more": `DELETE FROM {schema}.outbox_cursor WHERE id = $1`,
	} {
		d.Exec(t, change, p.CursorID)
		d.requireStale(t, p, ids, name)
		d.Exec(t, `UPDATE {schema}.outbox_cursor SET epoch = $2, relay = 'default' WHERE id = $1`, p.CursorID, p.Epoch)
	}
}

// requireStale requires that nothing of the open window can be read.
func (d *fixture) requireStale(t *testing.T, p cursor.Position, ids []int64, why string) {
	t.Helper()
	ctx := context.Background()
	_, _, err := d.cursors.Fetch(ctx, p, ids)
	require.ErrorIs(t, err, cursor.ErrStale, why)
	_, err = d.cursors.FetchBare(ctx, p, ids[0], true)
	require.ErrorIs(t, err, cursor.ErrStale, why)
	u, err := cursor.UnpagedOf(p)
	require.NoError(t, err)
	_, _, err = d.cursors.Page(ctx, p, u, 100)
	require.ErrorIs(t, err, cursor.ErrStale, why)
}

// A statement that was prepared and then fails has no columns to read.
func TestReadsThatFail(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.opened(t)
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	reads := map[string]func() error{
		"fetch": func() error { _, _, err := d.cursors.Fetch(ctx, p, []int64{1}); return err },
		"bare":  func() error { _, err := d.cursors.FetchBare(ctx, p, 1, true); return err },
		"page": func() error {
			_, _, err := d.cursors.Page(ctx, p, cursor.Unpaged{Ranges: []cursor.XidRange{{First: 3, Last: 4}}}, 10)
			return err
		},
		"due":    func() error { _, err := failed.Due(ctx, "", false, pgtype.Timestamptz{}, nil); return err },
		"parked": func() error { _, err := failed.Parked(ctx, []string{"key"}); return err },
		"open":   func() error { _, _, _, err := d.cursors.Open(ctx, l, p, 10); return err },
		"first":  func() error { _, err := failed.First(ctx, []string{"orders"}, nil); return err },
		"places": func() error { _, err := failed.BadPartitions(ctx); return err },
	}
	for name, read := range reads {
		if name != "open" { // it was, by opened
			require.NoError(t, read(), name)
		}
	}
	d.Exec(t, `ALTER TABLE {schema}.outbox RENAME TO outbox_gone`)
	d.Exec(t, `ALTER TABLE {schema}.outbox_failed RENAME TO outbox_failed_gone`)
	for name, read := range reads {
		require.True(t, pg.IsUndefined(read()), name)
	}
}

// Every constructor completes every statement.
func TestStatementsAreComplete(t *testing.T) {
	t.Parallel()
	c := cursor.NewStore(new(pgxpool.Pool), "s", "r")
	for _, sql := range []string{c.SQLLoad, c.SQLSeed, c.SQLOpen, c.SQLMove, c.SQLMoveFailed, c.SQLPage, c.SQLFetch, c.SQLFetchBare, c.SQLSequence, c.SQLRebase, c.SQLRebaseProof} {
		require.Contains(t, sql, `"s".outbox`)
		require.NotContains(t, sql, "{schema}")
	}
}

// A probe says so whenever the next look may find something, and not for what the look itself has written.
func TestProbe(t *testing.T) {
	// Not parallel: other transactions of the cluster end meanwhile.
	d := newFixture(t)
	ctx := context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	p, err := d.cursors.Load(ctx, l)
	require.NoError(t, err)
	look := func() (found int) {
		t.Helper()
		next, events, _, err := d.cursors.Open(ctx, l, p, 10)
		require.NoError(t, err)
		p = next
		return len(events)
	}
	changed := func() bool {
		t.Helper()
		changed, err := d.cursors.Probe(ctx)
		require.NoError(t, err)
		return changed
	}
	// quietly calls what is true unless another transaction of the cluster has ended.
	quietly := func(what func() bool, why string) {
		t.Helper()
		require.Eventually(t, what, testenv.Patience, time.Millisecond, why)
	}
	quietly(func() bool { look(); return !changed() }, "a look that found nothing")
	for range 10 {
		other, err := d.DB.Begin(ctx)
		require.NoError(t, err)
		_, err = other.Exec(ctx, `SELECT pg_current_xact_id()`)
		require.NoError(t, err)
		_, err = other.Exec(ctx, pg.InSchema(`SELECT nextval('{schema}.outbox_id_seq')`, d.Schema))
		require.NoError(t, err)
		quietly(func() bool { look(); return !changed() }, "another transaction is open")
		d.Insert(t, 1)
		require.True(t, changed())
		require.Equal(t, 1, look())
		look()
		require.NoError(t, other.Rollback(ctx))
		require.True(t, changed(), "a transaction has ended that has drawn an id")
		look()
		unrelated, err := d.DB.Begin(ctx)
		require.NoError(t, err)
		_, err = unrelated.Exec(ctx, `SELECT pg_current_xact_id()`)
		require.NoError(t, err)
		quietly(func() bool {
			look()
			first := changed()
			return !changed() && !first
		}, "a transaction is open")
		d.Insert(t, 1)
		require.True(t, changed())
		require.Equal(t, 1, look())
		require.NoError(t, unrelated.Rollback(ctx))
		require.False(t, changed(), "all ids were found: what has ended beside them has none")
		quietly(func() bool { d.Insert(t, 1); return look() == 1 && !changed() }, "the look has written itself")
	}
	quietly(func() bool {
		look()
		first := changed()
		return !changed() && !first
	}, "no id has been drawn")
	for range 200 {
		_, err := d.DB.Exec(ctx, `SELECT pg_current_xact_id()`)
		require.NoError(t, err)
		require.False(t, changed(), "transactions that cannot have events")
	}
	d.cursors.LastPoll.Snapshot = ""
	require.True(t, changed(), "nothing is known")
}

// The newest cursor is that with the highest id. A clock that was set back gives it a time before all others.
func TestNewestCursorGoesByID(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	d.Insert(t, 2)
	require.Equal(t, []int64{1, 2}, d.unsent(t, "default"))
	d.Insert(t, 1)
	require.Equal(t, []int64{3}, d.unsent(t, "default"))
	ids := d.IDs(t, "outbox_cursor")
	d.Exec(t, `UPDATE {schema}.outbox_cursor SET created_at = now() - '1 hour'::interval WHERE id = $1`, ids[len(ids)-1])
	require.Empty(t, d.unsent(t, "default"))
}
