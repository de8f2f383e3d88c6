package main

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// An id says when it was made, and ids sort by time.
func TestIDsHaveATime(t *testing.T) {
	t.Parallel()
	var ids []string
	for range 1000 {
		before := time.Now().Truncate(time.Millisecond)
		id, err := newID()
		require.NoError(t, err)
		at, err := createdAt(id)
		require.NoError(t, err)
		require.WithinRange(t, at, before, time.Now())
		ids = append(ids, id.String())
	}
	require.True(t, slices.IsSorted(ids))

	at, err := createdAt(uuid.MustParse("0196b0c5-6a00-7000-8000-000000000001"))
	require.NoError(t, err)
	require.Equal(t, time.UnixMilli(0x0196b0c56a00).UTC(), at)
	_, err = createdAt(uuid.New()) // of version 4: nothing but chance
	require.ErrorContains(t, err, "no time")
}

// Milliseconds and 22 random bits are not enough for ids that many machines draw: among
// 20,000 of the same millisecond are some fifty that another one has, too. Of as many UUIDs
// of one millisecond, none has another's random part.
func TestTwentyTwoBitsAreTooFew(t *testing.T) {
	t.Parallel()
	const machines = 20_000 // each draws an id in the same millisecond
	const bits = 22
	drawn := map[uint64]bool{}
	for range machines {
		drawn[rand.Uint64N(1<<bits)] = true
	}
	require.Less(t, len(drawn), machines, "an id that two machines have")

	parts := map[string]bool{}
	for range machines {
		id, err := newID()
		require.NoError(t, err)
		parts[string(id[8:])] = true // 62 bits; 12 more before it are used on one machine to keep the order
	}
	require.Len(t, parts, machines)
}
