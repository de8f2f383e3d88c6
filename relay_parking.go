package outbox

import (
	"sync"
	"sync/atomic"
)

// parking knows which keys have rows in outbox_failed. Later events of these keys join
// them there instead of being sent.
//
// It must not lose this race: the retrier sends the last row of a key and removes it,
// while the session is about to add another row behind it. If the key were free in
// between, the session would send the event after that one first. So an event is
// counted as soon as it is decided that it waits (pending), and rows are added and
// removed under the lock that counts them.
type parking struct {
	passing bool        // RelayConfig.PassFailedKeys: no event waits behind another
	busy    atomic.Bool // there are keys; saves the lock where there are none

	mu   sync.Mutex
	keys map[string]*parkedKey
}

// parkedKey counts what holds back a key. It is in the map only while a count is above
// zero.
type parkedKey struct {
	rows    int // in outbox_failed
	pending int // events whose rows will be written
}

// mustWait reports whether an event has to wait behind others of its key. If so, the
// event counts as pending until its row is written.
func (p *parking) mustWait(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.keys[key]
	if k == nil {
		return false
	}
	k.pending++
	return true
}

// reset starts again with the rows that outbox_failed holds; no event is pending.
func (p *parking) reset(rows map[string]int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = make(map[string]*parkedKey, len(rows))
	for key, n := range rows {
		p.keys[key] = &parkedKey{rows: n}
	}
	p.busy.Store(len(p.keys) > 0)
}

// The caller of all other methods holds mu.

// correct replaces the counts of rows by those of outbox_failed, because an operator may
// have resolved some. Pending events stay counted.
func (p *parking) correct(rows map[string]int) {
	for key, n := range rows {
		p.at(key).rows = n
	}
	for key, k := range p.keys {
		if _, ok := rows[key]; !ok {
			k.rows = 0
			p.freeUnused(key)
		}
	}
}

// at returns the counts of a key, which may be new.
func (p *parking) at(key string) *parkedKey {
	k := p.keys[key]
	if k == nil {
		k = &parkedKey{}
		p.keys[key] = k
		p.busy.Store(true)
	}
	return k
}

// freeUnused removes a key that has neither rows nor pending events.
func (p *parking) freeUnused(key string) {
	if k := p.keys[key]; k != nil && k.rows <= 0 && k.pending <= 0 {
		delete(p.keys, key)
		p.busy.Store(len(p.keys) > 0)
	}
}

// assign gives failures their final status: the first failure of a key without rows is
// the head of the key, all others are parked. Dead ones stay dead.
func (p *parking) assign(failures []failure) {
	if p.passing {
		return
	}
	added := map[string]bool{}
	for i := range failures {
		f := &failures[i]
		k := p.keys[f.key]
		if f.status == StatusDead {
			added[f.key] = added[f.key] || f.held
			continue
		}
		switch head := !added[f.key] && (k == nil || k.rows <= 0); {
		case !head:
			f.status = StatusParked
		case f.status == StatusParked:
			f.status = StatusWaiting // the rows that it was behind are gone
		}
		added[f.key] = true
	}
}

// rowsWritten counts the rows of failures, except for dead ones that do not hold their
// keys.
func (p *parking) rowsWritten(failures []failure) {
	for _, f := range failures {
		k := p.at(f.key)
		if f.status != StatusDead || f.held {
			k.rows++
		}
		if f.pending {
			k.pending--
		}
		p.freeUnused(f.key)
	}
}

// rowRemoved counts one row less.
func (p *parking) rowRemoved(key string) {
	if k := p.keys[key]; k != nil {
		k.rows--
		p.freeUnused(key)
	}
}
