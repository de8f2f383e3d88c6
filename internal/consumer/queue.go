package consumer

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// What a queue may hold before its partition is paused, see also [handling.Budget]. It
// is resumed when half of it is left, see fetchMaxWait.
const (
	queueRecords = 20_000
	queueBytes   = 16 << 20
)

// begin notes the offset with which reading begins.
func (w *partitionWorker) begin(at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.read = at
}

// hasBegun reports whether it is known where reading begins.
func (w *partitionWorker) hasBegun() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.read != starts.None
}

// fetched notes what was fetched, control records included. It returns how many offsets
// before it Kafka had removed, and the first of them.
func (w *partitionWorker) fetched(p kgo.FetchPartition) (from, lost int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	from = w.read
	w.read = p.Records[len(p.Records)-1].Offset + 1
	if from == starts.None {
		return from, 0
	}
	return from, max(0, p.LogStartOffset-from)
}

// block notes a batch that the client cannot fetch.
func (w *partitionWorker) block(large *kgo.ErrDecompressTooLarge) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.blocked = large
}

// blockedBy returns the batch that the client cannot fetch, or nil.
func (w *partitionWorker) blockedBy() *kgo.ErrDecompressTooLarge {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.blocked
}

// isPaused reports whether the queue is full.
func (w *partitionWorker) isPaused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.paused
}

// add puts records into the queue, and pauses the partition when it is full.
func (w *partitionWorker) add(records []*kgo.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	size := sizeOf(records)
	w.bytes += size
	w.limits.budget.Add(size)
	w.queue = append(w.queue, records...)
	wait.Signal(w.added)
	w.pauseIfFull()
}

// pauseIfFull pauses the partition if its queue is full. The caller holds mu.
func (w *partitionWorker) pauseIfFull() {
	if !w.paused && (len(w.queue) > queueRecords || w.bytes > queueBytes || w.limits.budget.IsFull(w.bytes)) {
		w.paused = true
		w.group.pauseFetching(w.partition)
	}
}

// recheckQueue pauses the partition if others have used up what there is for all.
func (w *partitionWorker) recheckQueue() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.pauseIfFull()
	}
}

// sizeOf returns what records need in memory, about.
func sizeOf(records []*kgo.Record) (bytes int) {
	const record, header = 200, 40
	for _, r := range records {
		bytes += record + len(r.Key) + len(r.Value)
		for _, h := range r.Headers {
			bytes += header + len(h.Key) + len(h.Value)
		}
	}
	return bytes
}

// take removes the next records from the queue. Their bytes count until they are handled.
func (w *partitionWorker) take() []*kgo.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(w.queue), w.cfg.MaxPoll)
	records := slices.Clone(w.queue[:n])
	clear(w.queue[:n]) // or they would stay in memory until the queue grows
	w.queue = w.queue[n:]
	return records
}

// drop notes that records of this size are handled, and resumes the partition when its
// queue is half empty.
func (w *partitionWorker) drop(size int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	w.bytes -= size
	w.limits.budget.Add(-size)
	if w.paused && len(w.queue) < queueRecords/2 && w.bytes < queueBytes/2 && w.limits.budget.HasRoom(w.bytes) {
		w.paused = false
		w.group.resumeFetching(w.partition)
	}
}

// close drops the queue.
func (w *partitionWorker) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limits.budget.Close(w.bytes)
	w.queue, w.bytes, w.closed = nil, 0, true
}
