package delivery

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/wait"
)

// lane handles deliveries, one batch after the other: those of handlers with a transaction, or
// those of handlers without one. Of a key it gets all that this worker has.
type lane struct {
	laneParts
	tx       bool // handlers with a transaction
	in       batchQueue
	ended    chan struct{}
	activity handling.Activity   // what run does; the processor notes it
	slow     handling.SlowCalls  // only the goroutine that watches handlers
	own      *handling.Processor // ends deliveries in the transaction of their handlers
	plain    *handling.Processor // does not
	attempts *handling.Attempts
	most     int // how many deliveries are tried in one transaction

	// Of the batch under way:
	work       []laneItem
	progress   progress        // without a transaction
	finished   []Delivery      // what waits for them is promoted with the transaction under way
	promotedIn int64           // how many, -1 for not yet
	held       context.Context // ended when the batch is not to go on
}

// laneParts is what the lanes of a worker share.
type laneParts struct {
	cfg        *Rules
	processor  *handling.Processor
	store      *Store
	slots      handling.CallSlots
	pauses     *pauses.Set
	outages    *outage.Logs
	log        *slog.Logger
	hands      *hands
	breakers   *handling.ActionBreakers
	session    PoolSession // of the connections of the pool, before a handler changes it
	event      readDelivery
	deadLetter sendDeadLetter

	stopping context.Context // no other attempt begins
	cut      context.Context // attempts end

	promoted func()                                   // rows may be claimed
	lost     func()                                   // rows may be with this worker that it does not know of
	retryAt  func(time.Time)                          // a row may be claimed then
	freed    func(l *lane, n int, took time.Duration) // a batch has ended
}

// readDelivery returns the event of a delivery, or nil if nobody is to have it, and the action that it is for, "" for all. It
// adds to the metadata what only the event says.
type readDelivery func(d *Delivery, about *envelope.Received) (m *envelope.Message, action string, err error)

// sendDeadLetter sends the dead letter of a delivery that is given up, and returns its topic. Nil: there is none.
type sendDeadLetter func(ctx context.Context, d *Delivery, o handling.Outcome) (topic string, err error)

// PoolSession is what connections of the pool begin with.
type PoolSession struct{ Role, User, isolation string }

const (
	sqlSession    = `SELECT current_setting('role'), session_user::text, current_setting('default_transaction_isolation')`
	readCommitted = "read committed"
)

// laneItem is a delivery with its tasks.
type laneItem struct {
	handling.Item
	Delivery
	read bool // decoded
	gone bool // not with this worker any more, or done
}

// isSpent reports whether no attempt is left: the delivery is claimed for its dead letter.
func (it *laneItem) isSpent() bool { return it.FromKafka && it.Attempt > it.MaxAttempts }

// batchQueue is what waits for a lane. Nobody waits to add to it: its lane may hang.
type batchQueue struct {
	mu      sync.Mutex
	batches [][]Delivery
	closed  bool
	more    chan struct{} // holds at most one signal
}

func (q *batchQueue) add(batch []Delivery) {
	q.mu.Lock()
	q.batches = append(q.batches, batch)
	q.mu.Unlock()
	wait.Signal(q.more)
}

// close has next return false once nothing is left.
func (q *batchQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	wait.Signal(q.more)
}

// next waits for a batch. It returns false if there will be none.
func (q *batchQueue) next() (batch []Delivery, ok bool) {
	for {
		q.mu.Lock()
		if len(q.batches) > 0 {
			batch, q.batches = q.batches[0], q.batches[1:]
			q.mu.Unlock()
			return batch, true
		}
		closed := q.closed
		q.mu.Unlock()
		if closed {
			return nil, false
		}
		<-q.more
	}
}

// takeAll takes what waits.
func (q *batchQueue) takeAll() [][]Delivery {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.batches
	q.batches = nil
	return all
}

func newLane(parts laneParts, tx bool) *lane {
	l := &lane{laneParts: parts, tx: tx, in: batchQueue{more: make(chan struct{}, 1)}, ended: make(chan struct{}), most: parts.cfg.MaxPoll}
	l.own = parts.processor.ForOne(&l.activity)
	l.own.Complete = l.complete
	if l.session.isolation != readCommitted {
		l.own.Begin = l.lockRows
	}
	plain := *l.own
	plain.Complete = nil
	l.plain, l.attempts = &plain, &handling.Attempts{Processor: l.own, Breakers: parts.breakers, Scheduler: laneScheduler{l}}
	return l
}

// run handles batches until in is closed. What is left then goes back.
func (l *lane) run() {
	defer close(l.ended)
	for {
		batch, ok := l.in.next()
		if !ok {
			return
		}
		began := time.Now()
		l.handle(batch)
		l.freed(l, len(batch), time.Since(began))
	}
}

// handle handles a batch. Rows that are neither done nor failed go back.
func (l *lane) handle(batch []Delivery) {
	l.held = l.hands.contextOf(batch, l.cut)
	l.begin(batch)
	defer func() { l.work = nil }()
	for at := 0; at < len(l.work) && l.mayGoOn(); {
		n := l.readSome(l.work[at:])
		if l.tx {
			n = l.handleBatch(l.work[at : at+n])
		} else {
			l.handleEach(l.work[at:at+n], nil)
		}
		for i := range l.work[at : at+n] { // what a batch has read is not kept until its end
			it := &l.work[at+i]
			it.Payload, it.Headers, it.Record, it.Item = nil, nil, nil, handling.Item{Meta: it.Meta}
		}
		at += n
	}
	l.flush()
	l.giveBack()
}

func (l *lane) mayGoOn() bool { return l.stopping.Err() == nil && l.held.Err() == nil }

// handleBatch runs the tasks of items in one transaction. If that fails, it runs those in front of the one that
// has failed, or, if that is the first, this one by itself. It returns how many items it has dealt with.
func (l *lane) handleBatch(items []laneItem) int {
	const conflictsOfBatch = 3 // small transactions block each other less
	if n := slices.IndexFunc(items, l.isApart); n == 0 {
		l.handleEach(items[:1], nil)
		return 1
	} else if n > 0 {
		items = items[:n]
	}
	for conflicts := 0; ; {
		tasks, streams := tasksAndStreams(items)
		if !l.own.Sharing(tasks) {
			l.handleEach(items, nil)
			return len(items)
		}
		if !l.slots.Take(l.stopping, true) {
			return len(items)
		}
		began := time.Now()
		next, err := l.own.ProcessBatch(l.held, tasks, func(spent time.Duration) bool {
			return !l.mayGoOn() || spent >= handling.TransactionTime || slices.ContainsFunc(streams, l.pauses.IsPaused)
		})
		l.unlockRows(err)
		l.slots.Release(true)
		switch {
		case err == nil:
			l.works(began)
			return l.markDone(items, next, time.Since(began))
		case l.held.Err() != nil:
			return len(items)
		case errors.Is(err, ErrLost):
			l.log.Warn("outbox: deliveries were taken over by another worker before they were done; they are rolled back here", "deliveries", len(items), "error", err)
			l.lose(items[0].Ref)
			return len(items)
		case handling.IsConflict(err) && conflicts < conflictsOfBatch:
			conflicts++
			wait.Sleep(l.stopping, handling.ConflictWait(conflicts))
		case l.own.IsOutage(l.held, err, handling.InTx, handling.IsLate(l.held, err)):
			l.awaitPostgres(began, err)
			if _, later := handling.WaitOf(err); later {
				l.handleEach(items, handling.PostponedError(err))
				return len(items)
			}
		default:
			n, failed := handling.ItemsToRepeat(err, len(items), func(o *envelope.Origin) int { return indexOf(items, o) })
			l.log.Debug("outbox: a transaction of deliveries has failed, and those in front of the failed one are handled again", "deliveries", len(items), "in_front", n, "error", err)
			if n == 0 {
				l.handleEach(items[:1], failed)
				return 1
			}
			items = items[:n]
		}
	}
}

// tasksAndStreams returns the tasks of items with a transaction, and their streams.
func tasksAndStreams(items []laneItem) (tasks []handling.Task, streams []string) {
	for i := range items {
		tasks = items[i].AppendInTx(tasks)
		if !slices.Contains(streams, items[i].Stream) {
			streams = append(streams, items[i].Stream)
		}
	}
	return tasks, streams
}

func indexOf(items []laneItem, of *envelope.Origin) int {
	return slices.IndexFunc(items, func(it laneItem) bool { return it.Meta.Origin == of })
}

// isApart reports whether an item has no place in a transaction with others. One without a task, which its decoder passes over,
// would not be ended with them.
func (l *lane) isApart(it laneItem) bool {
	return it.gone || len(it.Tasks) == 0 || it.Suspect || it.Class != "" || it.Action == "" || it.isSpent() || l.mustWait(&it) ||
		slices.ContainsFunc(it.Tasks, func(t handling.Task) bool { return t.Kind == handling.NoTx })
}

// mustWait reports whether an item goes back untried: its stream is paused, or most events of its action fail.
func (l *lane) mustWait(it *laneItem) bool {
	return l.pauses.IsPaused(it.Stream) || !it.isSpent() && !l.breakers.MayTry(it.Action)
}

// markDone notes that the items before next are done, and returns how many these are. It adapts
// how many are tried together to what handlers do in TransactionTime.
func (l *lane) markDone(items []laneItem, next *envelope.Origin, took time.Duration) int {
	n := len(items)
	if next != nil {
		n = indexOf(items, next)
	}
	for i := range items[:n] {
		l.breakers.Note(items[i].Action, items[i].Attempt, nil)
		l.drop(&items[i])
	}
	l.promoteBehind()
	switch {
	case n < len(items):
		l.most = n
	case took < handling.TransactionTime:
		l.most = min(2*l.most, l.cfg.MaxPoll)
	}
	return n
}

// unlockRows notes that a transaction has ended with an error or without, for which lockRows has locked rows. Those that
// are still with this worker were not renewed meanwhile.
func (l *lane) unlockRows(err error) {
	if l.own.Begin == nil {
		return
	}
	l.hands.unlock(l.held)
	if err == nil || !l.mayGoOn() {
		return
	}
	ctx, cancel := context.WithTimeout(l.held, WriteTimeout)
	defer cancel()
	if _, err := l.store.Renew(ctx, l.hands.of(l.held)); err != nil {
		l.log.Warn("outbox: deliveries are not renewed after their transaction was rolled back, others may handle them", "error", err)
	}
}

// lockRows locks the rows of tasks before their handlers run. Under another isolation level than
// READ COMMITTED, a row that is renewed meanwhile could not be ended. What is locked nobody takes.
func (l *lane) lockRows(ctx context.Context, tx handling.Tx, tasks []handling.Task) error {
	ids := map[int64]bool{}
	for _, t := range tasks {
		ids[t.Meta.Origin.DeliveryID] = true
	}
	if err := l.store.LockIn(ctx, tx.Own(), l.those(ids)); err != nil {
		return err
	}
	l.hands.lock(l.held)
	return nil
}

// handleEach runs the tasks of each item by itself. One may have failed in a common transaction:
// that was its attempt.
func (l *lane) handleEach(items []laneItem, failed *handling.TaskError) {
	for i := range items {
		if !l.mayGoOn() {
			return
		}
		it := &items[i]
		if it.gone || l.mustWait(it) {
			continue
		}
		if !l.tx && !l.progress.begin(it.Ref) {
			it.gone = true
			continue
		}
		l.handleOne(it, failed)
	}
}

// handleOne runs the tasks of an item until they are done, or one has failed.
func (l *lane) handleOne(it *laneItem, before *handling.TaskError) {
	if o, decided := l.decided(it); decided {
		l.giveUp(it, o)
		return
	}
	left := len(it.Tasks)
	inTx := false // the last task ends the delivery in its transaction
	for t := range it.InOrder() {
		l.attempts.Processor = l.plain
		if left--; left == 0 && t.Kind != handling.NoTx {
			l.attempts.Processor, inTx = l.own, true
			l.flush() // of its key, what is handled is done before
		}
		o := l.attempts.Try(&t, t.Retry.Over(l.cfg.Of(it.Stream)), before.Of(t))
		before = nil
		if o.Verdict != handling.Done {
			l.notDone(it, t, o)
			return
		}
	}
	if inTx {
		l.drop(it)
		l.promoteBehind()
		return
	}
	const often = 50 * time.Millisecond
	it.gone = true
	if l.progress.end(it.Delivery) > often {
		l.flush()
	}
}

// decided returns the outcome of an item that no handler is called for: it has no attempt left, or cannot be read,
// or nothing handles it.
func (l *lane) decided(it *laneItem) (o handling.Outcome, decided bool) {
	if it.isSpent() {
		tried := it.MaxAttempts
		if it.Action == "" { // no handler got it
			tried = 0
		}
		return handling.Outcome{Verdict: handling.Dead, Action: it.Action, Class: it.LastCode, Attempt: tried, Err: &pastError{it.LastCode, it.LastMessage}}, true
	}
	if it.Class == "" {
		return o, false
	}
	if it.Class == handling.ClassUnknownType {
		l.attempts.ReportUnknown(&it.Meta, it.Action)
	}
	tried := it.Attempt
	if it.FromKafka && it.Action == "" { // no handler got it this time, either
		tried = 0
	}
	return handling.Outcome{Verdict: handling.Dead, Action: it.Action, Class: it.Class, Attempt: tried, Err: it.Err}, true
}

// notDone writes down what has become of an item whose task is not done.
func (l *lane) notDone(it *laneItem, t handling.Task, o handling.Outcome) {
	switch o.Verdict {
	case handling.Interrupted:
		l.log.WarnContext(handling.EventContext(l.held, &t.Meta), "outbox: a delivery was taken over by another worker before it was done; it is rolled back here",
			handling.EventAttrs(&t.Meta, "action", it.Action, "attempt", t.Meta.Attempt, "error", o.Err)...)
		l.lose(it.Ref) // and with it what is behind it
	case handling.Postponed:
		l.postpone(it, t, o)
	case handling.Again:
		l.again(it, t, o)
	case handling.Dead:
		l.giveUp(it, o)
	}
}

// laneScheduler has the tasks of a batch tried one after the other, see [handling.Scheduler].
type laneScheduler struct{ *lane }

func (l laneScheduler) Held() context.Context { return l.held }

func (l laneScheduler) Enter(t *handling.Task) bool {
	return l.mayGoOn() && l.slots.Take(l.stopping, t.Kind != handling.NoTx)
}

func (l laneScheduler) Leave(t *handling.Task, began time.Time, err error) {
	l.unlockRows(err)
	l.slots.Release(t.Kind != handling.NoTx)
	if err == nil && t.Kind != handling.NoTx {
		l.works(began)
	}
}

func (l laneScheduler) Interrupts(err error) bool { return errors.Is(err, ErrLost) }
func (l laneScheduler) Sleep(d time.Duration)     { wait.Sleep(l.stopping, d) }

// AwaitPostgres has a task put back whose error says when it is to be tried again: others go on meanwhile.
func (l laneScheduler) AwaitPostgres(began time.Time, err error) (putBack bool) {
	l.awaitPostgres(began, err)
	_, later := handling.WaitOf(err)
	return later
}
