package delivery

import (
	"sync"
	"time"
)

// floors remembers for each key an id below which no row of it was open when this store inserted
// into it last, and found it free. It holds for good: later rows have higher ids, and a row that
// is put back is looked for apart. While a transaction is open somewhere, PostgreSQL cannot remove
// the index entries of rows that have gone on, and to look for open rows takes the longer the more of
// them there are. From a floor on there are few.
//
// A crash may forget what was read, and give ids out again. It also ends all connections. So floors are for
// connections that are older than the last statement of one of which the same was known.
type floors struct {
	mu     sync.Mutex
	server time.Time // its start
	until  time.Time // a time of the server: up to then it has not crashed since the first floor was read
	known  map[int64]int64
	doubts int // statements of younger connections since
}

const (
	mostFloors = 100_000 // bounds the memory for them
	mostDoubts = 20      // then all connections are taken for younger
)

// of returns what is known of keys, 0 if it is nothing, and for which connections of which server.
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
type session struct{ at, server, born time.Time } // the time of the statement, the starts of server and connection

// learn notes that the keys of rows were free when these were inserted.
func (f *floors) learn(rows []Delivery, on session) {
	f.mu.Lock()
	defer f.mu.Unlock()
	same := on.server.Equal(f.server)
	if same && on.born.After(f.until) && f.doubts < mostDoubts {
		f.doubts++
		return
	}
	if !same || f.doubts == mostDoubts || len(f.known) > mostFloors {
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
