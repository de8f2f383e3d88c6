package perpool_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/perpool"
)

// What users share runs once however many there are, ends with the last one, and begins anew with the next.
func TestUsers(t *testing.T) {
	t.Parallel()
	var users perpool.Users
	var running, begun atomic.Int32
	run := func(ctx context.Context) {
		begun.Add(1)
		require.EqualValues(t, 1, running.Add(1))
		<-ctx.Done()
		running.Add(-1)
	}
	for n := range int32(3) {
		require.False(t, users.Any())
		users.Add(run)
		users.Add(run)
		users.Remove()
		require.True(t, users.Any())
		users.Remove()
		require.Zero(t, running.Load(), "Remove waits for the end")
		require.Equal(t, n+1, begun.Load())
	}
}

// There is one value for each pool and name.
func TestRegistry(t *testing.T) {
	t.Parallel()
	var values perpool.Registry[*int]
	a, b := new(pgxpool.Pool), new(pgxpool.Pool)
	get := func(db *pgxpool.Pool, name string) *int {
		return values.Get(db, name, func(known func() *pgxpool.Pool) *int {
			require.Same(t, db, known())
			return new(int)
		})
	}
	require.Same(t, get(a, "x"), get(a, "x"))
	require.NotSame(t, get(a, "x"), get(a, "y"))
	require.NotSame(t, get(a, "x"), get(b, "x"))
}
