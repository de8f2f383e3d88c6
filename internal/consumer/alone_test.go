package consumer

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A worker that handles a suspect gives its place back in each wait, and when it is given up because its handler does
// not return.
func TestPlaceIsGivenBack(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{})
	w := s.worker
	w.limits.alone = make(chan struct{}, 1)
	require.True(t, w.takePlace())
	require.Empty(t, w.limits.alone, "it handles no suspect")
	require.True(t, w.beginAlone(7))
	require.True(t, w.takePlace(), "once more")
	require.Len(t, w.limits.alone, 1)
	w.pause(0)
	require.False(t, w.hasPlace())
	require.Empty(t, w.limits.alone)

	require.True(t, w.takePlace())
	w.abandon()
	w.cutOff()
	require.Empty(t, w.limits.alone)
	w.limits.alone <- struct{}{} // another worker
	w.endAlone()
	require.Len(t, w.limits.alone, 1, "its own place was given back already")
}
