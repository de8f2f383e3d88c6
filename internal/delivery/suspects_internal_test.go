package delivery

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// While a suspect of this process takes long, another one may begin if neither can lose more than one of several
// attempts by that.
func TestRoomForSuspects(t *testing.T) {
	t.Parallel()
	suspect := func(attempt int) Delivery {
		return Delivery{Ref: Ref{ID: 1, Holder: "h"}, Suspect: true, Attempt: attempt, MaxAttempts: 4}
	}
	for name, tt := range map[string]struct {
		has   Delivery
		begun time.Duration // ago; 0 means not yet
		lost  bool
		want  suspectRoom
	}{
		"no suspect":                  {Delivery{Attempt: 1, MaxAttempts: 4}, 0, false, anySuspects},
		"one that has not begun":      {suspect(1), 0, false, noSuspects},
		"one that has just begun":     {suspect(1), time.Second, false, noSuspects},
		"a slow one":                  {suspect(1), slowBatch, false, freshSuspects},
		"a slow one, begun before":    {suspect(3), slowBatch, false, freshSuspects},
		"a slow one in its last try":  {suspect(4), slowBatch, false, noSuspects},
		"one whose call was given up": {suspect(1), time.Hour, true, anySuspects},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newClaimedSet()
			s.add(context.Background(), []Delivery{tt.has}, time.Now(), nil)
			if tt.begun > 0 {
				s.noteBegun(tt.has.Ref)
				s.rows[tt.has.Ref].begun = time.Now().Add(-tt.begun)
			}
			if tt.lost {
				s.lose(tt.has.Ref)
			}
			require.Equal(t, tt.want, s.roomForSuspects())
		})
	}
}
