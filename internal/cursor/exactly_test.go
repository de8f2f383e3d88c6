package cursor_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// beginExactly returns a relay that has turned the mode on, with a window of three events of which Kafka has confirmed
// the first one.
func (d *fixture) beginExactly(t *testing.T) (*lease.Lease, cursor.Position, cursor.InKafka) {
	t.Helper()
	ctx := context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.cursors.UseTopic("cursors")
	begun, err := d.cursors.HasBegun(ctx)
	require.NoError(t, err)
	require.False(t, begun)
	began, err := d.cursors.Continue(ctx, l, cursor.InKafka{})
	require.NoError(t, err)
	require.True(t, began.Begins)
	p := began.Position
	d.cursors.Confirm(cursor.Confirmed{Batch: 1, Row: p.CursorID}, 2)
	d.Insert(t, 3)
	p, events, _, err := d.cursors.Open(ctx, l, p, 3)
	require.NoError(t, err)
	require.Len(t, events, 3)
	return l, p, cursor.InKafka{Number: 2, Row: p.CursorID, Token: d.cursors.Token(), Last: events[0].ID}
}

// next takes the lease over and continues.
func (d *fixture) next(t *testing.T, r cursor.InKafka) (*lease.Lease, cursor.Position, bool, error) {
	t.Helper()
	l := d.takeOver(t)
	d.cursors.UseTopic("cursors")
	now, err := d.cursors.Continue(context.Background(), l, r)
	return l, now.Position, now.Begins, err
}

// The position is that of the record in Kafka, whatever the rows say.
func TestContinueFromKafka(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	_, p, r := d.beginExactly(t)
	_, got, begins, err := d.next(t, r)
	require.NoError(t, err)
	require.False(t, begins)
	require.Equal(t, [3]any{p.Base, p.Window, r.Last}, [3]any{got.Base, got.Window, got.Last})
	require.Equal(t, "cursors", got.Topic)
	begun, err := d.cursors.HasBegun(context.Background())
	require.NoError(t, err)
	require.True(t, begun)

	r.Number, r.Last = 3, r.Last+1
	_, got, _, err = d.next(t, r)
	require.NoError(t, err)
	require.Equal(t, r.Last, got.Last)
	require.Equal(t, r.Last, got.Highest)
}

// A relay that began to use the topic, and of which Kafka never had a record, begins again. Records of another time say
// nothing.
func TestBeginAgain(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	d.cursors.UseTopic("cursors")
	old := cursor.InKafka{Number: 41, Row: 1, Token: "of another time", Last: 7}
	for range 2 {
		now, err := d.cursors.Continue(ctx, l, old)
		require.NoError(t, err)
		require.True(t, now.Begins)
		require.Zero(t, now.Position.Last)
		l = d.takeOver(t)
	}
}

// Two databases of one name in different clusters share a key in the topic. A relay neither begins nor goes on beside
// records of another cluster, whatever their number is, but for those of the cluster that its rows come from.
func TestRecordOfAnotherCluster(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	const other = 1
	_, _, _, err := d.next(t, cursor.InKafka{Number: 41, Row: 1, Token: "of another cluster", Last: 7, System: other})
	require.ErrorIs(t, err, cursor.ErrDisagree)
	require.ErrorContains(t, err, "cluster 1")

	d.Exec(t, `DELETE FROM {schema}.outbox_lease`)
	_, _, r := d.beginExactly(t)
	_, _, _, err = d.next(t, r) // writes that transaction 2 is confirmed
	require.NoError(t, err)
	for number := range int64(3) {
		_, _, _, err = d.next(t, cursor.InKafka{Number: r.Number - 1 + number, Row: r.Row, Token: "of another cluster", System: other})
		require.ErrorIs(t, err, cursor.ErrDisagree)
		require.ErrorContains(t, err, "cluster 1")
	}
	d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = $1 WHERE id = $2`, other, r.Row)
	r.System = other
	_, _, _, err = d.next(t, r)
	require.NoError(t, err, "the row that the record names was restored from there")
}

// A failover has lost all rows since the mode was turned on, and Kafka has the records.
func TestAllRowsOfTheModeAreLost(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, err := d.leases.Acquire(ctx)
	require.NoError(t, err)
	_, err = d.cursors.Load(ctx, l)
	require.NoError(t, err)
	d.Exec(t, `DELETE FROM {schema}.outbox_lease`)
	_, _, r := d.beginExactly(t)
	d.Exec(t, `DELETE FROM {schema}.outbox_cursor WHERE cursor_topic IS NOT NULL`)
	require.Equal(t, 1, d.Count(t, "outbox_cursor"))
	_, _, _, err = d.next(t, r)
	require.ErrorIs(t, err, cursor.ErrDisagree)
	require.ErrorContains(t, err, "lacks row")
	require.Equal(t, 1, d.Count(t, "outbox_cursor"))
}

// The mode was ended, and is on again with the same topic: its newest record is one of before, also if the row that it
// names is still there. Retention may have removed the rows in between.
func TestBeginAfterAnEnd(t *testing.T) {
	t.Parallel()
	for name, thin := range map[string]string{
		"all rows are there": `SELECT`, "only the newest row and that of the record": `DELETE FROM {schema}.outbox_cursor WHERE cursor_topic IS NULL`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx := newFixture(t), context.Background()
			l, p, r := d.beginExactly(t)
			p.Last = r.Last
			require.NoError(t, d.cursors.End(ctx, l, p))
			plain := cursor.NewStore(d.DB, d.Schema, "default")
			p, err := plain.Load(ctx, l)
			require.NoError(t, err)
			p.Last += 2
			_, err = plain.Move(ctx, l, p, nil)
			require.NoError(t, err)
			var row int64
			for range 3 { // Kafka confirms no record
				begun, err := d.cursors.HasBegun(ctx)
				require.NoError(t, err)
				require.False(t, begun)
				var got cursor.Position
				var begins bool
				_, got, begins, err = d.next(t, r)
				require.NoError(t, err)
				require.True(t, begins)
				require.Equal(t, [3]any{p.Base, p.Window, p.Last}, [3]any{got.Base, got.Window, got.Last})
				row = got.CursorID
				d.Exec(t, thin)
			}
			r = cursor.InKafka{Number: r.Number + 1, Row: row, Token: d.cursors.Token(), Last: p.Last}
			_, got, begins, err := d.next(t, r) // the first record, whose confirmation was lost
			require.NoError(t, err)
			require.False(t, begins)
			require.Equal(t, p.Last, got.Last)
		})
	}
}

// A failover has lost the row of the first record since the mode was turned on, and an earlier try to begin is there.
func TestFirstRecordWithoutItsRow(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	_, p, begins, err := d.next(t, cursor.InKafka{Number: 41, Row: 1, Token: "of another time"})
	require.NoError(t, err)
	require.True(t, begins)
	_, _, _, err = d.next(t, cursor.InKafka{Number: 42, Row: p.CursorID + 1, Token: "lost"})
	require.ErrorIs(t, err, cursor.ErrDisagree)
	require.ErrorContains(t, err, "lacks row")
}

// A dump was taken while the first transactions since the mode was turned on were in flight, and is restored into
// another cluster: what Kafka has since then is not known there.
func TestRestoredAmongFirstTransactions(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	_, _, r := d.beginExactly(t)
	l := d.takeOver(t)
	d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = 1`)
	_, err := d.cursors.Continue(ctx, l, r)
	require.ErrorIs(t, err, cursor.ErrOtherCluster)
	_, err = d.cursors.Rebase(ctx, l)
	require.NoError(t, err)
	_, err = d.cursors.Continue(ctx, l, r)
	require.ErrorIs(t, err, cursor.ErrDisagree)
}

// What PostgreSQL and Kafka say does not fit together: the relay does not go on.
func TestDisagreement(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, says string
		change     func(r *cursor.InKafka)
	}{
		{"the topic is empty", "deleted", func(r *cursor.InKafka) { *r = cursor.InKafka{} }},
		{"the newest record is gone", "transaction 1", func(r *cursor.InKafka) { r.Number = 1 }},
		{"a failover has lost the row", "lacks row", func(r *cursor.InKafka) { r.Row += 100 }},
		{"a failover has given the id out again", "lacks row", func(r *cursor.InKafka) { r.Token = "other" }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d := newFixture(t)
			_, _, r := d.beginExactly(t)
			_, _, _, err := d.next(t, r) // writes that transaction 2 is confirmed
			require.NoError(t, err)
			r.Number++
			test.change(&r)
			rows := d.Count(t, "outbox_cursor")
			_, _, _, err = d.next(t, r)
			require.ErrorIs(t, err, cursor.ErrDisagree)
			require.ErrorContains(t, err, test.says)
			require.Equal(t, rows, d.Count(t, "outbox_cursor"))
		})
	}
}

// While nothing is under way, the row that the record names may have been removed: a later one has its position.
func TestContinueFromConfirmedRow(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	_, _, r := d.beginExactly(t)
	_, _, _, err := d.next(t, r)
	require.NoError(t, err)
	d.Exec(t, `DELETE FROM {schema}.outbox_cursor WHERE id <= $1`, r.Row)
	_, got, _, err := d.next(t, r)
	require.NoError(t, err)
	require.Equal(t, r.Last, got.Last)
}

// A row of a parked event stays if and only if the transaction that passes it was committed, and a row of an event that
// was sent again goes. Rows of an earlier time stay.
func TestContinueRemovesRows(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.InsertParked(t, 2, 2)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET batch = 1000`)
	d.Exec(t, `SELECT pg_catalog.setval('{schema}.outbox_id_seq', 200)`)
	l, p, r := d.beginExactly(t)
	require.Equal(t, []int64{1, 2}, d.IDs(t, "outbox_failed"))
	park := func(id, number int64) {
		t.Helper()
		d.cursors.Confirm(cursor.Confirmed{Batch: 1}, number)
		p.Last = id
		failures := []cursor.Failure{{Event: &envelope.Event{ID: id}, Key: "b-events/k", Status: statusFailed, Class: "c", Err: errors.New("x")}}
		row, err := d.cursors.Move(ctx, l, p, failures)
		require.NoError(t, err)
		p.CursorID, p.Epoch = row, l.Epoch
	}
	park(r.Last+1, 3)
	r = cursor.InKafka{Number: 3, Row: p.CursorID, Token: d.cursors.Token(), Last: p.Last, Again: []int64{1}}
	park(r.Last+1, 4)
	require.Equal(t, []int64{1, 2, 3, 4}, d.IDs(t, "outbox_failed"))
	_, got, _, err := d.next(t, r)
	require.NoError(t, err)
	require.Equal(t, r.Last, got.Last)
	require.Equal(t, []int64{2, 3}, d.IDs(t, "outbox_failed"))
}

// A row of an event that was sent again, which an operator has locked, holds up no start. It is named instead.
func TestContinueSkipsLockedRows(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	_, _, r := d.beginExactly(t)
	d.InsertParked(t, 2, 2)
	ids := d.IDs(t, "outbox_failed")
	operator, err := d.DB.Begin(ctx)
	require.NoError(t, err)
	defer operator.Rollback(ctx)
	_, err = operator.Exec(ctx, pg.InSchema(`SELECT FROM {schema}.outbox_failed WHERE id = $1 FOR UPDATE`, d.Schema), ids[0])
	require.NoError(t, err)
	r.Again = ids
	l := d.takeOver(t)
	now, err := d.cursors.Continue(ctx, l, r)
	require.NoError(t, err)
	require.Len(t, now.Locked, 1)
	require.Equal(t, ids[0], now.Locked[0].Row)
	require.Contains(t, now.Locked[0].Key, "b-events/key-")
	require.Equal(t, [2]any{int64(1), testenv.ParkedID(1)}, [2]any{now.Locked[0].ID, string(now.Locked[0].EventID)})
	require.Equal(t, ids[:1], d.IDs(t, "outbox_failed"))
}

// A row of an aborted transaction, or of another time of the mode, has to be changed before the relay continues. While
// another transaction has locked it, Continue returns at once and writes nothing, and the lease can be renewed.
func TestContinueWaitsForNoLock(t *testing.T) {
	t.Parallel()
	for _, begins := range []bool{false, true} {
		t.Run(fmt.Sprint("begins: ", begins), func(t *testing.T) {
			t.Parallel()
			d := newFixture(t)
			r, want := cursor.InKafka{Number: 41}, []string{"1 none", "2 none", "3 none"}
			if !begins {
				_, _, r = d.beginExactly(t)
				want = []string{"3 2"}
			}
			d.Exec(t, `SELECT pg_catalog.setval('{schema}.outbox_id_seq', 200)`)
			l := d.takeOver(t)
			d.cursors.UseTopic("cursors")
			d.InsertParked(t, 3, 3)
			d.Exec(t, `UPDATE {schema}.outbox_failed SET batch = CASE WHEN id = 3 THEN 2 ELSE $1::bigint END`, r.Number+1)
			before, written := d.rows(t, `f::text`), d.Count(t, "outbox_cursor")
			rollback := d.lock(t, `id = 2`)
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_, err := d.cursors.Continue(ctx, l, r)
			require.True(t, pg.IsWaitInVain(err), "%v", err)
			require.ErrorContains(t, err, "rows [2] of outbox_failed")
			require.ErrorContains(t, err, "session ")
			require.NoError(t, d.leases.Renew(ctx, l))
			require.Equal(t, before, d.rows(t, `f::text`))
			require.LessOrEqual(t, d.Count(t, "outbox_cursor"), max(written, 1), "but for the first row of the relay")
			rollback()
			_, err = d.cursors.Continue(ctx, l, r)
			require.NoError(t, err)
			require.Equal(t, want, d.rows(t, `format('%s %s', id, coalesce(batch::text, 'none'))`))
		})
	}
}

// The rows of retries go together with a new row of the cursor, or not at all.
func TestSaveExactly(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
	l, p, _ := d.beginExactly(t)
	d.InsertParked(t, 2, 2)
	sent := []cursor.RetryResult{{Event: parkedRow(1), Row: 1, Status: statusResolved}}
	stale := p
	stale.CursorID--
	_, _, err := d.cursors.SaveExactly(ctx, failed, l, stale, sent, false)
	require.ErrorIs(t, err, cursor.ErrStale)
	require.Equal(t, 2, d.Count(t, "outbox_failed"))
	before := d.cursors.Token()
	saved, id, err := d.cursors.SaveExactly(ctx, failed, l, p, sent, false)
	require.NoError(t, err)
	require.Equal(t, []int64{sent[0].Row}, saved.Rows)
	require.Greater(t, id, p.CursorID)
	require.NotEqual(t, before, d.cursors.Token())
	require.Equal(t, 1, d.Count(t, "outbox_failed"))

	d.takeOver(t)
	p.CursorID = id
	_, _, err = d.cursors.SaveExactly(ctx, failed, l, p, nil, false)
	require.ErrorIs(t, err, cursor.ErrStale)
}

// A relay in the other mode, or with another topic, does not lead.
func TestOtherMode(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	_, p, _ := d.beginExactly(t)
	l := d.takeOver(t)
	plain := cursor.NewStore(d.DB, d.Schema, "default")
	_, err := plain.Load(ctx, l)
	require.ErrorIs(t, err, cursor.ErrMode)
	other := cursor.NewStore(d.DB, d.Schema, "default")
	other.UseTopic("another")
	_, err = other.HasBegun(ctx)
	require.ErrorIs(t, err, cursor.ErrMode)
	_, err = other.Continue(ctx, l, cursor.InKafka{})
	require.ErrorIs(t, err, cursor.ErrMode)

	require.NoError(t, d.cursors.End(ctx, l, p))
	got, err := plain.Load(ctx, l)
	require.NoError(t, err)
	require.Equal(t, [3]any{p.Base, p.Window, p.Last}, [3]any{got.Base, got.Window, got.Last})
}

// A new row survives a crash: it is written with synchronous_commit, whatever the role is set to.
func TestRowsAreDurable(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	l, p, _ := d.beginExactly(t)
	d.Exec(t, `ALTER TABLE {schema}.outbox_cursor ADD COLUMN durable text DEFAULT current_setting('synchronous_commit')`)
	_, err := d.cursors.Move(ctx, l, p, nil)
	require.NoError(t, err)
	var durable string
	require.NoError(t, d.DB.QueryRow(ctx, pg.InSchema(`SELECT durable FROM {schema}.outbox_cursor ORDER BY id DESC LIMIT 1`, d.Schema), pgx.QueryExecModeExec).Scan(&durable))
	require.Equal(t, "on", durable)
}

// The mode ends in a database that was restored into another cluster. The next leader moves the cursor there.
func TestEndUnreadElsewhere(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	_, p, _ := d.beginExactly(t)
	l := d.takeOver(t)
	d.Exec(t, `UPDATE {schema}.outbox_cursor SET system_identifier = 1`)
	require.NoError(t, d.cursors.EndUnread(ctx, l))
	plain := cursor.NewStore(d.DB, d.Schema, "default")
	_, err := plain.Load(ctx, l)
	require.ErrorIs(t, err, cursor.ErrOtherCluster)
	unsent, err := plain.Rebase(ctx, l)
	require.NoError(t, err)
	require.Equal(t, int64(3), unsent)
	got, err := plain.Load(ctx, l)
	require.NoError(t, err)
	require.Greater(t, got.CursorID, p.CursorID)
	require.Empty(t, got.Topic)
}

// The end of the mode can be repeated: after one that has failed, the store writes rows of the mode as before.
func TestEndThatFailed(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*cursor.Store, *lease.Lease, cursor.Position) error{
		"end": func(c *cursor.Store, l *lease.Lease, p cursor.Position) error {
			return c.End(context.Background(), l, p)
		},
		"end unread": func(c *cursor.Store, l *lease.Lease, _ cursor.Position) error {
			return c.EndUnread(context.Background(), l)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newFixture(t)
			lost, p, r := d.beginExactly(t)
			l := d.takeOver(t)
			require.Error(t, end(d.cursors, lost, p))
			now, err := d.cursors.Continue(context.Background(), l, r)
			require.NoError(t, err)
			require.Equal(t, "cursors", now.Position.Topic)
			require.NoError(t, end(d.cursors, l, now.Position))
			p, err = cursor.NewStore(d.DB, d.Schema, "default").Load(context.Background(), l)
			require.NoError(t, err)
			require.Empty(t, p.Topic)
		})
	}
}
