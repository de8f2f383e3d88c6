package delivery

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
)

// LaneKind is all lanes for handlers with a transaction, or all lanes for handlers without one.
type LaneKind struct {
	lanes     []*lane
	claimable []Claimable              // only the goroutine of the dispatcher
	handles   map[Pair]map[string]bool // by pair: the types of claimable
	actions   int                      // how many claimable has
	quickTurn bool                     // see takeTurn; only the goroutine of the dispatcher
	freshAt   time.Time                // when fresh suspects are looked for again; only the goroutine of the dispatcher
	maxBatch  int                      // deliveries in a batch: fewer where handlers are slow

	// usual is how many lanes get batches at the same time. The other lanes are spare: each replaces one whose call
	// takes longer than spareAfter.
	usual      int
	spareAfter time.Duration

	mu          sync.Mutex
	load        map[*lane]int            // batches of each lane, the one under way included
	with        map[*lane][]string       // the actions of the batches of each lane, the one under way first
	slow        map[*lane]bool           // lanes whose call takes longer than slowBatch or spareAfter
	replaced    map[*lane]bool           // slow lanes whose call takes longer than spareAfter
	perDelivery time.Duration            // moving average of how long a delivery takes
	pace        map[string]time.Duration // the same of each action that has been slow, by its calls
	atShare     map[string]bool          // slow actions that have their shares of the lanes: whether others had due rows then
}

// newLaneKind returns a kind without lanes for the rows of pairs.
func newLaneKind(pairs []Claimable, maxBatch int, rules *Rules) *LaneKind {
	own := slices.Clone(pairs) // claims change their order, and that of their types
	for i := range own {
		own[i].Types = slices.Clone(own[i].Types)
	}
	k := &LaneKind{
		claimable: own, handles: map[Pair]map[string]bool{}, maxBatch: maxBatch, usual: rules.Concurrency, spareAfter: rules.SpareAfter,
		load: map[*lane]int{}, with: map[*lane][]string{}, slow: map[*lane]bool{}, replaced: map[*lane]bool{}, pace: map[string]time.Duration{},
		atShare: map[string]bool{},
	}
	actions := map[string]bool{}
	for _, p := range pairs {
		if p.Action != "" {
			actions[p.Action] = true
		}
		types := map[string]bool{}
		for _, t := range p.Types {
			types[t] = true
		}
		k.handles[p.Pair] = types
	}
	k.actions = len(actions)
	return k
}

// Handles reports whether the lanes handle rows of a pair that have an event type.
func (k *LaneKind) Handles(p Pair, eventType string) bool { return k.handles[p][eventType] }

// queueLength returns the number of batches for a lane, including its current batch. A lane whose batches take long
// needs no next batch in advance: another process may have a free lane for it.
func (k *LaneKind) queueLength() int {
	if k.maxBatch > 1 && k.isFast() {
		return 2
	}
	return 1
}

// isFast reports whether the largest batch takes less than fastBatch. The caller holds mu.
func (k *LaneKind) isFast() bool { return time.Duration(k.maxBatch)*k.perDelivery < fastBatch }

// firstBatch is the size of batches until it is known how long a delivery takes.
const firstBatch = 4

// Room returns the number of batches that the lanes can take. It is zero while all lanes are busy and most
// have their next batch. A few large batches cost less than many small ones.
func (k *LaneKind) Room() (room int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	idle, usable := false, k.usable()
	for _, l := range usable {
		room += max(0, k.queueLength()-k.load[l])
		idle = idle || k.load[l] == 0
	}
	if !idle && 2*room < len(usable)*k.queueLength() {
		return 0
	}
	return room
}

// usable returns the lanes that may get a batch: as many as usual, except for slow ones that are not replaced. The
// caller holds mu.
func (k *LaneKind) usable() (lanes []*lane) {
	most := k.usual - (len(k.slow) - len(k.replaced))
	for _, l := range k.lanes {
		if !k.slow[l] && len(lanes) < most {
			lanes = append(lanes, l)
		}
	}
	return lanes
}

// noteCall notes how long a call of a lane has taken, if it was a call of a handler.
func (k *LaneKind) noteCall(c handling.Call, took time.Duration) {
	if c.Function != "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.notePace(c.Action, took/time.Duration(max(c.Events, 1)))
}

// notePace notes how long a delivery of an action has taken, or is taking. The caller holds mu.
func (k *LaneKind) notePace(action string, took time.Duration) {
	const weight = 4 // of earlier deliveries in the average
	switch before, known := k.pace[action]; {
	case known:
		k.pace[action] += (took - before) / weight
	case took > slowAction:
		k.pace[action] = took
	}
}

// Batches that take longer than slowBatch become smaller, so that other processes do not wait for rows that
// this process has claimed. Batches that take less than fastBatch become larger.
const (
	fastBatch = 500 * time.Millisecond
	slowBatch = 2 * time.Second
)

// undividedBatch is the time that deliveries must take together before they are divided among lanes. Below
// it, the additional transaction costs as much as it saves. Between 20 and 40 ms, batches became a third larger and
// workers a tenth faster (scenario bus of bench).
const undividedBatch = 40 * time.Millisecond

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

// noteHandled notes that a lane has handled n deliveries of a batch, and adapts maxBatch up to a limit. If it has
// released the others, noteHandled returns the deliveries that wait for the lane, to be released as well.
func (k *LaneKind) noteHandled(l *lane, n, of int, took time.Duration, limit int) (waiting []Delivery) {
	k.mu.Lock()
	defer k.mu.Unlock()
	slow := k.slow[l]
	k.load[l]--
	if len(k.with[l]) > 0 {
		k.with[l] = k.with[l][1:]
	}
	if n < of && took >= handling.TransactionTime {
		for _, batch := range l.queue.takeAll() {
			k.load[l]--
			waiting = append(waiting, batch...)
		}
		k.with[l] = nil
	}
	if k.load[l] == 0 {
		delete(k.with, l)
	}
	delete(k.slow, l)
	delete(k.replaced, l)
	if n > 0 { // otherwise the time says nothing about a delivery
		k.noteDelivery(took / time.Duration(n))
	}
	switch {
	case n < of && (slow || took >= handling.TransactionTime):
		k.maxBatch = max(1, min(k.maxBatch, n))
	case took > slowBatch && n > 1:
		k.maxBatch = max(1, min(k.maxBatch, n)/2)
	case took > slowBatch:
		k.maxBatch = 1
	case 2*n >= k.maxBatch && took < fastBatch && k.isFast() && !slow: // few batches are full while there are few deliveries
		k.maxBatch = min(2*k.maxBatch, limit)
	}
	return waiting
}

// noteDelivery notes how long a delivery of a batch has taken. The caller holds mu.
func (k *LaneKind) noteDelivery(took time.Duration) {
	const weight = 8 // of earlier deliveries in the average
	if k.perDelivery == 0 {
		k.perDelivery = took
	} else {
		k.perDelivery += (took - k.perDelivery) / weight
	}
}

// enqueue gives a batch to the lane that has the fewest batches. Slow lanes get one only if all lanes are
// slow.
func (k *LaneKind) enqueue(batch []Delivery) {
	k.mu.Lock()
	lanes := k.usable()
	if len(lanes) == 0 {
		lanes = k.lanes[:k.usual]
	}
	l := slices.MinFunc(lanes, func(a, b *lane) int { return cmp.Compare(k.load[a], k.load[b]) })
	k.load[l]++
	k.with[l] = append(k.with[l], batch[0].Action)
	l.queue.add(batch)
	k.mu.Unlock()
}

// takeFromSlow marks lanes whose call, or whose read of a payload, takes longer than slowBatch as slow, and returns
// their waiting deliveries, so that other lanes or processes handle them. A slow lane gets no batch until its call has
// returned. If the call takes longer than spareAfter, a spare lane replaces it, and takeFromSlow returns true.
func (k *LaneKind) takeFromSlow() (waiting []Delivery, replaced bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lanes {
		call, calls := l.activity.Current()
		ok := calls
		if !calls {
			call, ok = l.reading.Current()
		}
		running := time.Since(call.Began)
		replace := ok && k.spareAfter > 0 && running >= k.spareAfter
		if !ok || running < slowBatch && !replace {
			continue
		}
		if calls && !k.slow[l] {
			k.notePace(call.Action, running/time.Duration(max(call.Events, 1)))
		}
		k.slow[l] = true
		if replace && !k.replaced[l] {
			k.replaced[l], replaced = true, true
		}
		for _, batch := range l.queue.takeAll() {
			k.load[l]--
			waiting = append(waiting, batch...)
		}
		k.with[l] = []string{call.Action}
	}
	return waiting, replaced
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
