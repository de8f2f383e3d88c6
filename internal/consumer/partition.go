package consumer

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
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

// What a queue may hold before its partition is paused, see also [handling.Budget]. It
// is resumed when half of it is left, see fetchMaxWait.
const (
	queueRecords = 20_000
	queueBytes   = 16 << 20
)

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

// handle handles records, unless the worker is to end before.
func (w *partitionWorker) handle(records []*kgo.Record) {
	items := w.readAll(records)
	for len(items) > 0 && w.stopping.Err() == nil {
		batch := items[:min(len(items), w.batch)]
		if w.requeueReplays(batch) != nil || w.findBlocked(batch) != nil || w.parkBlocked(batch) != nil {
			return
		}
		batch, trials := w.awaitBreakers(batch)
		w.trials = slices.Clone(trials)
		if len(batch) == 0 {
			return
		}
		began := time.Now()
		n, committed, failed := w.tryBatch(batch)
		// All of them, and at once: soon their keys may be free, and what is behind them would be handled before they are.
		if w.parkBlocked(batch) != nil {
			return
		}
		for i := range items[:n] {
			if err := w.finishRecord(&items[i], items[i+1:], committed, failed); err != nil {
				return
			}
			w.advance(items[i].record)
		}
		w.forgetTrials(trials)
		if n == len(batch) && len(trials) == 0 {
			w.resizeBatch(n, n, time.Since(began))
		}
		items = items[n:]
	}
}

// resizeBatch adapts how many records are tried together to how many are done in
// TransactionTime. The notes of the others would be made and taken back again and again.
func (w *partitionWorker) resizeBatch(done, tried int, took time.Duration) {
	switch {
	case done < tried:
		w.batch = done
	case took < handling.TransactionTime:
		w.batch = min(2*w.batch, w.cfg.MaxPoll)
	}
}

// readAll decodes records, or none if the worker is to end. Codecs may do I/O, so each
// record has as long as a handler.
func (w *partitionWorker) readAll(records []*kgo.Record) []recordItem {
	items, origins := make([]recordItem, len(records)), make([]envelope.Origin, len(records))
	id := w.group.topicID(w.partition.Topic)
	for i, r := range records {
		origins[i] = originOf(r, id)
		items[i].record, items[i].replay = w.admit(r)
	}
	for next := 0; next < len(records); {
		if next = w.readFrom(next, items, origins); w.stopping.Err() != nil {
			return nil
		}
	}
	return items
}

// readFrom decodes records from first on until the time for one of them is up, which
// mostly is enough for all. It returns the index of the record to go on with.
//
// Decoders are the host's, and may end their goroutine.
func (w *partitionWorker) readFrom(first int, items []recordItem, origins []envelope.Origin) (next int) {
	ctx, cancel := context.WithTimeout(w.held, w.cfg.HandlerTimeout)
	defer cancel()
	next = first
	w.activity.Begin(handling.Call{Context: ctx, Function: "decoder, codec or upcaster", Place: handling.PlaceOf(&origins[first])})
	defer w.activity.End()
	err := contain.Do(func() error {
		for ; next < len(items) && w.stopping.Err() == nil; next++ {
			it := &items[next]
			w.activity.Next(handling.PlaceOf(&origins[next]))
			*it = w.reader.read(ctx, it.record, it.replay, &origins[next])
			if ctx.Err() == nil || w.held.Err() != nil {
				continue
			}
			if it.Err == nil || next == first {
				next++
			} // else once more: the records before may have used up the time
			return nil
		}
		return nil
	})
	if err != nil { // ErrGoexit
		it := newRecordItem(items[next].record, items[next].replay, &origins[next])
		it.Class, it.Err = handling.ClassUndecodable, err
		items[next] = it
		next++
	}
	return next
}

// tryBatch runs the tasks with a transaction, in one for all. It returns how many items
// are done but for their other tasks; or how many need a transaction of their own for each task, and false, with the error
// of the one that has failed, if that is certain. If a handler fails, it runs those in front of its event again.
//
// What is done is committed before the rest when the worker is to end, when the topic is
// paused, after TransactionTime, and after half of MaxPollInterval, so that a batch of slow
// handlers does not run out of it.
func (w *partitionWorker) tryBatch(items []recordItem) (n int, committed bool, failed *handling.TaskError) {
	const conflictsOfBatch = 3 // small transactions block each other less
	for conflicts := 0; ; {
		tasks := tasksInTx(items)
		switch {
		case len(tasks) == 0: // which says nothing about PostgreSQL
			return len(items), true, nil
		case !w.processor.Sharing(tasks), !w.mayCall(true):
			return len(items), false, nil
		}
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, w.cfg.MaxPollInterval)
		next, err := w.processor.ProcessBatch(ctx, tasks, func(spent time.Duration) bool {
			return w.stopping.Err() != nil || w.isTopicPaused() || spent >= handling.TransactionTime || time.Since(began) > w.cfg.MaxPollInterval/2
		})
		late := handling.IsLate(ctx, err)
		cancel()
		w.releaseSlots()
		switch {
		case err == nil:
			w.reportPostgresWorks(began)
			if n = itemsBefore(items, next); n < len(items) {
				w.resizeBatch(n, len(items), time.Since(began))
			}
			for _, t := range tasksInTx(items[:n]) {
				w.breakers.Note(t.Action, 1, nil)
			}
			return n, true, nil
		case w.held.Err() != nil, w.noteBlocked(items, err):
		case handling.IsConflict(err) && conflicts < conflictsOfBatch:
			conflicts++
			w.pause(handling.ConflictWait(conflicts))
		case w.processor.IsOutage(w.held, err, handling.InTx, late):
			w.awaitPostgres(began, err)
		default:
			n, failed = handling.ItemsToRepeat(err, len(items), func(o *envelope.Origin) int { return itemsBefore(items, o) })
			w.log.Debug("outbox: a transaction of records has failed, and those in front of the failed one are handled again", "partition", w.partition.Name(), "records", len(items),
				"in_front", n, "error", err)
			if n == 0 {
				return 1, false, failed
			}
			items = items[:n]
		}
	}
}

// itemsBefore returns how many items come before the one that is next, all if none is.
func itemsBefore(items []recordItem, next *envelope.Origin) int {
	if next == nil {
		return len(items)
	}
	return slices.IndexFunc(items, func(it recordItem) bool { return it.Meta.Origin == next })
}

// finishRecord does what is left to do about a record: all, or what needs no transaction, if the
// others are committed. The error of a task that has failed in the batch is that of its first
// attempt. Behind are the records behind it. The error of finishRecord is ErrStopped.
func (w *partitionWorker) finishRecord(it *recordItem, behind []recordItem, committed bool, failed *handling.TaskError) error {
	if it.Class != "" && !w.awaitResume() {
		return handling.ErrStopped
	}
	if err := w.parkBlocked([]recordItem{*it}); err != nil { // those that a record before has blocked
		return err
	}
	if it.Class == handling.ClassUnknownType {
		w.attempts.ReportUnknown(&it.Meta, "")
		if it.isSkipped(w.cfg.DeadLetterUnknown) {
			w.processor.LogSkipped(&it.Meta)
			return nil
		}
	}
	if it.Class != "" {
		return w.giveUp(it, handling.Task{}, handling.Outcome{Verdict: handling.Dead, Action: it.replay.action, Class: it.Class, Err: it.Err})
	}
	for t := range it.InOrder() {
		if it.isBlocked(t) || committed && t.Kind != handling.NoTx {
			continue
		}
		parked, err := w.runTask(it, t, failed.Of(t))
		if err != nil {
			return err
		}
		if parked {
			w.blockBehind(t, behind)
		}
	}
	return nil
}

// runTask runs a task until it is done, parked, or given up. If it has failed in a batch,
// that was its first attempt. The error of runTask is errStopped.
func (w *partitionWorker) runTask(it *recordItem, t handling.Task, failed error) (parked bool, err error) {
	policy := t.Retry.Over(w.cfg.Retry)
	for attempt := 1; ; attempt++ {
		t.Meta.Attempt = attempt
		o := w.attempts.Try(&t, policy, failed)
		failed = nil
		switch o.Verdict {
		case handling.Done:
			return false, nil
		case handling.Interrupted: // what is behind it may be so, too; if its handler needs the order of the partition, each is looked at
			it.block(t)
			return !t.InPlace, w.parkBlocked([]recordItem{*it})
		case handling.Dead:
			return w.giveUpTask(it, t, o)
		case handling.Again:
		default:
			return false, handling.ErrStopped
		}
		if w.mayPark(t) {
			return true, w.parkFailed(it, t, o)
		}
		w.attempts.ReportAgain(&t, o)
		w.pause(o.Wait)
	}
}

// giveUpTask gives up a task that has failed for the last time. The error is errStopped.
func (w *partitionWorker) giveUpTask(it *recordItem, t handling.Task, o handling.Outcome) (parked bool, err error) {
	if err := w.giveUp(it, t, o); err != nil || w.parking == nil {
		return false, err
	}
	if !t.InPlace || w.cfg.HoldDead { // then its key waits for an operator, who may take long
		return true, nil
	}
	return false, w.awaitDead(t)
}

// partitionScheduler has tasks tried in the order of a partition, see [handling.Scheduler].
type partitionScheduler struct{ *partitionWorker }

func (w partitionScheduler) Held() context.Context { return w.held }

func (w partitionScheduler) Enter(t *handling.Task) bool {
	return w.stopping.Err() == nil && w.awaitBreaker(*t) && w.mayCall(t.Kind != handling.NoTx)
}

func (w partitionScheduler) Leave(t *handling.Task, began time.Time, err error) {
	w.releaseSlots()
	if err == nil && t.Kind != handling.NoTx {
		w.reportPostgresWorks(began)
	}
}

func (w partitionScheduler) Interrupts(err error) bool { return isBlocked(err) }
func (w partitionScheduler) Sleep(d time.Duration)     { w.pause(d) }

func (w partitionScheduler) AwaitPostgres(began time.Time, err error) (putBack bool) {
	w.awaitPostgres(began, err)
	return false
}

// pause waits, unless the worker is to end.
func (w *partitionWorker) pause(d time.Duration) { wait.Sleep(w.stopping, d) }

// awaitPostgres waits a little while PostgreSQL is unavailable, or for longer if the error says so.
func (w *partitionWorker) awaitPostgres(began time.Time, err error) {
	w.outages.Report(handling.OutagePostgres, began, err)
	later, _ := handling.WaitOf(err)
	w.pause(max(later, w.outages.Backoff(handling.OutagePostgres)))
}

// reportPostgresWorks ends an outage of PostgreSQL, if there is one.
func (w *partitionWorker) reportPostgresWorks(began time.Time) {
	if w.outages.Failing() {
		w.outages.Report(handling.OutagePostgres, began, nil)
	}
}
