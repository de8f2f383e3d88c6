package delivery_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A scan of bounded rows finds all rows: more rows than one poll takes, and rows that become visible late
// with an earlier time. This holds for claims and for take-overs.
func TestLooksFindAllRows(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a := f.store("a", time.Minute)
	keys := []string{"k", "l", "m", "n", "o"}
	f.insert(a, delivery.Pending, f.record(keys...), keys...)
	f.exec(`UPDATE {schema}.event_delivery SET next_retry_at = now() - interval '1 hour' + id * interval '1 min'`)
	for _, n := range []int{2, 2, 1, 0} {
		claimed, err := a.Claim(ctx, pairs, 2, 0, false, room)
		require.NoError(t, err)
		require.Len(t, claimed, n)
	}
	f.exec(`UPDATE {schema}.event_delivery SET locked_until = now() - interval '1 hour' + id * interval '1 min'`)
	gone := f.store("b", time.Millisecond)
	for _, n := range []int{2, 2, 1, 0} {
		expired, err := gone.TakeOver(ctx, 2, false)
		require.NoError(t, err)
		require.Len(t, expired, n)
	}

	f.exec(`UPDATE {schema}.event_delivery SET next_retry_at = now() - interval '2 hours'`)
	require.Eventually(t, func() bool {
		claimed, err := a.Claim(ctx, pairs, 10, 0, true, room)
		require.NoError(t, err)
		return len(claimed) == len(keys)
	}, testenv.Patience, time.Millisecond)
	f.exec(`UPDATE {schema}.event_delivery SET locked_until = now() - interval '2 hours'`)
	require.Eventually(t, func() bool {
		expired, err := gone.TakeOver(ctx, 10, false)
		require.NoError(t, err)
		return len(expired) == len(keys)
	}, testenv.Patience, time.Millisecond)
}

// A transaction has locked a row while processes poll for due rows. After the lock is released,
// their first poll finds the row, although they scan all rows only now and then.
func TestLooksFindWhatWasLocked(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		status delivery.Status
		look   func(context.Context, *delivery.Store) (int, error)
	}{
		{"due", delivery.Pending, func(ctx context.Context, s *delivery.Store) (int, error) {
			claimed, err := s.Claim(ctx, pairs, 10, 0, false, room)
			return len(claimed), err
		}},
		{"expired", delivery.Processing, func(ctx context.Context, s *delivery.Store) (int, error) {
			expired, err := s.TakeOver(ctx, 10, false)
			return len(expired), err
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f, ctx := newTable(t), t.Context()
			s := f.store("b", time.Millisecond)
			f.lookSlowly(func() error { _, err := tt.look(ctx, s); return err })
			f.insert(f.store("a", time.Millisecond), tt.status, f.record("k"), "k")
			locked := f.begin(`SELECT FROM {schema}.event_delivery FOR UPDATE`)
			require.Eventually(t, func() bool {
				n, err := tt.look(ctx, s)
				require.NoError(t, err)
				require.Zero(t, n, "it is locked")
				return f.isOld()
			}, testenv.Patience, 10*time.Millisecond)
			require.NoError(t, locked.Rollback(ctx))
			n, err := tt.look(ctx, s)
			require.NoError(t, err)
			require.Equal(t, 1, n)
		})
	}
}

// A take-over is cancelled before PostgreSQL commits it. The next take-over of the same worker finds the
// row.
func TestLookThatFails(t *testing.T) {
	testenv.Direct(t) // prepared statements
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a, b := f.store("a", time.Millisecond), f.store("b", time.Millisecond)
	f.lookSlowly(func() error { _, err := b.TakeOver(ctx, 10, false); return err })
	require.Len(t, f.insert(a, delivery.Processing, f.record("k"), "k"), 1)
	require.Eventually(t, f.isOld, testenv.Patience, 10*time.Millisecond)
	busy := f.begin(`SELECT {schema}.outbox_lock_keys(consumer_group, ARRAY[order_key]) FROM {schema}.event_delivery`)
	late, cancel := context.WithTimeout(ctx, slowLook)
	defer cancel()
	_, err := b.TakeOver(late, 10, false)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, busy.Rollback(ctx))
	require.Eventually(t, func() bool {
		_, err := f.db.Exec(ctx, pg.InSchema(`SELECT FROM {schema}.event_delivery FOR UPDATE NOWAIT`, f.schema))
		return err == nil
	}, testenv.Patience, time.Millisecond, "PostgreSQL has not ended the look")
	expired, err := b.TakeOver(ctx, 10, false)
	require.NoError(t, err)
	require.Len(t, expired, 1)
}

// slowLook is how long a poll lasts, after which no process scans all rows for some time.
const slowLook = 500 * time.Millisecond

// lookSlowly runs a poll that has to wait for a lock.
func (f *tableFixture) lookSlowly(look func() error) {
	lock := f.begin(`LOCK TABLE {schema}.event_delivery IN ACCESS EXCLUSIVE MODE`)
	looked := make(chan error, 1)
	go func() { looked <- look() }()
	select {
	case err := <-looked:
		require.Fail(f.t, "the look does not wait", "%v", err)
	case <-time.After(slowLook):
	}
	require.NoError(f.t, lock.Rollback(f.t.Context()))
	require.NoError(f.t, <-looked)
}

// isOld reports whether the row is older than the time by which polls begin earlier than the last one.
func (f *tableFixture) isOld() (old bool) {
	require.NoError(f.t, f.db.QueryRow(f.t.Context(), pg.InSchema(`SELECT created_at < now() - interval '1500 ms' FROM {schema}.event_delivery`, f.schema)).Scan(&old))
	return old
}

// begin runs a statement in a transaction that stays open.
func (f *tableFixture) begin(sql string) pgx.Tx {
	tx, err := f.db.Begin(f.t.Context())
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(f.t.Context(), pg.InSchema(sql, f.schema))
	require.NoError(f.t, err)
	return tx
}
