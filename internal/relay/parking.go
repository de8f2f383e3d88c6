package relay

import (
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/outboxgo/outbox/internal/cursor"
)

// Parking knows which keys have rows in outbox_failed. Later events of these keys join them there
// instead of being sent.
//
// It must not lose this race: the retrier sends the last row of a key and removes it, while the
// session is about to add another row behind it. If the key were free in between, the session would
// send the event after that one first. So an event is counted as soon as it is decided that it
// waits (pending), and rows are added and removed under the lock that counts them. No statement
// under this lock waits for a row of outbox_failed, because the session waits for the lock before
// it sends: what another transaction has locked stays unsaved.
//
// There may be a million such keys, so Parking stores hashes of them. If two keys have the same
// hash, one of them waits for the other.
type Parking struct {
	passing bool        // RelayConfig.PassFailedKeys: no event waits behind another
	busy    atomic.Bool // there are keys; saves the lock where there are none

	mistaken atomic.Bool // retriers correct mistakes soon: rows were locked, or operators have resolved them meanwhile

	counting sync.Mutex // held during a recount, and taken before mu: session and retrier recount

	mu        sync.Mutex
	seed      maphash.Seed
	Keys      map[uint64]ParkedKey
	recounts  bool // a recount is under way
	forgotten bool // since a reset there was no recount

	unsaved  map[int64]cursor.RetryResult // of rows that another transaction has locked, by outbox_failed.id
	headless map[string]bool              // keys that have rows and have lost their head, so far as the retriers know
}

// ParkedKey counts what holds back a key. It is in the map only while a count is above
// zero.
type ParkedKey struct {
	Rows    int32 // in outbox_failed
	pending int32 // events whose rows will be written
	found   int32 // by the recount that is under way
	changed bool  // rows has changed during that recount
}

// NewParking returns a parking without keys. Passing means that later events of a failed key are sent.
func NewParking(passing bool) *Parking {
	return &Parking{
		passing: passing, seed: maphash.MakeSeed(), Keys: map[uint64]ParkedKey{},
		unsaved: map[int64]cursor.RetryResult{}, headless: map[string]bool{},
	}
}

// MustWait reports whether an event has to wait behind another event of its key. If so, the event is counted.
func (p *Parking) MustWait(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	hash := p.Hash(key)
	k, is := p.Keys[hash]
	if is = is && (k.Rows > 0 || k.pending > 0); is {
		k.pending++
		p.Keys[hash] = k
	}
	return is
}

// waits reports whether a key has rows or pending events.
func (p *Parking) waits(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, is := p.Keys[p.Hash(key)]
	return is && (k.Rows > 0 || k.pending > 0)
}

// reset forgets all keys; no event is pending.
func (p *Parking) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.Keys)
	p.busy.Store(false)
	p.forgotten = true
}

// Recount replaces the counts of rows by those of outbox_failed, a page of keys at a time:
// the relay has begun to lead, or an operator may have resolved some. Pending events stay
// counted. Page returns the keys behind one, in their order, and none behind the last; it is
// called under the lock with which rows are added and removed. A row that is added or removed
// between two pages may be found twice or not at all. So if the count of a key has changed
// meanwhile, it stays as it is.
func (p *Parking) Recount(page func(after string) ([]cursor.KeyRows, error)) error {
	p.counting.Lock()
	defer p.counting.Unlock()
	p.mu.Lock()
	p.recounts = true
	p.mu.Unlock()
	err := p.countPages(page)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endRecount(err == nil)
	return err
}

func (p *Parking) countPages(page func(after string) ([]cursor.KeyRows, error)) error {
	for after := ""; ; {
		last, err := p.countPage(func() ([]cursor.KeyRows, error) { return page(after) })
		if err != nil || last == "" {
			return err
		}
		after = last
	}
}

// countPage returns the last key of a page, or "" if the page is empty.
func (p *Parking) countPage(page func() ([]cursor.KeyRows, error)) (last string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	keys, err := page()
	for _, found := range keys {
		hash := p.Hash(found.Key)
		k := p.Keys[hash]
		k.found += int32(found.Rows)
		p.put(hash, k)
		last = found.Key
	}
	return last, err
}

// Unsaved returns the results that could not be saved. No event of their keys may be sent.
func (p *Parking) Unsaved() []cursor.RetryResult {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Values(p.unsaved))
}

// takeHeadless returns the keys that have lost their head, each once.
func (p *Parking) takeHeadless() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	keys := slices.Collect(maps.Keys(p.headless))
	clear(p.headless)
	return keys
}

// addHeadless adds keys that takeHeadless returns.
func (p *Parking) addHeadless(keys []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.putHeadless(keys)
}

// The caller of all other methods holds mu.

// putHeadless is addHeadless. When no event waits behind another, no key needs a head.
func (p *Parking) putHeadless(keys []string) {
	for _, key := range keys {
		if !p.passing {
			p.headless[key] = true
		}
	}
}

// unsavedOf returns the unsaved result of the row and event of another one. After a crash of PostgreSQL the row may be
// that of another event.
func (p *Parking) unsavedOf(other cursor.RetryResult) (unsaved cursor.RetryResult, is bool) {
	unsaved, is = p.unsaved[other.Row]
	return unsaved, is && refOf(&unsaved.Event.Event) == refOf(&other.Event.Event)
}

// overrules reports whether an unsaved result counts more than another one of its row: the event was sent.
func (p *Parking) overrules(other cursor.RetryResult) bool {
	unsaved, is := p.unsavedOf(other)
	return is && unsaved.Status == statusResolved && other.Status != statusResolved
}

// keep remembers a result whose row is locked, without the content of the event. It reports whether that is new.
func (p *Parking) keep(result cursor.RetryResult) bool {
	if p.overrules(result) {
		return false
	}
	_, known := p.unsavedOf(result)
	event := *result.Event
	event.Payload, event.Headers = nil, nil
	result.Event = &event
	p.unsaved[result.Row] = result
	return !known
}

// endRecount replaces the counts by those of the recount, if all pages were read. After a reset
// there are no other counts.
func (p *Parking) endRecount(complete bool) {
	for hash, k := range p.Keys {
		if complete && (!k.changed || p.forgotten) {
			k.Rows = k.found
		}
		k.found, k.changed = 0, false
		p.put(hash, k)
	}
	p.recounts, p.forgotten = false, p.forgotten && !complete
}

// Hash returns the hash by which the parking knows a key.
func (p *Parking) Hash(key string) uint64 { return maphash.String(p.seed, key) }

// put changes the counts of a key, and removes it if it has neither rows nor pending
// events, and the recount knows nothing of it.
func (p *Parking) put(hash uint64, k ParkedKey) {
	if k.Rows > 0 || k.pending > 0 || k.found > 0 || k.changed {
		p.Keys[hash] = k
	} else {
		delete(p.Keys, hash)
	}
	p.busy.Store(len(p.Keys) > 0)
}

// assign gives failures their final status: the first failure of a key without rows is
// the head of the key, all others are parked. Dead ones stay dead.
func (p *Parking) assign(failures []cursor.Failure) {
	if p.passing {
		return
	}
	added := map[string]bool{}
	for i := range failures {
		f := &failures[i]
		k := p.Keys[p.Hash(f.Key)]
		if f.Status == statusDead {
			added[f.Key] = added[f.Key] || f.Held
			continue
		}
		switch head := !added[f.Key] && k.Rows <= 0; {
		case !head:
			f.Status = statusParked
		case f.Status == statusParked:
			f.Status = statusWaiting // the rows that it was behind are gone
		}
		added[f.Key] = true
	}
}

// rowsWritten counts the rows of failures, except for dead ones that do not hold their
// keys.
func (p *Parking) rowsWritten(failures []cursor.Failure) {
	for _, f := range failures {
		hash := p.Hash(f.Key)
		k := p.Keys[hash]
		if f.Status != statusDead || f.Held {
			k.Rows, k.changed = k.Rows+1, p.recounts
		}
		if f.Pending {
			k.pending--
		}
		p.put(hash, k)
	}
}

// rowRemoved counts one row less.
func (p *Parking) rowRemoved(key string) {
	hash := p.Hash(key)
	if k, is := p.Keys[hash]; is {
		k.Rows, k.changed = k.Rows-1, p.recounts
		p.put(hash, k)
	}
}

// rowsLeft keeps keys parked that still have rows. An operator may have retried a dead
// event of such a key: if its row was sent before any recount, one too few are counted.
func (p *Parking) rowsLeft(keys []string) {
	for _, key := range keys {
		hash := p.Hash(key)
		if k := p.Keys[hash]; k.Rows <= 0 {
			k.Rows, k.changed = 1, p.recounts
			p.put(hash, k)
		}
	}
}
