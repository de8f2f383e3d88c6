package delivery

import (
	"sync"
	"time"
)

// floors remembers the floor of each key: an id below which none of its rows was open when this store last
// inserted into the key and found it free. A floor holds for good, because later rows have higher ids. Rows
// that were put back are looked for separately. While a transaction is open anywhere, PostgreSQL cannot
// remove the index entries of finished rows. So a scan for open rows becomes slower with each finished row,
// but only few entries are above a floor.
//
// A crash of PostgreSQL may forget committed rows and assign their ids again. It also ends all connections.
// Therefore a floor is used only on connections that began before the last statement that confirmed the
// floors.
type floors struct {
	mu     sync.Mutex
	server time.Time // start of the server from which the floors are
	until  time.Time // by the clock of the server: it has not crashed between the first floor and this time
	known  map[int64]int64
	doubts int // statements on younger connections since
}

const (
	maxFloors = 100_000 // bounds the memory for them
	maxDoubts = 20      // then no older connection is left, and the floors are forgotten
)

// of returns the floors of keys, 0 if none is known, and the connections on which they may be used: those
// that began until a time, on the server that started at a time.
func (f *floors) of(rows []New) (ids []int64, until, server time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ids = make([]int64, len(rows))
	for i, r := range rows {
		if r.Key.Ordered {
			ids[i] = f.known[r.Key.Digest]
		}
	}
	return ids, f.until, f.server
}

// session is the connection of a statement.
type session struct{ at, server, born time.Time } // time of the statement; starts of server and connection

// learn notes the floors of rows whose keys were free when the rows were inserted.
func (f *floors) learn(rows []Delivery, on session) {
	f.mu.Lock()
	defer f.mu.Unlock()
	same := on.server.Equal(f.server)
	if same && on.born.After(f.until) && f.doubts < maxDoubts {
		f.doubts++
		return
	}
	if !same || f.doubts == maxDoubts || len(f.known) > maxFloors {
		f.server, f.known = on.server, map[int64]int64{}
	}
	f.doubts = 0
	if !same || on.at.After(f.until) {
		f.until = on.at
	}
	for i := range rows {
		if r := &rows[i]; r.Key.Ordered {
			f.known[r.Key.Digest] = r.floor
		}
	}
}
