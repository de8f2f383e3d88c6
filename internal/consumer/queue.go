package consumer

import (
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// A partition is paused when its queue holds more than this, and resumed at half of it, see
// fetchMaxWait. [handling.Budget] bounds the queues of all partitions together.
const (
	queueRecords = 20_000
	queueBytes   = 16 << 20
)

// begin notes the offset at which reading begins, which is committed. Before that offset, only the gaps are read.
func (w *partitionWorker) begin(b starts.Beginning) {
	at, gaps := b.EpochOffset, b.Gaps
	w.beginUnclean(b.Assignment)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.read, w.epoch, w.saved = at.Offset, -1, at.Offset
	if len(gaps) == 0 {
		return
	}
	for _, g := range gaps {
		w.read = min(w.read, g.From)
	}
	w.gap = &missedEvents{gaps: gaps, until: at, next: w.read, saved: w.read, savedAt: time.Now()}
	w.log.Info("outbox: handlers have missed events of a partition, which waits until they have handled them",
		"partition", w.partition.Name(), "from", w.read, "until", at.Offset, "action", gaps[0].Action, "handlers", len(gaps))
}

// hasBegun reports whether the offset at which reading begins is known.
func (w *partitionWorker) hasBegun() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.read != starts.None
}

// fetched notes fetched records, control records included. It returns how many offsets before
// them Kafka has removed unread, and the first of these.
func (w *partitionWorker) fetched(p kgo.FetchPartition) (from, lost int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	from = w.read
	last := p.Records[len(p.Records)-1]
	w.read, w.epoch = last.Offset+1, last.LeaderEpoch
	if from == starts.None {
		return from, 0
	}
	return from, max(0, p.LogStartOffset-from)
}

// truncated notes that Kafka has lost records, and where the client goes on.
func (w *partitionWorker) truncated(loss *kgo.ErrDataLoss) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.read != starts.None {
		w.read, w.epoch = loss.ResetTo, loss.ResetToEpoch
	}
	w.writtenAnew(loss.ResetTo)
	if w.gap != nil && (w.cut == nil || loss.ResetTo < w.cut.Offset) {
		w.cut = &kgo.EpochOffset{Epoch: loss.ResetToEpoch, Offset: loss.ResetTo}
	}
}

// block notes a batch that cannot be read. Fetching of the partition has ended.
func (w *partitionWorker) block(batch *unreadableError) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.blocked = batch
}

// blockedBy returns the batch that cannot be read, or nil.
func (w *partitionWorker) blockedBy() *unreadableError {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.blocked
}

// resume resumes the client's fetching, unless the queue is full or a stream reads the partition.
func (w *partitionWorker) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed && !w.paused && !w.streamed {
		w.group.resumeFetching(w.partition)
	}
}

// isPaused reports whether fetching is paused because the queue is full.
func (w *partitionWorker) isPaused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.paused
}

// add appends records to the queue, and pauses fetching when the queue is full.
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

// pauseIfFull pauses fetching if the queue is full. The caller holds mu.
func (w *partitionWorker) pauseIfFull() {
	if !w.paused && (len(w.queue) > queueRecords || w.bytes > queueBytes || w.limits.budget.IsFull(w.bytes)) {
		w.paused = true
		w.group.pauseFetching(w.partition)
	}
}

// recheckQueue pauses fetching if other partitions have used up the common budget.
func (w *partitionWorker) recheckQueue() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.pauseIfFull()
	}
}

// sizeOf estimates the memory of records, in bytes.
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

// take removes the next records from the queue. Their bytes count until drop is called.
func (w *partitionWorker) take() []*kgo.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(w.queue), w.cfg.MaxPoll)
	records := slices.Clone(w.queue[:n])
	clear(w.queue[:n]) // the array keeps no handled record in memory
	w.queue = w.queue[n:]
	return records
}

// drop notes that records of this size are handled, and resumes fetching when the queue is half
// empty.
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
		wait.Signal(w.room)
		if !w.streamed {
			w.group.resumeFetching(w.partition)
		}
	}
}

// close drops the queue. Records that are added later are dropped too.
func (w *partitionWorker) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limits.budget.Close(w.bytes)
	w.queue, w.bytes, w.closed = nil, 0, true
}
