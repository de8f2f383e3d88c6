package consumer

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/starts"
)

// partitionWorker handles the records of one partition in offset order. It takes them from a
// queue that the poll loop fills.
//
// Two contexts end the worker. When Kafka revokes the partition, finish cancels stopping: the
// worker completes the transaction in flight and begins no other. When the partition is lost, or
// completing takes too long, abandon cancels held: the transaction is rolled back.
type partitionWorker struct {
	partition kafka.Partition
	reader    *reader
	processor *handling.Processor // the reader's, with this worker's activity; only run
	group     partitionGroup
	cfg       *Rules
	outages   *outage.Logs
	log       *slog.Logger
	limits    limits
	parking   *consumerParking         // nil without PostgreSQL
	breakers  *handling.ActionBreakers // nil without PostgreSQL
	actions   []string                 // of the events of the topic
	attempts  *handling.Attempts
	activity  handling.Activity  // the call under way; written by the processor, read by any goroutine
	slow      handling.SlowCalls // only the goroutine of watchHandlers
	batch     int                // the most records of one transaction; only run
	slots     handling.HeldSlots // of the call under way
	missed    *missedEvents      // gap, while its records are being handled; only run
	ending    *endingError       // why the record being handled is not decoded, or nil; only run
	place     alonePlace         // of the suspect being handled

	rest           []recordItem // the record being finished and those behind it in its batch; only run
	lookedAt       time.Time    // when look has asked last; only run
	asked          askedKeys    // when the transaction under way began; only run
	blockedAtBegin []int        // those of its subjects that were blocked then; only run
	mostBlock      bool         // most of the tasks of the last batch were blocked; only run

	drainAfter time.Time    // before, the partition does not wait for parked events of a key; only run
	drainWait  waitingSince // for parked events of a key
	streamWait waitingSince // for the slot of streams

	stopping context.Context // cancelled by finish, with the cause handling.ErrStopped, and by abandon
	finish   func()
	held     context.Context // cancelled by abandon
	abandon  context.CancelFunc
	added    chan struct{} // signals new records in the queue; capacity 1
	room     chan struct{} // signals room in the queue; capacity 1
	ended    chan struct{} // closed when run has returned, or when cutOff stops waiting for run
	end      func()        // closes ended

	mu       sync.Mutex // guards the fields below: run takes records, the poll loop adds them and commits
	queue    []*kgo.Record
	bytes    int               // of the queued records and of those being handled
	closed   bool              // add drops records
	trials   []*handling.Trial // the trials that this worker holds
	paused   bool              // the client does not fetch the partition
	streamed bool              // a stream fetches the partition, and not the client
	blocked  *unreadableError  // the batch that cannot be read; nil for none
	unclean  uncleanEnds
	gap      *missedEvents    // nil for none; set by begin, its fields are only for run
	cut      *kgo.EpochOffset // where Kafka has lost records while the gap was open, as the client says; or nil
	anew     int64            // see writtenAnew; starts.None once the gaps of handlers that this member lacks begin there
	read     int64            // the offset after the last fetched record
	epoch    int32            // of the leader that had that record; -1 if it is not known
	next     kgo.EpochOffset  // the offset after the last handled record
	advanced bool             // next is not committed
	saved    int64            // the offset that Kafka has of the group; starts.None until reading begins
}

// partitionGroup is the part of a [membership] that a partitionWorker uses. Tests have a fake.
type partitionGroup interface {
	// topicID returns Kafka's id of a topic. It is zero until Kafka has said it.
	topicID(topic string) kafka.TopicID
	pauseFetching(kafka.Partition)
	resumeFetching(kafka.Partition)
	// requestCommit requests a commit of the offsets of all workers. It does not wait.
	requestCommit()
	// proveHeld commits the offset of a partition that is committed already, or at which a gap was cut. An error may
	// mean that another member has, or had, the partition.
	proveHeld(ctx context.Context, at kafka.Partition, committed kgo.EpochOffset) error
	// truncated notes that Kafka has lost records.
	truncated(loss *kgo.ErrDataLoss)
	// suspect notes that a record is to be handled alone, or with [starts.None] that none is any more. It returns how
	// often processes have ended since the record was noted first. Stopped takes the note back.
	suspect(ctx context.Context, at kafka.Partition, offset int64, stopped bool) (ends int, err error)
	// openGaps notes that handlers which this member lacks miss the records of a partition from an offset on.
	openGaps(ctx context.Context, at kafka.Partition, from int64) error
	// passGaps notes that the gaps of a partition are read up to From of each. They are read to their end at until.
	passGaps(ctx context.Context, gaps []starts.Gap, until int64) error
	// checkReplays returns an answer for each record: without an error if it was replayed from a dead-letter topic,
	// and [deadletter.ErrNoReplay] if its headers are forged. The error is Kafka's.
	checkReplays(context.Context, []*kgo.Record) ([]deadletter.Answer, error)
	// produce sends a dead letter and waits until Kafka has acknowledged it.
	produce(context.Context, *kgo.Record) error
}

// limits are the bounds, pauses and parking that all workers of a consumer share.
type limits struct {
	budget  *handling.Budget
	slots   handling.CallSlots
	pauses  *pauses.Set      // topics that are paused
	parking *consumerParking // nil without PostgreSQL
	alone   chan struct{}    // has the place of the record that is handled alone, see alonePlace
}

func newPartitionWorker(partition kafka.Partition, r *reader, group partitionGroup, cfg *Rules, limits limits, outages *outage.Logs) *partitionWorker {
	limits.budget.Open()
	w := &partitionWorker{
		partition: partition, reader: r, group: group, cfg: cfg, limits: limits, parking: limits.parking, outages: outages, log: r.processor.Log, batch: cfg.MaxPoll,
		added: make(chan struct{}, 1), room: make(chan struct{}, 1), ended: make(chan struct{}), anew: starts.None, read: starts.None, saved: starts.None,
	}
	w.end = sync.OnceFunc(func() {
		w.close()
		close(w.ended)
	})
	w.processor = r.processor.ForOne(&w.activity)
	if w.parking != nil {
		w.processor.Queue, w.processor.Begin, w.processor.Complete = w.queueBlocked, w.checkInTx, w.recheckInTx
		w.processor.PassFailed = true
		w.breakers = w.parking.breakers
		w.actions = r.processor.Routes.ActionsOf(partition.Topic)
	}
	w.attempts = &handling.Attempts{Processor: w.processor, Breakers: w.breakers, Scheduler: partitionScheduler{w}, Bound: cfg.MaxPollInterval}
	if w.parking != nil {
		w.attempts.Witness = w.parking.store.Witness
	}
	w.held, w.abandon = context.WithCancel(context.Background())
	var finish context.CancelCauseFunc
	w.stopping, finish = context.WithCancelCause(w.held)
	w.finish = func() { finish(handling.ErrStopped) }
	return w
}

// run handles records until finish or abandon is called. It is the worker's goroutine.
func (w *partitionWorker) run() {
	defer w.end()
	defer w.saveUnread()
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
		if w.openGaps() {
			if others := w.handleSuspects(records); len(others) > 0 {
				w.handle(w.handleMissed(others))
			}
		}
		w.commitFirst()
		w.drop(size)
	}
}

// hasDied reports whether run has ended although the worker was not stopped: something has ended its goroutine.
func (w *partitionWorker) hasDied() bool {
	select {
	case <-w.ended:
		return w.stopping.Err() == nil
	default:
		return false
	}
}

// advance notes that all records up to last are handled, and requests a commit.
func (w *partitionWorker) advance(last *kgo.Record) {
	if w.missed != nil {
		w.missed.next = last.Offset + 1
		return
	}
	w.mu.Lock()
	w.next, w.advanced = kgo.EpochOffset{Epoch: last.LeaderEpoch, Offset: last.Offset + 1}, true
	w.mu.Unlock()
	w.group.requestCommit()
}

// uncommitted returns the offset to commit. It returns false if that offset is committed already.
func (w *partitionWorker) uncommitted() (kgo.EpochOffset, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.next, w.advanced
}

// committed notes that Kafka has the offset next.
func (w *partitionWorker) committed(next kgo.EpochOffset) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.advanced, w.saved = w.next != next, next.Offset
}

// committedOffset returns the offset that Kafka has of the group, starts.None until reading begins.
func (w *partitionWorker) committedOffset() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.saved
}
