package delivery

import (
	"sync"
	"time"
)

// bounds remembers up to which time rows were looked for, so that the next look need not begin
// with those that have gone on since: while a transaction is open somewhere, PostgreSQL cannot
// remove their index entries. A row that was seen and not taken is looked for again. One of an earlier time may
// still come, with a transaction that took long. So a look begins somewhat before the last one, and every now and then it
// is at all rows, as often as that is cheap.
type bounds[K comparable] struct {
	share int           // one part in so many of the time is for looks at all rows
	rare  time.Duration // between these, however long they take

	mu    sync.Mutex
	looks map[K]look
}

type look struct {
	since time.Time // a time of the server
	again time.Time // when all are to be looked at again
}

const lateness = time.Second // of most transactions

// of returns from when on rows are to be looked for, the zero time for all.
func (b *bounds[K]) of(k K) (since time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.looks[k]
	if !time.Now().Before(l.again) {
		return time.Time{}
	}
	return l.since
}

// looked notes that all rows from since until a time were seen, in a look that has taken some time.
func (b *bounds[K]) looked(k K, since, until time.Time, took time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.looks == nil {
		b.looks = map[K]look{}
	}
	l := b.looks[k]
	if since.IsZero() {
		l.again = time.Now().Add(min(time.Duration(b.share)*took, b.rare))
	}
	if !since.After(l.since) { // or another look has left what this one has not seen
		l.since = until.Add(-lateness)
	}
	b.looks[k] = l
}
