package handling

import "sync/atomic"

// Budget bounds the bytes of records in the queues of all partitions of a consumer. Half of the
// limit is for any partition. The other half is divided equally, so that partitions with slow
// handlers do not delay the others. For the same reason an empty partition may fetch above the
// limit.
type Budget struct {
	limit  int64
	used   atomic.Int64
	queues atomic.Int64
}

// NewBudget returns a budget of limit bytes.
func NewBudget(limit int) *Budget { return &Budget{limit: int64(limit)} }

// Open adds a partition.
func (b *Budget) Open() { b.queues.Add(1) }

// Close removes a partition, of whose queue dropped bytes are given back.
func (b *Budget) Close(dropped int) {
	b.queues.Add(-1)
	b.Add(-dropped)
}

// Add adds n bytes to the used ones. N may be negative.
func (b *Budget) Add(n int) { b.used.Add(int64(n)) }

// Used returns the bytes in all queues.
func (b *Budget) Used() int { return int(b.used.Load()) }

// IsFull reports whether a partition with own bytes must stop fetching. Above half of the limit, only partitions below
// their share are fetched.
func (b *Budget) IsFull(own int) bool {
	used := b.used.Load()
	return used > b.limit && own > 0 || used > b.limit/2 && int64(own) > b.share()
}

// IsOver reports whether more bytes are used than the limit.
func (b *Budget) IsOver() bool { return b.used.Load() > b.limit }

// HasRoom reports whether a partition with own bytes that has stopped fetching may fetch again.
func (b *Budget) HasRoom(own int) bool {
	used := b.used.Load()
	return own == 0 || used < b.limit/4 || used <= b.limit && int64(own) < b.share()/2
}

// Share returns the bytes that are reserved for each partition.
func (b *Budget) Share() int { return int(b.share()) }

func (b *Budget) share() int64 { return b.limit / 2 / max(1, b.queues.Load()) }

// Pieces decides how many bytes of a partition one fetch may bring: its share of a [Budget], but no less than the
// largest batch of records seen so far. If the next batches of several partitions are larger than that, Kafka sends
// only one of them in each fetch.
type Pieces struct {
	largest atomic.Int64
	applied int64 // the value of largest at the last call of Grew; used by its caller only
}

// Saw notes the size in bytes of a batch that was fetched.
func (p *Pieces) Saw(batch int) {
	const header, step = 61, 64 << 10 // in steps, so that slightly larger batches change nothing
	size := (int64(batch) + header + step - 1) / step * step
	for {
		largest := p.largest.Load()
		if size <= largest || p.largest.CompareAndSwap(largest, size) {
			return
		}
	}
}

// Grew reports whether a larger batch has come since the last call of Grew.
func (p *Pieces) Grew() bool {
	before := p.applied
	p.applied = p.largest.Load()
	return p.applied > before
}

// Size returns the bytes that a fetch may bring of a partition with this share.
func (p *Pieces) Size(share int) int {
	const least = 64 << 10
	return max(least, share, int(p.largest.Load()))
}
