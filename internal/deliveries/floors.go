package deliveries

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
// A crash may forget what was read, and give ids out again. So a floor is for connections only
// that are older than it is, and for the server that it is from: what they have read is not forgotten.
type floors struct {
	mu     sync.Mutex
	server time.Time // its start
	known  map[int64]floor
}

type floor struct {
	id int64
	at time.Time // a time of the server
}

// mostFloors bounds the memory for them.
const mostFloors = 100_000

// of returns what is known of keys: 0 if it is nothing.
func (f *floors) of(rows []New) (ids []int64, at []time.Time, server time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ids, at = make([]int64, len(rows)), make([]time.Time, len(rows))
	for i, r := range rows {
		if known, ok := f.known[r.Key.Digest]; ok && r.Key.Ordered {
			ids[i], at[i] = known.id, known.at
		}
	}
	return ids, at, f.server
}

// learn notes that the keys of rows were free when these were inserted.
func (f *floors) learn(rows []Delivery, at, server time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil || !server.Equal(f.server) || len(f.known) > mostFloors {
		f.server, f.known = server, map[int64]floor{}
	}
	for i := range rows {
		if r := &rows[i]; r.Key.Ordered {
			f.known[r.Key.Digest] = floor{r.floor, at}
		}
	}
}
