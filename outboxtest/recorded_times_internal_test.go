package outboxtest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What a codec has decoded is equal but for times that are zero in what is wanted.
func TestEqualButZeroTimes(t *testing.T) {
	t.Parallel()
	type step struct{ At time.Time }
	type event struct {
		ID     string
		At     time.Time
		Steps  []step
		Last   *step
		hidden time.Time
	}
	noon := time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)
	got := event{ID: "1", At: noon, Steps: []step{{noon}}, Last: &step{noon}}
	require.True(t, equalButZeroTimes(event{ID: "1", Steps: []step{{}}, Last: &step{}}, got))
	require.True(t, equalButZeroTimes(got, got))
	for name, want := range map[string]event{
		"another id":   {ID: "2", Steps: []step{{}}, Last: &step{}},
		"another time": {ID: "1", At: noon.Add(1), Steps: []step{{}}, Last: &step{}},
		"no step":      {ID: "1", Last: &step{}},
		"nothing last": {ID: "1", Steps: []step{{}}},
		"unexported":   {ID: "1", Steps: []step{{}}, Last: &step{}, hidden: noon},
	} {
		require.False(t, equalButZeroTimes(want, got), name)
	}
	require.False(t, equalButZeroTimes(step{}, event{}))
}
