package relay

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"

	"github.com/stretchr/testify/require"
)

// parkingOf returns a parking that has found rows of keys.
func parkingOf(t *testing.T, rows map[string]int) *Parking {
	t.Helper()
	p := NewParking(false)
	recount(t, p, rows)
	return p
}

// recount lets a parking find rows, in pages of one key.
func recount(t *testing.T, p *Parking, rows map[string]int) {
	t.Helper()
	names := slices.Sorted(maps.Keys(rows))
	require.NoError(t, p.Recount(func(after string) (keys []cursor.KeyRows, err error) {
		for _, name := range names {
			if name > after {
				return []cursor.KeyRows{{Key: name, Rows: rows[name]}}, nil
			}
		}
		return nil, nil
	}))
}

// Of each key one row is the head, the first, and has a time at which it is due.
func TestParkingAssigns(t *testing.T) {
	t.Parallel()
	p := parkingOf(t, map[string]int{"old": 2})
	require.True(t, p.MustWait("old"))
	require.False(t, p.MustWait("new"))
	failures := []cursor.Failure{
		{Key: "new", Status: statusFailed},
		{Key: "old", Status: statusParked, Pending: true},
		{Key: "new", Status: statusFailed}, // two rejections of one request
		{Key: "gone", Status: statusParked},
		{Key: "gone", Status: statusParked},
		{Key: "unavailable", Status: statusWaiting},
		{Key: "dead", Status: statusDead},
		{Key: "dead", Status: statusFailed},
		{Key: "held", Status: statusDead, Held: true},
		{Key: "held", Status: statusParked},
	}
	p.assign(failures)
	var got []string
	for _, f := range failures {
		got = append(got, f.Key+" "+f.Status)
	}
	require.Equal(t, []string{
		"new failed", "old parked", "new parked", "gone waiting", "gone parked", "unavailable waiting",
		"dead dead", "dead failed", "held dead", "held parked",
	}, got)
}

// A dead event holds back the later ones of its key only if it is held.
func TestParkingOfDeadEvents(t *testing.T) {
	t.Parallel()
	p := parkingOf(t, nil)
	p.rowsWritten([]cursor.Failure{{Key: "dead", Status: statusDead}, {Key: "held", Status: statusDead, Held: true}})
	require.False(t, p.MustWait("dead"))
	require.True(t, p.MustWait("held"))
}

// A key stays parked as long as an event is on its way to a row, although the
// last row is gone.
func TestParkingWaitsForWhatIsPending(t *testing.T) {
	t.Parallel()
	p := parkingOf(t, map[string]int{"key": 1})
	require.True(t, p.MustWait("key")) // v3 is on its way
	p.rowRemoved("key")                // v2 was sent
	require.True(t, p.MustWait("key"), "v4 would overtake v3")
	failures := []cursor.Failure{{Key: "key", Status: statusParked, Pending: true}, {Key: "key", Status: statusParked, Pending: true}}
	p.assign(failures)
	require.Equal(t, statusWaiting, failures[0].Status, "it is the head now")
	p.rowsWritten(failures)
	p.rowRemoved("key")
	require.True(t, p.busy.Load())
	p.rowRemoved("key")
	require.False(t, p.busy.Load())
	require.False(t, p.MustWait("key"))
}

// Operators resolve rows without the relay's knowledge.
func TestParkingIsCorrected(t *testing.T) {
	t.Parallel()
	p := parkingOf(t, map[string]int{"resolved": 3, "fewer": 3, "pending": 1})
	require.True(t, p.MustWait("pending"))
	recount(t, p, map[string]int{"fewer": 1, "revived": 1})
	require.False(t, p.MustWait("resolved"))
	require.True(t, p.MustWait("pending"))
	require.True(t, p.MustWait("fewer"))
	require.True(t, p.MustWait("revived"))
}

// With PassFailedKeys every failure has a time at which it is due.
func TestParkingPasses(t *testing.T) {
	t.Parallel()
	p := NewParking(true)
	failures := []cursor.Failure{{Key: "key", Status: statusFailed}, {Key: "key", Status: statusWaiting}}
	p.assign(failures)
	require.Equal(t, []string{statusFailed, statusWaiting}, []string{failures[0].Status, failures[1].Status})
}

// A page that cannot be read frees no key.
func TestParkingIsNotCorrectedByHalf(t *testing.T) {
	t.Parallel()
	p := parkingOf(t, map[string]int{"a": 1, "b": 1, "c": 1})
	broken := errors.New("PostgreSQL does not answer")
	err := p.Recount(func(after string) ([]cursor.KeyRows, error) {
		if after == "" {
			return []cursor.KeyRows{{Key: "a", Rows: 2}}, nil
		}
		return nil, broken
	})
	require.ErrorIs(t, err, broken)
	require.Len(t, p.Keys, 3)
	recount(t, p, map[string]int{"b": 1})
	require.Len(t, p.Keys, 1)
}

// A million parked keys fit into little memory.
func TestParkingOfManyKeys(t *testing.T) {
	// Not parallel: it measures the heap.
	const keys, pages = 1_000_000, 100
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, n := heap(), 0
	p := NewParking(false)
	require.NoError(t, p.Recount(func(string) (page []cursor.KeyRows, err error) {
		for range min(keys-n, keys/pages) {
			page = append(page, cursor.KeyRows{Key: fmt.Sprintf("order-events/customer-%032d", n), Rows: 1})
			n++
		}
		return page, nil
	}))
	require.Len(t, p.Keys, keys)
	used := (int64(heap()) - int64(before)) >> 20
	t.Logf("%d MiB", used)
	require.Less(t, used, int64(64), "MiB")
	require.True(t, p.MustWait(fmt.Sprintf("order-events/customer-%032d", 7)))
}

// The session counts all rows again when the cursor is not where the session left it, and the
// retrier counts them at the same time. If either count fails, a key that has rows is still not
// free afterwards.
func TestParkingIsCountedByTwo(t *testing.T) {
	t.Parallel()
	p, other := NewParking(false), make(chan error)
	fails := func(string) ([]cursor.KeyRows, error) { return nil, errDown }
	pages := 0
	require.NoError(t, p.Recount(func(string) ([]cursor.KeyRows, error) {
		if pages++; pages == 1 {
			return []cursor.KeyRows{{Key: "orders/a", Rows: 1}}, nil
		}
		go func() { other <- p.Recount(fails) }()
		time.Sleep(50 * time.Millisecond) // the other one begins, and waits
		return nil, nil
	}))
	require.ErrorIs(t, <-other, errDown)
	require.True(t, p.MustWait("orders/a"))
}

// Rows come and go between the pages of a recount. What it has found of their keys, before
// or after, does not count: a key with a row too many would never be free, and one with a
// row too few would be free too early.
func TestParkingChangesDuringARecount(t *testing.T) {
	t.Parallel()
	p := parkingOf(t, map[string]int{"added": 1, "removed": 1, "resolved": 1, "sent": 2})
	changes := map[string]func(){
		"": func() { p.rowsWritten([]cursor.Failure{{Key: "added"}, {Key: "new"}}) }, // and found later
		"new": func() {
			p.rowRemoved("removed") // was found before
			p.rowRemoved("sent")
			p.rowsWritten([]cursor.Failure{{Key: "late"}}) // is not found
		},
	}
	pages := map[string]cursor.KeyRows{"": {Key: "removed", Rows: 1}, "removed": {Key: "sent", Rows: 2}, "sent": {Key: "added", Rows: 2}, "added": {Key: "new", Rows: 1}}
	require.NoError(t, p.Recount(func(after string) ([]cursor.KeyRows, error) {
		if change := changes[after]; change != nil {
			change()
		}
		if page, ok := pages[after]; ok {
			return []cursor.KeyRows{page}, nil
		}
		return nil, nil
	}))
	got := map[string]int32{}
	for _, key := range []string{"added", "late", "new", "removed", "resolved", "sent"} {
		got[key] = p.Keys[p.Hash(key)].Rows
	}
	require.Equal(t, map[string]int32{"added": 2, "late": 1, "new": 1, "removed": 0, "resolved": 0, "sent": 1}, got)
	require.Len(t, p.Keys, 4)
}

var errDown = errors.New("down")
