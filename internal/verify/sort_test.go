package verify

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Any number of items is sorted with any memory, and no file is left.
func TestSort(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, n := range []int{0, 1, 2, 3, 10, 100, 300} {
		for _, memory := range []int{1, 7 * itemSize, 2000 * itemSize} {
			dir := t.TempDir()
			s := newSorter(dir, "x", memory, func() error { return nil })
			s.fanIn = 3
			want := make([]item, n)
			for i := range want {
				for j := range want[i] {
					want[i][j] = byte(rng.IntN(3))
				}
				require.NoError(t, s.add(&want[i]))
			}
			slices.SortFunc(want, func(a, b item) int { return slices.Compare(a[:], b[:]) })
			have := make([]item, 0, n)
			require.NoError(t, s.each(func(it *item) error { have = append(have, *it); return nil }))
			require.Equal(t, want, have)
			left, err := filepath.Glob(filepath.Join(dir, "*"))
			require.NoError(t, err)
			require.Empty(t, left)
		}
	}
}

// A full disk, or a folder that is gone, is an error.
func TestSortCannotWrite(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "gone")
	s := newSorter(dir, "x", 1, func() error { return nil })
	require.NoError(t, s.add(&item{}))
	require.ErrorIs(t, s.add(&item{}), os.ErrNotExist)
}

// What is written of an item is read again.
func TestItems(t *testing.T) {
	t.Parallel()
	for _, s := range []sighting{{}, {event: idOf("x"), side: sideRecord, topic: 1 << 31, partition: 1 << 30, position: -5, key: 1 << 63, at: -1, state: stateDead}} {
		it := s.item()
		require.Equal(t, s, sightingOf(&it))
	}
	for _, a := range []arrival{{}, {topic: 1, key: 1 << 63, partition: marked, offset: 9, position: -9, event: idOf("y")}} {
		it := a.item()
		require.Equal(t, a, arrivalOf(&it))
	}
}
