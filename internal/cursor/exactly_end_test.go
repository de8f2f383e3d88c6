package cursor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
)

// The mode ends at the position that was confirmed, and the events behind it are read again. So their rows go: a
// retrier would send them before the events that precede them. Rows of events before that position stay, also when the
// cursor has been moved to another cluster meanwhile, or when the mode is ended once more.
func TestEndUnreadRemovesRows(t *testing.T) {
	t.Parallel()
	const rows = `format('%s %s', outbox_id, coalesce(batch::text, 'none'))`
	ctx := context.Background()
	t.Run("of transactions that are not confirmed", func(t *testing.T) {
		t.Parallel()
		d := newFixture(t)
		l, p, r := d.beginExactly(t)
		d.park(t, l, &p, r.Last, 7)
		confirmed := p.CursorID
		d.park(t, l, &p, r.Last+1, 8)
		d.cursors.Confirm(cursor.Confirmed{Batch: 7, Row: confirmed}, 9)
		_, err := d.cursors.Move(ctx, l, p, nil)
		require.NoError(t, err)
		l = d.takeOver(t)
		for range 2 {
			require.NoError(t, d.cursors.EndUnread(ctx, l))
			require.Equal(t, []string{fmt.Sprint(r.Last, " none")}, d.rows(t, rows))
		}
		require.Equal(t, []int64{r.Last + 1, r.Last + 2}, d.readAgain(t, l))
	})
	t.Run("moved to another cluster", func(t *testing.T) {
		t.Parallel()
		d := newFixture(t)
		l, p, r := d.beginExactly(t)
		d.park(t, l, &p, r.Last, 8)
		d.cursors.Confirm(cursor.Confirmed{Batch: 8, Row: p.CursorID}, 9) // the row itself says 7
		_, err := d.cursors.Move(ctx, l, p, nil)
		require.NoError(t, err)
		l = d.takeOver(t)
		d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = 1`)
		_, err = d.cursors.Rebase(ctx, l)
		require.NoError(t, err)
		require.NoError(t, d.cursors.EndUnread(ctx, l))
		require.Equal(t, []string{fmt.Sprint(r.Last, " none")}, d.rows(t, rows))
	})
}

// park moves the position behind an event that was not accepted, in a transaction with a number. Kafka has confirmed
// transaction 7, and everything up to the position before.
func (d *fixture) park(t *testing.T, l *lease.Lease, p *cursor.Position, id, number int64) {
	t.Helper()
	d.cursors.Confirm(cursor.Confirmed{Batch: 7, Row: p.CursorID}, number)
	p.Last, p.Highest = id, max(p.Highest, id)
	failures := []cursor.Failure{{Event: &envelope.Event{ID: id}, Key: "b-events/k", Status: statusFailed, Class: "c", Err: errors.New("x")}}
	row, err := d.cursors.Move(context.Background(), l, *p, failures)
	require.NoError(t, err)
	p.CursorID, p.Epoch = row, l.Epoch
}

// readAgain reads the rest of the newest window, without the mode.
func (d *fixture) readAgain(t *testing.T, l *lease.Lease) []int64 {
	t.Helper()
	plain := cursor.NewStore(d.DB, d.Schema, "default")
	p, err := plain.Load(context.Background(), l)
	require.NoError(t, err)
	u, err := cursor.UnpagedOf(p)
	require.NoError(t, err)
	ids, _, err := plain.Page(context.Background(), p, u, 100)
	require.NoError(t, err)
	return ids
}
