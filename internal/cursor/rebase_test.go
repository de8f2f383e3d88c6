package cursor_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	cursors "github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// arrive takes the lease of a relay and loads its position.
func (d *fixture) arrive(t *testing.T, relay string) (*cursors.Store, *lease.Lease, cursors.Position, error) {
	t.Helper()
	ctx := context.Background()
	d.Exec(t, `UPDATE {schema}.outbox_lease SET expires_at = '-infinity' WHERE name = $1`, relay)
	c := cursors.NewStore(d.DB, d.Schema, relay)
	l, err := lease.NewStore(d.DB, d.Schema, relay, time.Minute).Acquire(ctx)
	require.NoError(t, err)
	p, err := c.Load(ctx, l)
	return c, l, p, err
}

// sendUpTo lets a relay open a window and drain it up to an id.
func (d *fixture) sendUpTo(t *testing.T, relay string, last int64) {
	t.Helper()
	c, l, p, err := d.arrive(t, relay)
	require.NoError(t, err)
	p, _, _, err = c.Open(context.Background(), l, p, 100)
	require.NoError(t, err)
	p.Last, p.Highest = last, last
	_, err = c.Move(context.Background(), l, p, nil)
	require.NoError(t, err)
}

// unsent returns the ids that a relay would send from where it stands.
func (d *fixture) unsent(t *testing.T, relay string) (ids []int64) {
	t.Helper()
	ctx := context.Background()
	c, l, p, err := d.arrive(t, relay)
	require.NoError(t, err)
	for first := true; first || p.Window != ""; first = false {
		if p.Window != "" {
			ids = append(ids, remaining(t, c, p)...)
			p.Last = slices.Max(append(ids, p.Last))
			p.Highest = max(p.Highest, p.Last)
		}
		var events []envelope.Event
		p, events, _, err = c.Open(ctx, l, p, 100)
		require.NoError(t, err)
		if len(events) > 0 {
			p.Last = events[len(events)-1].ID
			p.Highest = max(p.Highest, p.Last)
		}
		for _, e := range events {
			ids = append(ids, e.ID)
		}
	}
	return ids
}

// emigrate makes the tables look as if they had been copied from a cluster whose
// transaction ids are ahead of ours by so many.
func (d *fixture) emigrate(t *testing.T, ahead int64, otherCluster bool) {
	t.Helper()
	ctx := context.Background()
	d.Update(t, `UPDATE {schema}.outbox SET xid = (xid::text::bigint + $1)::text::xid8`, ahead)
	if otherCluster {
		d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
	}
	rows, err := d.DB.Query(ctx, pg.InSchema(`SELECT id, snapshot::text, window_snapshot::text FROM {schema}.outbox_cursor`, d.Schema))
	require.NoError(t, err)
	type cursor struct {
		ID               int64
		Snapshot, Window *string
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[cursor])
	require.NoError(t, err)
	for _, c := range all {
		d.Exec(t, `UPDATE {schema}.outbox_cursor SET snapshot = $2::text::pg_snapshot, window_snapshot = $3::text::pg_snapshot WHERE id = $1`,
			c.ID, shifted(t, c.Snapshot, ahead), shifted(t, c.Window, ahead))
	}
}

// shifted adds to every number of a snapshot but the 1 of a beginning.
func shifted(t *testing.T, snapshot *string, ahead int64) *string {
	if snapshot == nil || *snapshot == "1:1:" {
		return snapshot
	}
	bounds := strings.Split(*snapshot, ":")
	for i, list := range bounds {
		numbers := strings.Split(list, ",")
		for j, text := range numbers {
			if text != "" {
				n, err := strconv.ParseInt(text, 10, 64)
				require.NoError(t, err)
				numbers[j] = strconv.FormatInt(n+ahead, 10)
			}
		}
		bounds[i] = strings.Join(numbers, ",")
	}
	s := strings.Join(bounds, ":")
	return &s
}

// The relays of a schema stand at different places, one of them in the middle of
// a window and one behind a transaction that was late. Each finds its own place
// again after a restore, whichever of them rebases first.
func TestRebase(t *testing.T) {
	t.Parallel()
	for name, from := range map[string]struct {
		ahead        int64
		otherCluster bool
	}{
		"from a cluster that was ahead":         {1_000_000_000, true},
		"from a cluster with ids like ours":     {0, true},
		"from the future of what calls it ours": {1_000_000_000, false},
	} {
		for _, first := range []string{"far", "near", "fresh"} {
			t.Run(fmt.Sprintf("%s, %s first", name, first), func(t *testing.T) {
				d, ctx := newFixture(t), context.Background()
				_, _, _, err := d.arrive(t, "fresh") // from the beginning, and sends nothing
				require.NoError(t, err)
				late := d.BeginInsert(t, 2) // 1, 2
				d.Insert(t, 4)              // 3 to 6
				d.sendUpTo(t, "far", 6)
				require.Empty(t, d.unsent(t, "far")) // which ends the window
				require.NoError(t, late.Commit(ctx))
				d.sendUpTo(t, "near", 4)
				d.Insert(t, 3) // 7 to 9
				d.emigrate(t, from.ahead, from.otherCluster)
				d.Insert(t, 2) // 10, 11 in the new home, before the relay
				open := d.BeginInsert(t, 2)

				c, l, _, err := d.arrive(t, first)
				require.ErrorIs(t, err, cursors.ErrOtherCluster)
				unsent, err := c.Rebase(ctx, l)
				require.NoError(t, err)
				again, err := c.Rebase(ctx, l)
				require.NoError(t, err)
				require.Zero(t, again, "it is done")
				require.NoError(t, open.Commit(ctx)) // 12, 13

				want := map[string][]int64{
					"far":   {1, 2, 7, 8, 9, 10, 11, 12, 13},
					"near":  {5, 6, 7, 8, 9, 10, 11, 12, 13},
					"fresh": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
				}
				require.EqualValues(t, len(want[first])-2, unsent, "without those of the open transaction")
				for relay, ids := range want {
					require.Equal(t, ids, d.unsent(t, relay), relay)
					require.Empty(t, d.unsent(t, relay), relay)
				}
				d.Insert(t, 1)
				require.Equal(t, []int64{14}, d.unsent(t, "default")[13:], "a relay that comes later starts from the beginning")
			})
		}
	}
}

// A copy that has the same rows, the lease among them, and that the pool's
// connections come back to: nothing is read with the old transaction ids.
func TestSameRowsElsewhereAreStale(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.opened(t)
	p.Server = p.Server.Add(-time.Hour) // where we come from
	d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = system_identifier + 1`)
	_, err := d.cursors.Move(ctx, l, p, nil)
	require.ErrorIs(t, err, cursors.ErrStale)
	_, err = d.cursors.Move(ctx, l, p, someFailure)
	require.ErrorIs(t, err, cursors.ErrStale)
	_, _, _, err = d.cursors.Open(ctx, l, p, 10)
	require.ErrorIs(t, err, cursors.ErrStale)
	_, err = d.cursors.Load(ctx, l)
	require.ErrorIs(t, err, cursors.ErrOtherCluster)
}

// IDs below the highest that was sent would pass for sent.
func TestRebaseWithoutSequence(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 6)
	d.sendUpTo(t, "default", 6)
	d.emigrate(t, 1_000_000_000, true)
	d.Exec(t, `ALTER SEQUENCE {schema}.outbox_id_seq RESTART`)
	_, _, _, err := d.arrive(t, "default")
	require.ErrorIs(t, err, cursors.ErrSequenceBehind)
	d.Exec(t, remedy(t, err))
	c, l, _, err := d.arrive(t, "default")
	require.ErrorIs(t, err, cursors.ErrOtherCluster)
	_, err = c.Rebase(ctx, l)
	require.NoError(t, err)
	d.Insert(t, 1)
	require.Equal(t, []int64{7}, d.unsent(t, "default"))
}

// A relay that lost its lease while it rebased has changed nothing.
func TestRebaseProvesTheLease(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, _ := d.opened(t)
	d.emigrate(t, 1_000_000_000, true)
	d.takeOver(t)
	before := d.Count(t, "outbox_cursor")
	_, err := d.cursors.Rebase(ctx, l)
	require.ErrorIs(t, err, lease.ErrLeaseLost)
	require.Equal(t, before, d.Count(t, "outbox_cursor"))
	require.Equal(t, 3, d.Count(t, "outbox WHERE xid::text::bigint > 1000000000"))
}

// An operator may have inserted rows whose transaction id this cluster has not reached, although a
// constraint forbids it. Such rows are neither sent repeatedly nor removed. The next leader finds
// them, and each is sent once.
func TestRowsOfTheFuture(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 2)
	_, _, p, err := d.arrive(t, "default")
	require.NoError(t, err)
	d.Update(t, `UPDATE {schema}.outbox SET xid = '9000000000' WHERE id = 2`)
	c, l := d.cursors, d.takeOver(t)
	for want := range slices.Values([][]int64{{1}, nil, nil}) { // a relay that leads already
		var events []envelope.Event
		p, events, _, err = c.Open(ctx, l, p, 100)
		require.NoError(t, err)
		require.Equal(t, want, ids(events))
		p.Last, p.Highest = 1, 1
	}

	c, l, _, err = d.arrive(t, "default")
	require.ErrorIs(t, err, cursors.ErrOtherCluster)
	unsent, err := c.Rebase(ctx, l)
	require.NoError(t, err)
	require.EqualValues(t, 1, unsent)
	require.Equal(t, []int64{2}, d.unsent(t, "default"))
	d.Insert(t, 1)
	require.Equal(t, []int64{3}, d.unsent(t, "default"))
}

// A rebase takes as long as it takes, whatever timeouts the role has: one that ended would begin again without end.
func TestRebaseUnderTimeouts(t *testing.T) {
	t.Parallel()
	testenv.UnderTimeouts(t, func(t *testing.T, db *pgxpool.Pool) {
		d, ctx := newFixture(t), context.Background()
		d.Insert(t, 3)
		d.sendUpTo(t, "default", 2)
		d.emigrate(t, 1_000_000_000, true)
		_, l, _, err := d.arrive(t, "default")
		require.ErrorIs(t, err, cursors.ErrOtherCluster)
		other, err := d.DB.Begin(ctx)
		require.NoError(t, err)
		_, err = other.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended('outbox.rebase.' || $1, 0))`, d.Schema)
		require.NoError(t, err)
		rebased := make(chan error, 1)
		go func() {
			_, err := cursors.NewStore(db, d.Schema, "default").Rebase(ctx, l)
			rebased <- err
		}()
		testenv.OutlastTimeouts(t, d.DB, db, func() { require.NoError(t, other.Rollback(ctx)) })
		require.NoError(t, <-rebased)
		require.Equal(t, []int64{3}, d.unsent(t, "default"))
	})
}

// A process that is frozen inside its rebase holds the lock of all rebases, and perhaps its lease. PostgreSQL ends the
// transaction after a while, whatever the role is configured to.
func TestFrozenRebaseEnds(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 2)
	d.sendUpTo(t, "default", 1)
	d.emigrate(t, 0, true)
	_, l, _, err := d.arrive(t, "default")
	require.ErrorIs(t, err, cursors.ErrOtherCluster)
	cfg, tracer := d.DB.Config().Copy(), new(testenv.IdleTracer)
	cfg.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	defer pool.Close()
	_, err = cursors.NewStore(pool, d.Schema, "default").Rebase(ctx, l)
	require.NoError(t, err)
	require.Equal(t, []string{"10s"}, tracer.Bounds)
}
