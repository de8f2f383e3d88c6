package delivery

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"
)

// LaneKind is all lanes for handlers with a transaction, or all lanes for handlers without one.
type LaneKind struct {
	lanes     []*lane
	claimable []Claimable              // only the goroutine of the dispatcher
	handles   map[Pair]map[string]bool // by pair: the types of claimable
	maxBatch  int                      // deliveries in a batch: fewer where handlers are slow

	mu          sync.Mutex
	load        map[*lane]int  // batches of each lane, the one under way included
	slow        map[*lane]bool // lanes whose call takes longer than slowBatch
	perDelivery time.Duration  // moving average of how long a delivery takes
}

// newLaneKind returns a kind without lanes for the rows of pairs.
func newLaneKind(pairs []Claimable, maxBatch int) *LaneKind {
	k := &LaneKind{
		claimable: pairs, handles: map[Pair]map[string]bool{}, maxBatch: maxBatch, load: map[*lane]int{}, slow: map[*lane]bool{},
	}
	for _, p := range pairs {
		types := map[string]bool{}
		for _, t := range p.Types {
			types[t] = true
		}
		k.handles[p.Pair] = types
	}
	return k
}

// Handles reports whether the lanes handle rows of a pair that have an event type.
func (k *LaneKind) Handles(p Pair, eventType string) bool { return k.handles[p][eventType] }

// queueLength returns the number of batches for a lane, including its current batch.
func (k *LaneKind) queueLength() int {
	if k.maxBatch > 1 {
		return 2
	}
	return 1
}

// Room returns the number of batches that the lanes can take. It is zero while all lanes are busy and most
// have their next batch. A few large batches cost less than many small ones.
func (k *LaneKind) Room() (room int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	idle, quick := false, 0 // quick counts lanes
	for _, l := range k.lanes {
		if k.slow[l] {
			continue
		}
		quick++
		room += max(0, k.queueLength()-k.load[l])
		idle = idle || k.load[l] == 0
	}
	if !idle && 2*room < quick*k.queueLength() {
		return 0
	}
	return room
}

// Batches that take longer than slowBatch become smaller, so that other processes do not wait for rows that
// this process has claimed. Batches that take less than fastBatch become larger.
const (
	fastBatch = 500 * time.Millisecond
	slowBatch = 2 * time.Second
)

// undividedBatch is the time that deliveries must take together before they are divided among lanes. Below
// it, the additional transaction costs as much as it saves.
const undividedBatch = 20 * time.Millisecond

// batchSize returns the size of a batch if n deliveries wait.
func (k *LaneKind) batchSize(n int) int {
	room := max(k.Room(), 1)
	k.mu.Lock()
	defer k.mu.Unlock()
	size := (n + room - 1) / room
	if k.perDelivery > 0 {
		size = max(size, int(undividedBatch/k.perDelivery))
	}
	return min(size, k.maxBatch)
}

// noteHandled notes that a lane has handled a batch of n deliveries, and adapts maxBatch up to a limit.
func (k *LaneKind) noteHandled(l *lane, n int, took time.Duration, limit int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.load[l]--
	delete(k.slow, l)
	const weight = 8 // of earlier deliveries in the average
	k.perDelivery += (took/time.Duration(max(n, 1)) - k.perDelivery) / weight
	switch {
	case took > slowBatch && n > 1:
		k.maxBatch = max(1, min(k.maxBatch, n)/2)
	case took > slowBatch:
		k.maxBatch = 1
	case took < fastBatch && n >= k.maxBatch:
		k.maxBatch = min(2*k.maxBatch, limit)
	}
}

// enqueue gives a batch to the lane that has the fewest batches. Slow lanes get one only if all lanes are
// slow.
func (k *LaneKind) enqueue(batch []Delivery) {
	k.mu.Lock()
	l := slices.MinFunc(k.lanes, func(a, b *lane) int {
		if k.slow[a] != k.slow[b] {
			if k.slow[a] {
				return 1
			}
			return -1
		}
		return cmp.Compare(k.load[a], k.load[b])
	})
	k.load[l]++
	l.queue.add(batch)
	k.mu.Unlock()
}

// takeFromSlow marks lanes whose call takes longer than slowBatch as slow, and returns their
// waiting deliveries, so that other lanes or processes handle them. A slow lane gets no batch until
// its call has returned.
func (k *LaneKind) takeFromSlow() (waiting []Delivery) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lanes {
		call, ok := l.activity.Current()
		if !ok || time.Since(call.Began) < slowBatch {
			continue
		}
		k.slow[l] = true
		for _, batch := range l.queue.takeAll() {
			k.load[l]--
			waiting = append(waiting, batch...)
		}
	}
	return waiting
}

// slowLanes returns the lanes that are marked as slow.
func (k *LaneKind) slowLanes() []*lane {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.slow))
}

// Batch returns the largest number of deliveries in a batch.
func (k *LaneKind) Batch() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.maxBatch
}
