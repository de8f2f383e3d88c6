package cursor_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// outbox_pending counts each event that the relay has still to attempt: those of the open window, those that were
// committed late, and one with a transaction id that PostgreSQL has not reached.
// It counts no event of an open transaction.
func TestPendingOfRelay(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p := d.loaded(t)
	pending := func(most int) (n int) {
		require.NoError(t, d.DB.QueryRow(ctx, pg.InSchema(`SELECT {schema}.outbox_pending('default', $1)`, d.Schema), most).Scan(&n))
		return n
	}
	require.Equal(t, 0, pending(10))
	d.Insert(t, 3)
	late := d.BeginInsert(t, 2)
	d.Insert(t, 1)
	require.Equal(t, 4, pending(10))
	require.Equal(t, 2, pending(2))
	p, events, _, err := d.cursors.Open(ctx, l, p, 10)
	require.NoError(t, err)
	require.Len(t, events, 4)
	p.Last, p.Highest = 2, 2
	p.CursorID, err = d.cursors.Move(ctx, l, p, nil)
	require.NoError(t, err)
	require.Equal(t, 2, pending(10))
	require.NoError(t, late.Commit(ctx))
	require.Equal(t, 4, pending(10))
	p.Last, p.Highest = 6, 6
	p.CursorID, err = d.cursors.Move(ctx, l, p, nil)
	require.NoError(t, err)
	require.Equal(t, 2, pending(10), "the late ones are in no window yet")
	p, events, _, err = d.cursors.Open(ctx, l, p, 10)
	require.NoError(t, err)
	require.Len(t, events, 2)
	p.Last, p.Highest = 5, 6
	_, err = d.cursors.Move(ctx, l, p, nil)
	require.NoError(t, err)
	require.Equal(t, 0, pending(10))
	d.Update(t, `UPDATE {schema}.outbox SET xid = '4611686018427387904' WHERE id = 1`)
	require.Equal(t, 1, pending(10))
}
