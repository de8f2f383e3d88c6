package outbox

import (
	"sync"
	"sync/atomic"
)

// parking knows which keys have rows in outbox_failed. Their later events join
// them there instead of being sent.
//
// A race that it must not lose: the retry loop sends the last row of a key and
// removes it, while the main loop is about to add another one behind it; were the
// key free in between, the event after that would be sent first. So an event is
// counted as soon as it is decided that it waits (pending), and rows are added
// and removed under the lock that counts them.
type parking struct {
	busy atomic.Bool // there are keys; saves the lock where there are none

	mu   sync.Mutex
	keys map[string]*parkedKey
}

// parkedKey counts what holds back a key. It is in the map as long as there is
// something.
type parkedKey struct {
	rows    int // in outbox_failed
	pending int // on their way there
}

// takes reports whether an event has to wait behind others of its key. One that
// does is pending until its row is written.
func (p *parking) takes(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.keys[key]
	if k == nil {
		return false
	}
	k.pending++
	return true
}

// reset makes rows what outbox_failed holds; nothing is pending.
func (p *parking) reset(rows map[string]int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = make(map[string]*parkedKey, len(rows))
	for key, n := range rows {
		p.keys[key] = &parkedKey{rows: n}
	}
	p.busy.Store(len(p.keys) > 0)
}

// The rest is called under mu.

// correct makes rows what outbox_failed holds, after an operator may have
// resolved some, and keeps what is pending.
func (p *parking) correct(rows map[string]int) {
	for key, n := range rows {
		p.at(key).rows = n
	}
	for key, k := range p.keys {
		if _, ok := rows[key]; !ok {
			k.rows = 0
			p.drop(key)
		}
	}
}

// at returns a key's count, which may be new.
func (p *parking) at(key string) *parkedKey {
	k := p.keys[key]
	if k == nil {
		k = &parkedKey{}
		p.keys[key] = k
		p.busy.Store(true)
	}
	return k
}

// drop lets a key go if nothing holds it back.
func (p *parking) drop(key string) {
	if k := p.keys[key]; k != nil && k.rows <= 0 && k.pending <= 0 {
		delete(p.keys, key)
		p.busy.Store(len(p.keys) > 0)
	}
}

// assign gives failures their final status: the first of a key without rows is
// its head, all others are parked.
func (p *parking) assign(failures []failure) {
	added := map[string]bool{}
	for i := range failures {
		f := &failures[i]
		k := p.keys[f.key]
		switch head := !added[f.key] && (k == nil || k.rows <= 0); {
		case !head:
			f.status = StatusParked
		case f.status == StatusParked:
			f.status = StatusWaiting // what it was behind is gone
		}
		added[f.key] = true
	}
}

// wrote counts failures whose rows are written.
func (p *parking) wrote(failures []failure) {
	for _, f := range failures {
		k := p.at(f.key)
		k.rows++
		if f.pending {
			k.pending--
		}
	}
}

// removed counts a row less.
func (p *parking) removed(key string) {
	if k := p.keys[key]; k != nil {
		k.rows--
		p.drop(key)
	}
}
