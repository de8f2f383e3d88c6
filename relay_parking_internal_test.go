package outbox

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Of each key one row is the head, the first, and has a time at which it is due.
func TestParkingAssigns(t *testing.T) {
	t.Parallel()
	var p parking
	p.reset(map[string]int{"old": 2})
	require.True(t, p.mustWait("old"))
	require.False(t, p.mustWait("new"))
	failures := []failure{
		{key: "new", status: StatusFailed},
		{key: "old", status: StatusParked, pending: true},
		{key: "new", status: StatusFailed}, // two rejections of one request
		{key: "gone", status: StatusParked},
		{key: "gone", status: StatusParked},
		{key: "unavailable", status: StatusWaiting},
		{key: "dead", status: StatusDead},
		{key: "dead", status: StatusFailed},
		{key: "held", status: StatusDead, held: true},
		{key: "held", status: StatusParked},
	}
	p.assign(failures)
	var got []string
	for _, f := range failures {
		got = append(got, f.key+" "+f.status)
	}
	require.Equal(t, []string{
		"new failed", "old parked", "new parked", "gone waiting", "gone parked", "unavailable waiting",
		"dead dead", "dead failed", "held dead", "held parked",
	}, got)
}

// A dead event holds back the later ones of its key only if it is held.
func TestParkingOfDeadEvents(t *testing.T) {
	t.Parallel()
	var p parking
	p.reset(nil)
	p.rowsWritten([]failure{{key: "dead", status: StatusDead}, {key: "held", status: StatusDead, held: true}})
	require.False(t, p.mustWait("dead"))
	require.True(t, p.mustWait("held"))
}

// A key stays parked as long as an event is on its way to a row, although the
// last row is gone.
func TestParkingWaitsForWhatIsPending(t *testing.T) {
	t.Parallel()
	var p parking
	p.reset(map[string]int{"key": 1})
	require.True(t, p.mustWait("key")) // v3 is on its way
	p.rowRemoved("key")                // v2 was sent
	require.True(t, p.mustWait("key"), "v4 would overtake v3")
	failures := []failure{{key: "key", status: StatusParked, pending: true}, {key: "key", status: StatusParked, pending: true}}
	p.assign(failures)
	require.Equal(t, StatusWaiting, failures[0].status, "it is the head now")
	p.rowsWritten(failures)
	p.rowRemoved("key")
	require.True(t, p.busy.Load())
	p.rowRemoved("key")
	require.False(t, p.busy.Load())
	require.False(t, p.mustWait("key"))
}

// Operators resolve rows without the relay's knowledge.
func TestParkingIsCorrected(t *testing.T) {
	t.Parallel()
	var p parking
	p.reset(map[string]int{"resolved": 3, "fewer": 3, "pending": 1})
	require.True(t, p.mustWait("pending"))
	p.correct(map[string]int{"fewer": 1, "revived": 1})
	require.False(t, p.mustWait("resolved"))
	require.True(t, p.mustWait("pending"))
	require.True(t, p.mustWait("fewer"))
	require.True(t, p.mustWait("revived"))
}

// With PassFailedKeys every failure has a time at which it is due.
func TestParkingPasses(t *testing.T) {
	t.Parallel()
	p := parking{passing: true}
	p.reset(map[string]int{"key": 1})
	failures := []failure{{key: "key", status: StatusFailed}, {key: "key", status: StatusWaiting}}
	p.assign(failures)
	require.Equal(t, []string{StatusFailed, StatusWaiting}, []string{failures[0].status, failures[1].status})
}
