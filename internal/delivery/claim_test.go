package delivery_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
)

// A session has locked one parked row. A claim does not wait for it: it claims other keys, and of the same key the rows
// before the locked one, none behind it.
func TestClaimBesideLockedFollower(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		locked  int // of the rows of the key
		claimed []int
	}{
		{"first", 1, []int{0, 3}},
		{"second", 2, []int{0, 1, 3}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f, ctx := newTable(t), t.Context()
			s := f.store("a", time.Minute)
			f.insert(s, delivery.Pending, f.record("k"), "k")
			f.insert(s, delivery.Parked, f.record("k", "k"), "k", "k")
			f.insert(s, delivery.Pending, f.record("other"), "other")
			require.Equal(t, []string{"k PENDING 0", "k PARKED 0", "k PARKED 0", "other PENDING 0"}, f.rows())
			all := f.idsOfRows()

			tx, err := f.db.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(ctx) }()
			_, err = tx.Exec(ctx, pg.InSchema(`SELECT FROM {schema}.event_delivery WHERE id = $1 FOR UPDATE`, f.schema), all[test.locked])
			require.NoError(t, err)
			began := time.Now()
			claimed, err := s.Claim(ctx, pairs, 10, 10, false, room)
			require.NoError(t, err)
			require.Less(t, time.Since(began), 3*time.Second, "it waited for the lock")
			var want []int64
			for _, n := range test.claimed {
				want = append(want, all[n])
			}
			require.Equal(t, want, ids(claimed))

			require.NoError(t, tx.Rollback(ctx))
			_, err = s.Finish(ctx, claimed)
			require.NoError(t, err)
			claimed, err = s.Claim(ctx, pairs, 10, 10, false, room)
			require.NoError(t, err)
			require.Equal(t, all[test.locked:3], ids(claimed))
		})
	}
}

// idsOfRows returns the ids of all rows in their order.
func (f *tableFixture) idsOfRows() (all []int64) {
	require.NoError(f.t, f.db.QueryRow(f.t.Context(), pg.InSchema(`SELECT array_agg(id ORDER BY id) FROM {schema}.event_delivery`, f.schema)).Scan(&all))
	return all
}
