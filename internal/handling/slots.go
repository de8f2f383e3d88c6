package handling

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Slots bound how many handlers run at the same time.
type Slots struct {
	slots  chan struct{}
	active atomic.Int64 // slots in use whose holders do not wait for a connection
	free   func() int   // unused connections of the pool; nil without a pool
}

// NewSlots returns n slots.
func NewSlots(n int) *Slots { return &Slots{slots: make(chan struct{}, n)} }

// spareConns is the part of a pool's connections, one in so many, that transactions of handlers leave for other uses.
const spareConns = 4

// SlotsOf returns the slots for transactions of handlers on a pool. All consumers and workers on the pool share them.
// If their transactions took all connections, and each handler waited for one more, none could go on. So the slots
// leave a quarter of the connections, and at least one unless there is only one.
func SlotsOf(db *pgxpool.Pool) *Slots {
	pools.Lock()
	defer pools.Unlock()
	key := weak.Make(db)
	if s, ok := pools.slots[key]; ok {
		return s
	}
	most := int(db.Config().MaxConns)
	s := NewSlots(max(1, most-max(1, most/spareConns)))
	s.free = func() int {
		db := key.Value()
		if db == nil {
			return most
		}
		return most - int(db.Stat().AcquiredConns())
	}
	pools.slots[key] = s
	runtime.AddCleanup(db, forget, key)
	return s
}

// pools are the slots of each pool in use.
var pools = struct {
	sync.Mutex
	slots map[weak.Pointer[pgxpool.Pool]]*Slots
}{slots: map[weak.Pointer[pgxpool.Pool]]*Slots{}}

func forget(key weak.Pointer[pgxpool.Pool]) {
	pools.Lock()
	defer pools.Unlock()
	delete(pools.slots, key)
}

// Take waits for a slot. It returns false if ctx ends first, or has ended. Other users of the pool may hold its
// connections, so Take also waits until two connections are free, unless no other slot is in use.
func (s *Slots) Take(ctx context.Context) bool {
	if ctx.Err() != nil {
		return false
	}
	select {
	case s.slots <- struct{}{}:
	default:
		select {
		case s.slots <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
	for s.active.Add(1) > 1 && s.free != nil && s.free() < 2 {
		s.active.Add(-1)
		const pause = 5 * time.Millisecond
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			<-s.slots
			return false
		}
	}
	return true
}

// Release gives a slot back.
func (s *Slots) Release() {
	s.active.Add(-1)
	<-s.slots
}

// HeldSlots are the slots that one caller holds for the call of a handler. The caller releases them when the call has
// returned. Another goroutine releases them when the call is given up, because the handler does not return.
type HeldSlots struct {
	mu   sync.Mutex
	of   CallSlots
	tx   bool
	held bool
	call int // number of calls so far
}

// Take waits for the slots of the next call, with a transaction or without one. It returns false if ctx ends first.
func (h *HeldSlots) Take(ctx context.Context, of CallSlots, tx bool) bool {
	if !of.Take(ctx, tx) {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.of, h.tx, h.held, h.call = of, tx, true, h.call+1
	return true
}

// Call returns the number of the last call that slots were taken for, for GiveUp.
func (h *HeldSlots) Call() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.call
}

// Release gives the slots back, unless they were given back already.
func (h *HeldSlots) Release() { h.GiveUp(h.Call()) }

// GiveUp gives back the slots of a call, unless they were given back already.
func (h *HeldSlots) GiveUp(call int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held && h.call == call {
		h.held = false
		h.of.Release(h.tx)
	}
}
