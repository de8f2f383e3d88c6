package delivery

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// lane handles deliveries in batches, one batch after the other. A lane is either for handlers with a
// transaction or for handlers without one. All deliveries of a key that this process claims together go to
// the same lane. But for the fields that are safe for concurrent use, a lane belongs to the goroutine of
// its run.
type lane struct {
	laneParts
	tx        bool // for handlers with a transaction
	queue     batchQueue
	ended     chan struct{}
	activity  handling.Activity   // what run does at the moment; the processor notes it
	reading   handling.Activity   // the payload that is read at the moment; it has no limit of a call
	held      handling.HeldSlots  // of the call under way
	slow      handling.SlowCalls  // only watchLoop
	finishing *handling.Processor // finishes deliveries in the transaction of their handlers
	plain     *handling.Processor // does not
	attempts  *handling.Attempts
	large     int64 // bytes that takeLarge has taken
	most      int   // deliveries that are tried in one transaction: fewer where handlers are slow

	// The batch under way:
	began    time.Time
	items    []laneItem
	waiting  map[Key]bool    // keys of items that wait, see mustWait
	dropped  map[Key]bool    // keys of items that have ended without a call, and have not finished; without a transaction
	ctx      context.Context // ends when the batch must not go on
	trial    *handling.Trial // in which the batch is tried, or nil
	progress progress        // of a lane without a transaction
	finished []Delivery      // finished in the transaction under way, or the last one
	promoted int64           // rows that the same transaction has promoted; -1 if they are still to be promoted
}

// laneParts are shared by the lanes of a process.
type laneParts struct {
	cfg        *Rules
	processor  *handling.Processor
	store      *Store
	slots      handling.CallSlots
	allLarge   *semaphore.Weighted // see takeLarge
	pauses     *pauses.Set
	outages    *outage.Logs
	log        *slog.Logger
	claimed    *claimedSet
	breakers   *handling.ActionBreakers
	session    SessionSettings // of the pool's connections, before a handler changes them
	readEvent  readDelivery
	deadLetter sendDeadLetter // for deliveries from Kafka; nil in a process without a client for Kafka

	stopping context.Context // ends when no new attempt may begin
	cut      context.Context // ends when attempts must end

	signalDue     func()                                       // rows may be due
	signalUnknown func()                                       // see Dispatcher.releaseUnknown
	retryAt       func(time.Time)                              // a row will be due then
	handled       func(l *lane, n, of int, took time.Duration) // n deliveries of a batch were handled, the others are released
}

// readDelivery returns the event of a delivery and the action that it is for, "" for all handlers of its
// type. It returns a nil message for a skipped event. It fills metadata that exists only in the payload.
type readDelivery func(d *Delivery, about *envelope.Received) (m *envelope.Message, action string, err error)

// sendDeadLetter sends the dead letter of a dead delivery, and returns its topic. The place is that of the dead letter,
// in the form of [deadletter.Origin], or "" if parts of the record are missing in it.
type sendDeadLetter func(ctx context.Context, d *Delivery, o handling.Outcome) (topic, place string, err error)

// SessionSettings are settings with which connections of the pool begin.
type SessionSettings struct{ Role, User, isolation string }

const (
	sqlSessionSettings = `
SELECT current_setting('role'), session_user::text, current_setting('default_transaction_isolation')`

	readCommitted = "read committed"
)

// laneItem is a delivery with its tasks.
type laneItem struct {
	handling.Item
	Delivery
	read  bool // decoded
	big   bool // not read, because the large events of other lanes leave no room
	noted bool // its success in a shared transaction has reached its breaker
	begun bool // its outcome was looked for, or its transaction has committed
	ended bool // finished, failed or released
}

// hasNoAttemptLeft reports whether the delivery was claimed only to send its dead letter.
func (it *laneItem) hasNoAttemptLeft() bool { return it.FromKafka && it.Attempt > it.MaxAttempts }

// noteWorks notes in the tasks whether their action works, before the transaction in which they are tried begins.
func (it *laneItem) noteWorks(breakers *handling.ActionBreakers) {
	for n := range it.Tasks {
		t := it.Tasks[n]
		t.FirstFailed, t.WitnessAfter = it.FirstFailed, it.WitnessAfter
		it.Tasks[n].Works = breakers.Works(&t)
	}
}

func newLane(parts laneParts, tx bool) *lane {
	l := &lane{
		laneParts: parts, tx: tx, queue: batchQueue{more: make(chan struct{}, 1)}, ended: make(chan struct{}),
		most: parts.cfg.MaxPoll,
	}
	l.finishing = parts.processor.ForOne(&l.activity)
	l.finishing.Complete, l.finishing.PassFailed = l.complete, true
	if l.session.isolation != readCommitted {
		l.finishing.Begin = l.lockRows
	}
	plain := *l.finishing
	plain.Complete = nil
	l.plain = &plain
	l.attempts = &handling.Attempts{Processor: l.finishing, Breakers: parts.breakers, Scheduler: laneScheduler{l}, Witness: l.store.Witness}
	return l
}

// run handles batches until the queue is closed and empty.
func (l *lane) run() {
	defer close(l.ended)
	for {
		batch, ok := l.queue.next()
		if !ok {
			return
		}
		l.began = time.Now()
		n := l.handle(batch)
		l.handled(l, n, len(batch), time.Since(l.began))
	}
}

// isOver reports whether the batch has taken as long as a transaction may take. The lane releases the rest of it then,
// so that other lanes and processes can have it.
func (l *lane) isOver() bool { return time.Since(l.began) >= handling.TransactionTime }

// handle handles a batch, and releases the deliveries that have neither finished nor failed. It returns how many have
// finished or failed here. Deliveries that relieve has released do not count, nor do those parked behind a failed one.
func (l *lane) handle(batch []Delivery) (n int) {
	defer l.held.Release()
	l.ctx, l.trial = l.claimed.claimOf(batch, l.cut)
	l.begin(batch)
	defer func() {
		l.items = nil
		l.releaseLarge()
	}()
	for at := 0; at < len(l.items) && l.mayContinue() && (at == 0 || !l.isOver()); {
		n := l.readSome(l.items[at:])
		some := l.items[at : at+n]
		if l.tx {
			n = l.handleBatch(some)
		} else {
			l.handleEach(some, nil)
		}
		l.failHung(some)
		for i := range l.items[at : at+n] { // free the memory of handled items before the batch ends
			it := &l.items[at+i]
			it.Payload, it.Headers, it.Record, it.Item = nil, nil, nil, handling.Item{Meta: it.Meta}
		}
		l.releaseLarge()
		at += n
	}
	l.flush()
	for i := range l.items {
		if it := &l.items[i]; it.begun && it.ended {
			n++
		}
	}
	l.releaseRest()
	return n
}

func (l *lane) mayContinue() bool { return l.stopping.Err() == nil && l.ctx.Err() == nil }

// handleBatch runs the tasks of items in one transaction, which leaves out items that fail without using it. If the
// transaction fails, handleBatch repeats the items before the failed item. If the first item has failed, it repeats
// only this item. It returns the number of items that need no more work here.
func (l *lane) handleBatch(items []laneItem) int {
	const conflictsOfBatch = 3 // then single transactions, which block each other less
	if n := slices.IndexFunc(items, l.mustRunAlone); n == 0 {
		l.handleEach(items[:1], nil)
		return 1
	} else if n > 0 {
		items = items[:n]
	}
	for conflicts := 0; l.mayContinue(); { // otherwise the waits below end at once
		tasks, streams := l.tasksAndStreams(items)
		if !l.finishing.Sharing(tasks) {
			l.handleEach(items, nil)
			return len(items)
		}
		if !l.held.Take(l.stopping, l.slots, true) {
			return len(items)
		}
		began := time.Now()
		done, err := l.finishing.ProcessBatch(l.ctx, tasks, func(spent time.Duration) bool {
			return !l.mayContinue() || spent >= handling.TransactionTime || slices.ContainsFunc(streams, l.pauses.IsPaused)
		})
		l.transactionEnded(err == nil && done.Next == nil && len(done.Excluded) == 0)
		l.held.Release()
		switch {
		case err == nil:
			l.postgresAnswered(began)
			return l.markDone(items, done, began)
		case l.ctx.Err() != nil:
			return len(items)
		case errors.Is(err, ErrLost):
			l.log.Warn("outbox: deliveries were taken over by another process before they were done, "+
				"their transaction is rolled back", "deliveries", len(items), "error", err)
			l.lose(items[0].Ref)
			return len(items)
		case handling.IsConflict(err) && conflicts < conflictsOfBatch:
			conflicts++
			wait.Sleep(l.stopping, handling.ConflictWait(conflicts))
		case l.finishing.IsOutage(l.ctx, err, handling.InTx, handling.IsLate(l.ctx, err)):
			l.awaitPostgres(began, err)
			if pg.IsWaitInVain(err) { // for one of them: the others need not wait for it
				l.handleEach(items, nil)
				return len(items)
			}
			if _, later := handling.WaitOf(err); later {
				l.handleEach(items, []*handling.TaskError{handling.PostponedError(err)})
				return len(items)
			}
		default:
			n, failed := handling.ItemsToRepeat(err, len(items), func(o *envelope.Origin) int { return indexOf(items, o) })
			l.noteFailedBatch(items, failed, began)
			l.log.Debug("outbox: a transaction of deliveries has failed, those before the failed one are handled again",
				"deliveries", len(items), "in_front", n, "error", err)
			if n == 0 {
				l.handleEach(items[:1], []*handling.TaskError{failed})
				return 1
			}
			items = items[:n]
		}
	}
	return len(items)
}

// tasksAndStreams returns the tasks of items for a transaction that begins now, and their streams.
func (l *lane) tasksAndStreams(items []laneItem) (tasks []handling.Task, streams []string) {
	tasks = make([]handling.Task, 0, len(items))
	for i := range items {
		items[i].noteWorks(l.breakers)
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

// mustRunAlone reports whether an item must not share a transaction with others. An item whose event is
// skipped has no task and must run alone, because only tasks finish deliveries in a shared transaction.
func (l *lane) mustRunAlone(it laneItem) bool {
	if it.ended || len(it.Tasks) == 0 || it.Suspect || it.Class != "" || it.Action == "" || it.hasNoAttemptLeft() {
		return true
	}
	return l.mustWait(&it) || len(l.otherKeys(&it)) > 0 || slices.ContainsFunc(it.Tasks, func(t handling.Task) bool { return t.Kind == handling.NoTx })
}

// mustWait reports whether an item is released untried: its stream is paused, or the breaker of its action
// is not closed and the item has no trial. Later items of its key wait, too, also if that ends meanwhile.
func (l *lane) mustWait(it *laneItem) bool {
	waits := it.Key.Ordered && l.waiting[it.Key] || l.pauses.IsPaused(it.Stream) ||
		!it.hasNoAttemptLeft() && !l.breakers.IsClosed(it.Action) && !l.trial.Permits(it.Action)
	if waits && it.Key.Ordered {
		l.waiting[it.Key] = true
	}
	return waits
}

// trialOf returns the trial in which an action is tried, or nil.
func (l *lane) trialOf(action string) *handling.Trial {
	if l.trial.Permits(action) {
		return l.trial
	}
	return nil
}

// noteSucceeded notes for its breaker that the handler of an item has succeeded in a shared transaction, which began at
// a time. An item counts once, also if the transaction is rolled back for another item and repeated.
func (l *lane) noteSucceeded(it *laneItem, began time.Time) {
	if !it.noted {
		it.noted = true
		l.breakers.Succeeded(it.Action, l.trialOf(it.Action), began)
	}
}

// noteFailedBatch notes for their breakers the items that have succeeded in a transaction that another one has failed.
// It leaves out those that have failed before: each of them would be a witness for its own next failure.
func (l *lane) noteFailedBatch(items []laneItem, failed *handling.TaskError, began time.Time) {
	for _, t := range failed.Succeeded() {
		if it := &items[indexOf(items, t.Meta.Origin)]; it.FirstFailed.IsZero() {
			l.noteSucceeded(it, began)
		}
	}
}

// markDone notes that items have finished in a transaction that began at a time. It handles those that the
// transaction has left out, one by one, and returns the number of items that it has reached. It adapts the number of
// deliveries in a transaction to the number that handlers finish in TransactionTime.
func (l *lane) markDone(items []laneItem, done handling.Batch, began time.Time) int {
	n, took := len(items), time.Since(began)
	if done.Next != nil {
		n = indexOf(items, done.Next)
	}
	for i := range items[:n] {
		it := &items[i]
		if done.Excluded.HasEvent(it.Meta.Origin) {
			continue
		}
		it.begun = true
		if !slices.ContainsFunc(it.Tasks, func(t handling.Task) bool { return done.Repeats.Has(&t) }) {
			l.noteSucceeded(it, began)
		}
		l.remove(it)
	}
	l.promoteFollowers()
	if len(done.Excluded) > 0 {
		l.handleExcluded(items[:n], done.Excluded)
	}
	switch {
	case n < len(items):
		l.most = n
	case took < handling.TransactionTime:
		l.most = min(2*l.most, l.cfg.MaxPoll)
	}
	return n
}

// handleExcluded handles the items that a transaction has left out: those that have failed, whose errors count, and
// those behind them in their keys that are not parked then.
func (l *lane) handleExcluded(items []laneItem, excluded handling.Excluded) {
	errs := excluded.Errors()
	for _, failed := range errs {
		if it := &items[indexOf(items, failed.Event())]; !it.ended && l.mayContinue() && !l.mustWait(it) {
			l.handleOne(it, errs)
		}
	}
	l.handleEach(items, nil) // the others have ended
}

// handleEach handles items one by one. Some may have failed in a shared transaction, which counts as their attempt.
func (l *lane) handleEach(items []laneItem, failed []*handling.TaskError) {
	for i := range items {
		if !l.mayContinue() || i > 0 && l.isOver() {
			return
		}
		it := &items[i]
		if it.ended || l.mustWait(it) {
			continue
		}
		if !l.tx && !l.progress.begin(it.Ref) {
			it.ended = true
			continue
		}
		l.handleOne(it, failed)
	}
}

// handleOne runs the tasks of an item until all are done or one has failed.
func (l *lane) handleOne(it *laneItem, before []*handling.TaskError) {
	it.begun = true
	if it.big {
		known := handling.Outcome{Class: it.LastCode, Err: &earlierError{it.LastCode, it.LastMessage}} // it stays so
		l.holdBack(it, known, largePause)
		return
	}
	if o, decided := l.outcomeWithoutCall(it); decided {
		if !l.yield(it, o) {
			l.markDead(it, o)
		}
		return
	}
	if l.postponeBehind(it) {
		return
	}
	if l.dropped[it.Key] { // who takes both over may handle the dropped one, so it must not come behind this one
		l.flush()
	}
	left := len(it.Tasks)
	inTx := false // the last task finishes the delivery in its transaction
	for t := range it.InOrder() {
		t.FirstFailed, t.WitnessAfter, t.Begun = it.FirstFailed, it.WitnessAfter, it.Suspect
		l.attempts.Processor = l.plain
		if left--; left == 0 && t.Kind != handling.NoTx {
			l.attempts.Processor, inTx = l.finishing, true
			l.flush() // the handled deliveries before it in its key have to finish first
		}
		o := l.attempts.Try(&t, t.Retry.Over(l.cfg.Of(it.Stream)), handling.ErrorOf(t, before))
		if o.Result != handling.Done {
			l.recordOutcome(it, t, o)
			return
		}
		if o.Repeat && it.Key.Ordered && !inTx {
			l.dropped[it.Key] = true
		}
	}
	if inTx {
		l.remove(it)
		l.promoteFollowers()
		return
	}
	const flushInterval = 50 * time.Millisecond
	it.ended = true
	if l.progress.end(it.Delivery) > flushInterval {
		l.flush()
	}
}

// outcomeWithoutCall returns the outcome of an item for which no handler is called: it has no attempt left,
// cannot be decoded, or has no handler.
func (l *lane) outcomeWithoutCall(it *laneItem) (o handling.Outcome, decided bool) {
	if it.hasNoAttemptLeft() && it.ValueIn == "" {
		tried := it.MaxAttempts
		if it.Action == "" { // no handler got it
			tried = 0
		}
		return handling.Outcome{
			Result: handling.Dead, Action: it.Action, Class: it.LastCode, Attempt: tried,
			Err: &earlierError{it.LastCode, it.LastMessage},
		}, true
	}
	if it.Class == "" {
		return o, false
	}
	if it.Class == handling.ClassUnknownType {
		l.attempts.ReportUnknown(&it.Meta, it.Action)
	}
	tried := it.Attempt
	if it.FromKafka && it.Action == "" { // no handler got it
		tried = 0
	}
	return handling.Outcome{Result: handling.Dead, Action: it.Action, Class: it.Class, Attempt: tried, Err: it.Err}, true
}

// laneScheduler implements [handling.Scheduler]: a lane tries the tasks of a batch one after the other.
type laneScheduler struct{ *lane }

func (l laneScheduler) Held() context.Context { return l.ctx }

func (l laneScheduler) Enter(t *handling.Task) error {
	if !l.mayContinue() || !l.held.Take(l.stopping, l.slots, t.Kind != handling.NoTx) {
		return handling.ErrStopped
	}
	return nil
}

func (l laneScheduler) Exit(t *handling.Task, began time.Time, err error) {
	if t.Kind != handling.NoTx {
		l.transactionEnded(err == nil && l.attempts.Processor == l.finishing)
	}
	l.held.Release()
	if err == nil && t.Kind != handling.NoTx {
		l.postgresAnswered(began)
	}
}

func (l laneScheduler) Trial(action string) *handling.Trial { return l.trialOf(action) }

func (l laneScheduler) Interrupts(err error) bool { return errors.Is(err, ErrLost) }
func (l laneScheduler) Sleep(d time.Duration)     { wait.Sleep(l.stopping, d) }

// AwaitPostgres has a task postponed whose error says when to try again, or that waits for a lock, so that other
// deliveries go on meanwhile.
func (l laneScheduler) AwaitPostgres(began time.Time, err error) (putBack bool) {
	l.awaitPostgres(began, err)
	_, later := handling.WaitOf(err)
	return later || pg.IsWaitInVain(err)
}
