package consumer

import (
	"context"
	"log/slog"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/starts"
)

// partitionWorker handles the records of a partition in their order. It takes them from a
// queue that the poll loop fills.
//
// When the partition is to be given to another member, finish ends the worker: it
// finishes the transaction in flight and begins no other. When the partition is lost
// already, or finishing takes too long, abandon rolls the transaction back.
type partitionWorker struct {
	partition kafka.Partition
	reader    *reader
	processor *handling.Processor // of the reader, for run
	group     partitionGroup
	cfg       *Rules
	outages   *outage.Logs
	log       *slog.Logger
	limits    limits
	parking   *consumerParking         // nil without PostgreSQL
	breakers  *handling.ActionBreakers // nil without PostgreSQL
	attempts  *handling.Attempts
	activity  handling.Activity  // what run does; the processor notes it
	slow      handling.SlowCalls // only the goroutine that watches handlers
	batch     int                // how many records are tried in one transaction; only run
	trials    []string           // actions whose breakers permit to try the record under way, and nothing else; only run

	stopping context.Context // ended by finish
	finish   context.CancelFunc
	held     context.Context // ended by abandon
	abandon  context.CancelFunc
	added    chan struct{} // holds at most one request to look at the queue
	ended    chan struct{} // closed when run has returned, or is not waited for any more
	end      func()        // closes ended

	mu       sync.Mutex // run takes from the queue, the poll loop adds and commits
	queue    []*kgo.Record
	bytes    int               // of the queue, and of what is handled
	closed   bool              // no queue any more
	taken    []*handling.Slots // of limits
	paused   bool
	blocked  *kgo.ErrDecompressTooLarge // the batch at which fetching has ended
	read     int64                      // offset behind what was fetched
	next     kgo.EpochOffset            // behind what is handled
	advanced bool                       // next is not committed
}

// partitionGroup is what a partitionWorker needs of the group: a [membership], or a fake.
type partitionGroup interface {
	// topicID returns Kafka's id of a topic, zero if it is not known.
	topicID(topic string) kafka.TopicID
	pauseFetching(kafka.Partition)
	resumeFetching(kafka.Partition)
	// requestCommit asks for the offsets of the workers to be committed.
	requestCommit()
	// checkReplay returns nil if a record was sent back from a dead-letter topic,
	// [deadletter.ErrNoReplay] if it was not, and otherwise why nobody knows.
	checkReplay(context.Context, *kgo.Record) error
	// produce sends a dead letter and waits for the answer.
	produce(context.Context, *kgo.Record) error
}

// limits are what the workers of a consumer share.
type limits struct {
	budget  *handling.Budget
	slots   handling.CallSlots
	pauses  *pauses.Set      // topics of which nothing is handled
	parking *consumerParking // nil without PostgreSQL
}

func newPartitionWorker(partition kafka.Partition, r *reader, group partitionGroup, cfg *Rules, limits limits, outages *outage.Logs) *partitionWorker {
	limits.budget.Open()
	w := &partitionWorker{
		partition: partition, reader: r, group: group, cfg: cfg, limits: limits, parking: limits.parking, outages: outages, log: r.processor.Log, batch: cfg.MaxPoll,
		added: make(chan struct{}, 1), ended: make(chan struct{}), read: starts.None,
	}
	w.end = sync.OnceFunc(func() {
		w.close()
		close(w.ended)
	})
	w.processor = r.processor.ForOne(&w.activity)
	if w.parking != nil {
		w.processor.Complete, w.breakers = w.lookAgain, w.parking.breakers
	}
	w.attempts = &handling.Attempts{Processor: w.processor, Breakers: w.breakers, Scheduler: partitionScheduler{w}, Bound: cfg.MaxPollInterval}
	w.held, w.abandon = context.WithCancel(context.Background())
	w.stopping, w.finish = context.WithCancel(w.held)
	return w
}

// takeSlots waits until a handler may be called, with a transaction or without one, and
// reports whether that was before the worker is to end.
func (w *partitionWorker) takeSlots(tx bool) bool {
	if !w.takeSlot(w.limits.slots.Calls) {
		return false
	}
	if tx && !w.takeSlot(w.limits.slots.Transactions) {
		w.releaseSlots()
		return false
	}
	return true
}

func (w *partitionWorker) takeSlot(of *handling.Slots) bool {
	if of == nil {
		return true
	}
	if !of.Take(w.stopping) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.taken = append(w.taken, of)
	return true
}

// releaseSlots gives back what was taken.
func (w *partitionWorker) releaseSlots() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, of := range w.taken {
		of.Release()
	}
	w.taken = w.taken[:0]
}

// run handles records until finish or abandon is called.
func (w *partitionWorker) run() {
	defer w.end()
	for w.awaitResume() {
		records := w.take()
		if len(records) == 0 {
			select {
			case <-w.added:
			case <-w.stopping.Done():
			}
			continue
		}
		size := sizeOf(records)
		w.handle(records)
		w.drop(size)
	}
}

// advance notes that everything up to a record is handled.
func (w *partitionWorker) advance(last *kgo.Record) {
	w.mu.Lock()
	w.next, w.advanced = kgo.EpochOffset{Epoch: last.LeaderEpoch, Offset: last.Offset + 1}, true
	w.mu.Unlock()
	w.group.requestCommit()
}

// uncommitted returns how far the worker has come, if Kafka does not know yet.
func (w *partitionWorker) uncommitted() (kgo.EpochOffset, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.next, w.advanced
}

// committed notes what Kafka knows.
func (w *partitionWorker) committed(next kgo.EpochOffset) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.advanced = w.next != next
}
