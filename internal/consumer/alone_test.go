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

// A worker whose context has ended, because a stop or a rebalance cannot wait for its handler, still takes the note of
// its suspect back: the record has not ended the process. One that has lost its partition does not.
func TestNoteOfSuspectIsTakenBack(t *testing.T) {
	t.Parallel()
	for name, finish := range map[string]bool{"stopped": true, "lost": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newPartitionFixture(t, Rules{})
			w := s.worker
			w.limits.alone = make(chan struct{}, 1)
			require.True(t, w.beginAlone(7))
			if finish {
				w.finish()
			}
			w.abandon()
			w.forgetSuspect()
			w.forgetSuspect()
			want := []string{"suspect 7, stopped: false, in time: true"}
			if finish {
				want = append(want, "suspect 7, stopped: true, in time: true")
			}
			require.Equal(t, want, s.log)
		})
	}
}
