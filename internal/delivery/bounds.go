package delivery

import (
	"sync"
	"time"
)

// scanBounds remembers up to which time the rows of each K were scanned, so that the next scan can begin
// there. While a transaction is open anywhere, PostgreSQL cannot remove the index entries of rows that have
// changed since. A scan of all these entries becomes slow.
//
// A row that was seen but not taken moves the bound back. A row of an earlier time can still become visible
// when a long transaction commits. Therefore a scan begins somewhat before the last one. Sometimes it
// covers all rows, as often as that is cheap.
type scanBounds[K comparable] struct {
	share int           // full scans take one part in share of the time
	rare  time.Duration // the longest time between full scans, however long they take

	mu      sync.Mutex
	bounds  map[K]scanBound
	latest  time.Time // the clock of the server in the last scan
	setBack bool      // it was set back, see wasSetBack
}

// scanBound is where the next scan begins.
type scanBound struct {
	since  time.Time // by the clock of the server
	fullAt time.Time // when the next scan covers all rows
}

const lateness = time.Second // by which most transactions commit

// start returns the time from which rows are to be scanned, the zero time for all.
func (b *scanBounds[K]) start(k K) (since time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	bound := b.bounds[k]
	if !time.Now().Before(bound.fullAt) {
		return time.Time{}
	}
	return bound.since
}

// scanned notes that no row is left between since and until, after a scan that took some time. Now is the clock of the
// server: if it was set back, the next scan covers all rows.
func (b *scanBounds[K]) scanned(k K, since, until, now time.Time, took time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.setBack, b.latest = b.setBack || now.Before(b.latest), now
	if now.Before(since) {
		delete(b.bounds, k)
		return
	}
	if b.bounds == nil {
		b.bounds = map[K]scanBound{}
	}
	bound := b.bounds[k]
	if since.IsZero() {
		bound.fullAt = time.Now().Add(min(time.Duration(b.share)*took, b.rare))
	}
	if !since.After(bound.since) { // otherwise another scan has moved the bound back, behind the start of this one
		bound.since = until.Add(-lateness)
	}
	b.bounds[k] = bound
}

// wasSetBack reports whether the clock of the server was set back since the last call, as scans have seen it that do
// not overlap.
func (b *scanBounds[K]) wasSetBack() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.setBack
	b.setBack = false
	return was
}
