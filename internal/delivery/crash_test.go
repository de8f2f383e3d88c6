package delivery_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
)

// A crash of PostgreSQL may forget rows, and assign their ids again. A worker's statements about its
// forgotten rows do not change the rows that have the same ids now.
func TestIDsAreGivenOutAgain(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	a := f.store("a", time.Minute)
	for _, claims := range []bool{false, true} {
		f.exec(`TRUNCATE {schema}.event_delivery RESTART IDENTITY`)
		forgotten := f.insert(a, delivery.Processing, f.record("k", "k", "k"), "k", "k", "k")
		require.Len(t, forgotten, 3)
		f.exec(`TRUNCATE {schema}.event_delivery RESTART IDENTITY`)
		status := delivery.Processing
		if claims {
			status = delivery.Pending
		}
		now := f.insert(a, status, f.record("l", "m", "n"), "l", "m", "n")
		if claims {
			var err error
			now, err = a.Claim(ctx, pairs, 10, 10, false, room)
			require.NoError(t, err)
		}
		require.Equal(t, ids(forgotten), ids(now))

		_, err := a.Finish(ctx, forgotten[:1])
		require.ErrorIs(t, err, delivery.ErrLost)
		_, err = a.Fail(ctx, delivery.Failure{Of: forgotten[0], Code: "handler"}, forgotten[1:])
		require.ErrorIs(t, err, delivery.ErrLost)
		require.NoError(t, a.Release(ctx, forgotten))
		tx, err := f.db.Begin(ctx)
		require.NoError(t, err)
		require.ErrorIs(t, a.LockIn(ctx, tx, forgotten), delivery.ErrLost)
		require.NoError(t, tx.Rollback(ctx))
		renewed, err := a.Renew(ctx, refs(forgotten))
		require.NoError(t, err)
		require.Empty(t, renewed)
		require.Equal(t, []string{"l PROCESSING 1", "m PROCESSING 1", "n PROCESSING 1"}, f.rows())

		mine, err := a.Own(ctx)
		require.NoError(t, err)
		require.ElementsMatch(t, refs(now), refs(mine))
		_, err = a.Finish(ctx, now)
		require.NoError(t, err)
	}
}

// A crash may forget that a row has ended. The rows behind it, which its worker still has claimed, wait for
// it.
func TestEndIsForgotten(t *testing.T) {
	t.Parallel()
	for name, forget := range map[string]string{
		"with its worker": `UPDATE {schema}.event_delivery SET status = 'PROCESSING', locked_by = $2, locked_until = now() + interval '1 minute' WHERE id = $1`,
		"given back":      `UPDATE {schema}.event_delivery SET status = 'PARKED', attempt_count = length($2) * 0 WHERE id = $1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, ctx := newTable(t), t.Context()
			a := f.store("a", time.Minute)
			run := f.insert(a, delivery.Processing, f.record("k", "k", "k", "other"), "k", "k", "k", "other")
			_, err := a.Finish(ctx, run[:1])
			require.NoError(t, err)
			f.exec(forget, run[0].ID, run[0].Holder)
			before := f.rows()

			_, err = a.Finish(ctx, run[1:])
			require.ErrorIs(t, err, delivery.ErrLost)
			for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
				tx, err := f.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				_, err = a.FinishIn(ctx, tx, run[1:2])
				require.NoError(t, tx.Rollback(ctx))
				require.ErrorIs(t, err, delivery.ErrLost, level)
			}
			require.Equal(t, before, f.rows())

			require.NoError(t, a.Release(ctx, run))
			claimed, err := a.Claim(ctx, pairs, 10, 10, false, room)
			require.NoError(t, err)
			require.Equal(t, ids(run), ids(claimed))
		})
	}
}

// A crash may forget that a row has ended, and also the claim of the row behind it. The process that had
// this claim cannot make its row overtake the first row, whichever result it saves.
func TestForgottenEndsComeFirst(t *testing.T) {
	t.Parallel()
	for name, do := range map[string]func(*tableFixture, *delivery.Store, delivery.Delivery) error{
		"given back": func(f *tableFixture, s *delivery.Store, d delivery.Delivery) error {
			return s.Release(f.t.Context(), []delivery.Delivery{d})
		},
		"failed": func(f *tableFixture, s *delivery.Store, d delivery.Delivery) error {
			_, err := s.Fail(f.t.Context(), delivery.Failure{Of: d, Code: "handler", Dead: true}, nil)
			return err
		},
		"failed before others": func(f *tableFixture, s *delivery.Store, d delivery.Delivery) error {
			_, err := s.Fail(f.t.Context(), delivery.Failure{Of: d, Code: "handler"}, []delivery.Delivery{d})
			return err
		},
		"promoted": func(f *tableFixture, s *delivery.Store, d delivery.Delivery) error {
			_, err := s.Promote(f.t.Context(), []delivery.Delivery{d})
			return err
		},
		"ended": func(f *tableFixture, s *delivery.Store, d delivery.Delivery) error {
			_, err := s.Finish(f.t.Context(), []delivery.Delivery{d})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newTable(t)
			a := f.store("a", time.Minute)
			first := f.insert(a, delivery.Processing, f.record("k"), "k")
			f.insert(a, delivery.Processing, f.record("k"), "k")
			_, err := a.Finish(t.Context(), first)
			require.NoError(t, err)
			second := f.claim(a)
			require.Len(t, second, 1)
			f.exec(`UPDATE {schema}.event_delivery SET status = 'PROCESSING', locked_by = 'b/1', locked_until = now() + interval '1 minute' WHERE id = $1`, first[0].ID)
			f.exec(`UPDATE {schema}.event_delivery SET status = 'PARKED', locked_by = NULL, locked_until = NULL, attempt_count = 0 WHERE id = $1`, second[0].ID)
			before := f.rows()
			if err := do(f, a, second[0]); err != nil {
				require.ErrorIs(t, err, delivery.ErrLost)
			}
			require.Equal(t, before, f.rows())
		})
	}
}
