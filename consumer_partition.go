package outbox

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// worker handles the records of a partition in their order. It takes them from a
// queue that the poll loop fills.
//
// When the partition is to be let go, finish ends it: the transaction in flight is
// finished and nothing is begun. When it is gone already, or finishing takes too
// long, abandon ends the transaction too.
type worker struct {
	*membership
	at       kafka.Partition
	stopping context.Context // ended by finish
	finish   context.CancelFunc
	held     context.Context // ended by abandon
	abandon  context.CancelFunc
	added    chan struct{} // holds at most one wish to look at the queue
	gone     chan struct{} // closed when nothing runs any more

	mu       sync.Mutex
	queue    []*kgo.Record
	bytes    int // of the queue
	paused   bool
	next     kgo.EpochOffset // behind what is handled
	advanced bool            // next is not committed
}

// What a queue may hold before its partition is paused. It is resumed when half of
// it is left, see fetchMaxWait.
const (
	queueRecords = 20_000
	queueBytes   = 16 << 20
)

func newWorker(m *membership, at kafka.Partition) *worker {
	w := &worker{membership: m, at: at, added: make(chan struct{}, 1), gone: make(chan struct{})}
	w.held, w.abandon = context.WithCancel(context.Background())
	w.stopping, w.finish = context.WithCancel(w.held)
	return w
}

// add puts records into the queue, and pauses the partition when it is full.
func (w *worker) add(records []*kgo.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range records {
		w.bytes += len(r.Key) + len(r.Value)
	}
	w.queue = append(w.queue, records...)
	wait.Signal(w.added)
	if !w.paused && (len(w.queue) > queueRecords || w.bytes > queueBytes) {
		w.paused = true
		w.client.PauseFetchPartitions(w.at.Only())
	}
}

// take removes the next records from the queue, and resumes the partition when it
// is half empty.
func (w *worker) take() []*kgo.Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(w.queue), w.cfg.MaxPoll)
	records := w.queue[:n:n]
	w.queue = w.queue[n:]
	for _, r := range records {
		w.bytes -= len(r.Key) + len(r.Value)
	}
	if w.paused && len(w.queue) < queueRecords/2 && w.bytes < queueBytes/2 {
		w.paused = false
		w.client.ResumeFetchPartitions(w.at.Only())
	}
	return records
}

func (w *worker) run() {
	defer close(w.gone)
	for w.stopping.Err() == nil {
		records := w.take()
		if len(records) == 0 {
			select {
			case <-w.added:
			case <-w.stopping.Done():
			}
			continue
		}
		w.handle(records)
	}
}

// advance notes that everything up to a record is handled.
func (w *worker) advance(last *kgo.Record) {
	w.mu.Lock()
	w.next, w.advanced = kgo.EpochOffset{Epoch: last.LeaderEpoch, Offset: last.Offset + 1}, true
	w.mu.Unlock()
	w.wantCommit()
}

// uncommitted returns how far the worker has come, if Kafka does not know yet.
func (w *worker) uncommitted() (kgo.EpochOffset, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.next, w.advanced
}

// committed notes what Kafka knows.
func (w *worker) committed(next kgo.EpochOffset) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.advanced = w.next != next
}

// handle handles records, unless the worker is to end before.
func (w *worker) handle(records []*kgo.Record) {
	items := w.readAll(records)
	committed := w.tryTogether(items)
	for i := range items {
		if err := w.settle(&items[i], committed); err != nil {
			return
		}
		w.advance(records[i])
	}
}

// readAll decodes records. Codecs may do I/O, so it has as long as a handler.
func (w *worker) readAll(records []*kgo.Record) []item {
	ctx, cancel := context.WithTimeout(w.held, w.cfg.MaxPollInterval)
	defer cancel()
	items, places := make([]item, len(records)), make([]KafkaMetadata, len(records))
	for i, r := range records {
		items[i] = w.read(ctx, r, &places[i])
	}
	return items
}

// tryTogether reports whether the tasks with a transaction are done, in one for
// all. Otherwise each needs its own.
func (w *worker) tryTogether(items []item) bool {
	const deadlocks = 3 // small transactions get into each other's way less
	for tries := 0; w.stopping.Err() == nil; {
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, w.cfg.MaxPollInterval)
		err := w.together(ctx, items)
		cancel()
		switch {
		case err == nil:
			w.worksAgain(began)
			return true
		case w.held.Err() != nil:
		case pg.IsTransient(err) && tries < deadlocks:
			tries++
			w.pause(rand.N(time.Millisecond))
		case w.isOutage(w.held, err, inTx):
			w.awaitPostgres(began, err)
		default:
			w.log.Debug("outbox: records are handled one by one", "partition", w.at.String(), "records", len(items), "error", err)
			return false
		}
	}
	return false
}

var errStopped = errors.New("partition is let go")

// settle does what is left to do about a record. Its error says that the worker is
// to end.
func (w *worker) settle(it *item, committed bool) error {
	if it.class == classUnknownType {
		if w.cfg.Hooks.Unknown != nil {
			w.cfg.Hooks.Unknown(it.meta)
		}
		if w.cfg.Unknown == SkipUnknown {
			return nil
		}
	}
	if it.class != "" {
		return w.bury(it, letter{class: it.class, err: it.err})
	}
	for t := range it.inOrder() {
		if committed && t.kind != noTx {
			continue
		}
		if err := w.act(it, t); err != nil {
			return err
		}
	}
	return nil
}

// act runs a task until it is done or given up.
func (w *worker) act(it *item, t task) error {
	for attempt := 1; w.stopping.Err() == nil; {
		t.meta.Attempt = attempt
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, w.cfg.MaxPollInterval)
		err := w.once(ctx, t)
		late := ctx.Err() != nil
		cancel()
		switch {
		case err == nil:
			if t.kind != noTx {
				w.worksAgain(began)
			}
			return nil
		case w.held.Err() != nil:
			return errStopped
		case pg.IsTransient(err):
			w.log.DebugContext(handlerContext(w.held, t.meta), "outbox: transaction is repeated", "event_id", t.meta.ID, "action", t.action, "error", err)
			w.pause(rand.N(10 * time.Millisecond))
			continue
		case !late && w.isOutage(w.held, err, t.kind):
			w.awaitPostgres(began, err)
			continue
		}
		if w.cfg.Hooks.Failed != nil {
			w.cfg.Hooks.Failed(t.meta, t.action, err)
		}
		if isPermanent(err) || attempt > w.cfg.RetriesFor(err) {
			return w.bury(it, letter{action: t.action, class: errClass(err), attempts: attempt, err: err})
		}
		wait := w.handlerWait(attempt)
		w.log.WarnContext(handlerContext(w.held, t.meta), "outbox: handler failed, trying again", "type", t.meta.Type, "event_id", t.meta.ID, "action", t.action,
			"attempt", attempt, "wait", wait, "error", err)
		w.pause(wait)
		attempt++
	}
	return errStopped
}

// pause waits, unless the worker is to end.
func (w *worker) pause(d time.Duration) { wait.Sleep(w.stopping, d) }

const postgresName = "PostgreSQL"

// awaitPostgres waits a little while PostgreSQL is away.
func (w *worker) awaitPostgres(began time.Time, err error) {
	w.outages.Report(postgresName, began, err)
	w.pause(w.outages.Backoff(postgresName))
}

// worksAgain ends an outage, if there is one.
func (w *worker) worksAgain(began time.Time) {
	if w.outages.Failing() {
		w.outages.Report(postgresName, began, nil)
	}
}
