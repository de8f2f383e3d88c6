package processors

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// during rerounds rounds from which so many seconds of ten are stolen, one after the other.
func during(stolen ...int) *Rounds {
	var now Time
	calls := 0
	return &Rounds{Again: 2, read: func() Time {
		if calls++; calls%2 == 0 {
			s := time.Duration(stolen[min(calls/2, len(stolen))-1]) * time.Second
			now.Machine += 10*time.Second - s
			now.Stolen += s
		}
		return now
	}}
}

func TestRoundsAreRunAgain(t *testing.T) {
	for name, test := range map[string]struct {
		stolen           []int
		runs             int
		again, disturbed int
	}{
		"quiet":         {[]int{0}, 1, 0, 0},
		"a fifth":       {[]int{2}, 1, 0, 0},
		"more, and not": {[]int{3, 5, 1}, 3, 2, 0},
		"always":        {[]int{9}, 3, 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			rounds, runs := during(test.stolen...), 0
			require.NoError(t, rounds.Run(func() error { runs++; return nil }))
			require.Equal(t, test.runs, runs)
			require.Equal(t, test.again, rounds.again)
			require.Equal(t, test.disturbed, rounds.disturbed)
		})
	}
	failed := errors.New("failed")
	rounds := during(9)
	require.ErrorIs(t, rounds.Run(func() error { return failed }), failed)
	require.Zero(t, rounds.again)
}
