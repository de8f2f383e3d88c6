package handling

import "sync/atomic"

// Budget bounds the bytes of the records that wait or are handled, over all partitions of
// a consumer. Half of it is for whoever needs it; the other half is shared out equally, so
// that partitions whose handlers wait for something do not hold up the others. For the same
// reason a partition that has nothing gets something, also if there is too much already.
type Budget struct {
	most   int64
	used   atomic.Int64
	queues atomic.Int64
}

// NewBudget returns a budget of so many bytes.
func NewBudget(most int) *Budget { return &Budget{most: int64(most)} }

// Open counts another partition.
func (b *Budget) Open() { b.queues.Add(1) }

// Close counts one partition less, of which so many bytes are dropped.
func (b *Budget) Close(dropped int) {
	b.queues.Add(-1)
	b.Add(-dropped)
}

// Add notes that a partition has got n bytes more, or less.
func (b *Budget) Add(n int) { b.used.Add(int64(n)) }

// Used returns how many bytes there are.
func (b *Budget) Used() int { return int(b.used.Load()) }

// IsFull reports whether a partition that has so many bytes is to get no more.
func (b *Budget) IsFull(own int) bool {
	used := b.used.Load()
	return used > b.most && own > 0 || used > b.most/2 && int64(own) > b.share()
}

// IsOver reports whether there is more than there should be.
func (b *Budget) IsOver() bool { return b.used.Load() > b.most }

// HasRoom reports whether a partition that has so many bytes, and gets no more, is to get
// more again.
func (b *Budget) HasRoom(own int) bool {
	used := b.used.Load()
	return own == 0 || used < b.most/4 || used <= b.most && int64(own) < b.share()/2
}

// Share returns how many bytes each partition has for itself.
func (b *Budget) Share() int { return int(b.share()) }

func (b *Budget) share() int64 { return b.most / 2 / max(1, b.queues.Load()) }

// Pieces says how much of a partition a fetch brings at most: its share of a [Budget], but
// no less than the largest batch of records that there was. Of all partitions whose next
// batch is larger than what they may bring, Kafka sends that of one only in each fetch.
type Pieces struct {
	largest atomic.Int64
	applied int64 // only what calls Grew
}

// Saw notes the size of a batch that was fetched, in bytes.
func (p *Pieces) Saw(batch int) {
	const header, step = 61, 64 << 10 // in steps, or batches that are ever so slightly larger would be late
	size := (int64(batch) + header + step - 1) / step * step
	for {
		largest := p.largest.Load()
		if size <= largest || p.largest.CompareAndSwap(largest, size) {
			return
		}
	}
}

// Grew reports whether there was a larger batch since it was called last.
func (p *Pieces) Grew() bool {
	before := p.applied
	p.applied = p.largest.Load()
	return p.applied > before
}

// Size returns the bytes that a fetch may bring of a partition with such a share.
func (p *Pieces) Size(share int) int {
	const least = 64 << 10
	return max(least, share, int(p.largest.Load()))
}
