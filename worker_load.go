package outbox

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/deliveries"
)

// laneKind is the lanes for handlers with a transaction, or for those without.
type laneKind struct {
	lanes []*lane
	pairs []deliveries.Pair
	most  int // deliveries in a batch: fewer where handlers are slow

	mu   sync.Mutex
	load map[*lane]int  // batches that it has
	slow map[*lane]bool // those that are at a single call for long
	each time.Duration  // that a delivery has taken lately
}

// queue returns how many batches a lane shall have, the one under way included.
func (k *laneKind) queue() int {
	if k.most > 1 {
		return 2
	}
	return 1
}

// room returns how many batches the lanes can take: none as long as all are at work and most have the
// next batch, because a few large batches cost less than many small ones.
func (k *laneKind) room() (room int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	idle, quick := false, 0 // lanes
	for _, l := range k.lanes {
		if k.slow[l] {
			continue
		}
		quick++
		room += max(0, k.queue()-k.load[l])
		idle = idle || k.load[l] == 0
	}
	if !idle && 2*room < quick*k.queue() {
		return 0
	}
	return room
}

// A batch should take no longer than slowBatch, so that other processes do not wait for what this
// one has; and one that takes less than fastBatch may be larger.
const (
	fastBatch = 500 * time.Millisecond
	slowBatch = 2 * time.Second
)

// undividedBatch is how long the deliveries of a batch shall take at least before they are divided among
// lanes: a transaction of their own costs about as much.
const undividedBatch = 20 * time.Millisecond

// size returns how many of n deliveries make a batch.
func (k *laneKind) size(n int) int {
	room := max(k.room(), 1)
	k.mu.Lock()
	defer k.mu.Unlock()
	size := (n + room - 1) / room
	if k.each > 0 {
		size = max(size, int(undividedBatch/k.each))
	}
	return min(size, k.most)
}

// freed notes that a lane has handled a batch.
func (k *laneKind) freed(l *lane, n int, took time.Duration, most int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.load[l]--
	delete(k.slow, l)
	const weight = 8 // of what was before
	k.each += (took/time.Duration(max(n, 1)) - k.each) / weight
	switch {
	case took > slowBatch && n > 1:
		k.most = max(1, min(k.most, n)/2)
	case took > slowBatch:
		k.most = 1
	case took < fastBatch && n >= k.most:
		k.most = min(2*k.most, most)
	}
}

// give gives a batch to the lane that has the fewest.
func (k *laneKind) give(batch []deliveries.Delivery) {
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
	l.in.add(batch)
	k.mu.Unlock()
}

// takeFromSlow takes what waits for lanes that are at a single call for longer than slowBatch, so that
// others handle it. These get nothing until the call has returned.
func (k *laneKind) takeFromSlow() (waiting []deliveries.Delivery) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lanes {
		call, ok := l.activity.Current()
		if !ok || time.Since(call.Began) < slowBatch {
			continue
		}
		k.slow[l] = true
		for _, batch := range l.in.takeAll() {
			k.load[l]--
			waiting = append(waiting, batch...)
		}
	}
	return waiting
}

// slowLanes returns those that are at a single call for longer than slowBatch.
func (k *laneKind) slowLanes() []*lane {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.slow))
}

// batch returns how many deliveries a batch has at most.
func (k *laneKind) batch() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.most
}
