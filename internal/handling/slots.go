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
	active atomic.Int64 // how many are in use, and do not wait for a connection
	free   func() int   // connections of the pool that nobody uses; nil if that does not matter
}

// NewSlots returns n slots.
func NewSlots(n int) *Slots { return &Slots{slots: make(chan struct{}, n)} }

// spareConns is the part of a pool's connections that transactions of consumers leave to
// their handlers and to everybody else.
const spareConns = 4

// SlotsOf returns the slots for transactions of consumers on a pool, which all of them
// share: if their transactions took all of its connections, and each handler waited for one
// more, none would go on. So a quarter of the connections is left, and at least one unless
// there is only one.
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

// pools has the slots of each pool that is in use.
var pools = struct {
	sync.Mutex
	slots map[weak.Pointer[pgxpool.Pool]]*Slots
}{slots: map[weak.Pointer[pgxpool.Pool]]*Slots{}}

func forget(key weak.Pointer[pgxpool.Pool]) {
	pools.Lock()
	defer pools.Unlock()
	delete(pools.slots, key)
}

// Take waits for a slot, and reports whether it has got one before ctx ended. While others
// than consumers use the pool as well, it waits until two connections are free, unless no
// other slot is in use.
func (s *Slots) Take(ctx context.Context) bool {
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
