package cursor_test

import (
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
)

// A set does what a map does, whatever is added and removed, sparse and dense.
func TestIDSetIsASet(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, span := range []int64{100, 70_000, 200_000, 1 << 40} {
		var s cursor.IDSet
		want := map[int64]bool{}
		for range 40 {
			for range rng.IntN(5000) {
				id := rng.Int64N(span)
				s.Add(id)
				want[id] = true
			}
			ids := slices.Sorted(maps.Keys(want))
			require.Equal(t, len(ids), s.Len())
			n := rng.IntN(len(ids) + 2)
			require.Equal(t, ids[:min(n, len(ids))], s.First(n))
			if rng.IntN(3) == 0 {
				last := rng.Int64N(span)
				if len(ids) > 0 && rng.IntN(2) == 0 {
					last = ids[rng.IntN(len(ids))]
				}
				s.RemoveThrough(last)
				maps.DeleteFunc(want, func(id int64, _ bool) bool { return id <= last })
			}
		}
		require.Equal(t, slices.Sorted(maps.Keys(want)), s.First(s.Len()))
	}
}

// The last id of a word and of a chunk are removed with those below them.
func TestRemoveThroughBounds(t *testing.T) {
	t.Parallel()
	var s cursor.IDSet
	for id := range int64(1 << 17) {
		s.Add(id)
	}
	for _, last := range []int64{63, 64, 65_535, 65_536, 131_070} {
		s.RemoveThrough(last)
		require.Equal(t, 1<<17-int(last)-1, s.Len())
		require.Equal(t, []int64{last + 1}, s.First(1))
	}
	s.RemoveThrough(1 << 17)
	require.Zero(t, s.Len())
	require.Empty(t, s.First(1))
}

// Ten million ids without a gap take no more than a bit each.
func TestMemory(t *testing.T) {
	// Not parallel: it measures the heap.
	var s cursor.IDSet
	before := heap()
	for id := range int64(10_000_000) {
		s.Add(id + 1)
	}
	require.Less(t, heap()-before, uint64(1_500_000))
	require.Equal(t, 10_000_000, s.Len())
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
