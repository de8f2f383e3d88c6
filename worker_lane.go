package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/deliveries"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/wait"
)

// lane handles deliveries, one batch after the other: those of handlers with a transaction, or
// those of handlers without one. Of a key it gets all that this worker has.
type lane struct {
	laneParts
	tx       bool // handlers with a transaction
	in       batchQueue
	ended    chan struct{}
	activity handling.Activity // what run does; the processor notes it
	slow     slowCalls         // only the goroutine that watches handlers
	own      *processor
	most     int // how many deliveries are tried in one transaction

	// Of the batch under way:
	work       []laneItem
	progress   progress              // without a transaction
	finished   []deliveries.Delivery // what waits for them is promoted with the transaction under way
	promotedIn int64                 // how many, -1 for not yet
	held       context.Context       // ended when the batch is not to go on
}

// laneParts is what the lanes of a worker share.
type laneParts struct {
	cfg        *WorkerConfig
	processor  *processor
	store      *deliveries.Store
	slots      *handling.Slots // of transactions
	pauses     *pauses.Set
	outages    *outage.Logs
	log        *slog.Logger
	hands      *hands
	retriesFor func(error) int // the host's; nil: as many as the stream has
	session    poolSession     // of the connections of the pool, before a handler changes it

	stopping context.Context // no other attempt begins
	cut      context.Context // attempts end

	promoted func()                                   // rows may be claimed
	lost     func()                                   // rows may be with this worker that it does not know of
	retryAt  func(time.Time)                          // a row may be claimed then
	freed    func(l *lane, n int, took time.Duration) // a batch has ended
}

// poolSession is what connections of the pool begin with.
type poolSession struct{ role, user, isolation string }

const (
	sqlSession    = `SELECT current_setting('role'), session_user::text, current_setting('default_transaction_isolation')`
	readCommitted = "read committed"
)

// laneItem is a delivery with its tasks.
type laneItem struct {
	item
	deliveries.Delivery
	read bool // decoded
	gone bool // not with this worker any more, or done
}

// batchQueue is what waits for a lane. Nobody waits to add to it: its lane may hang.
type batchQueue struct {
	mu      sync.Mutex
	batches [][]deliveries.Delivery
	closed  bool
	more    chan struct{} // holds at most one signal
}

func (q *batchQueue) add(batch []deliveries.Delivery) {
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
func (q *batchQueue) next() (batch []deliveries.Delivery, ok bool) {
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
func (q *batchQueue) takeAll() [][]deliveries.Delivery {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.batches
	q.batches = nil
	return all
}

func newLane(parts laneParts, tx bool) *lane {
	l := &lane{laneParts: parts, tx: tx, in: batchQueue{more: make(chan struct{}, 1)}, ended: make(chan struct{}), most: parts.cfg.MaxPoll}
	l.own = parts.processor.forOne(&l.activity)
	l.own.complete = l.complete
	if l.session.isolation != readCommitted {
		l.own.begin = l.lockRows
	}
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
func (l *lane) handle(batch []deliveries.Delivery) {
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
			it.Payload, it.Headers, it.item = nil, nil, item{meta: it.meta}
		}
		at += n
	}
	l.flush()
	l.giveBack()
}

func (l *lane) mayGoOn() bool { return l.stopping.Err() == nil && l.held.Err() == nil }

// begin makes items of a batch.
func (l *lane) begin(batch []deliveries.Delivery) {
	origins := make([]origin, len(batch))
	l.work = make([]laneItem, len(batch))
	l.progress.start(batch)
	for i, d := range batch {
		origins[i] = origin{key: []byte(d.RecordKey()), delivery: deliveryOrigin{id: d.ID, stream: d.Stream}}
		l.work[i].Delivery = d
		l.work[i].meta = Metadata{ID: d.EventID, Source: d.Source, Type: d.Type, Subject: d.AggregateID, Attempt: d.Attempt, origin: &origins[i]}
	}
}

// maxReadBytes bounds what a lane reads that came without its payload, until it has handled that.
const maxReadBytes = 8 << 20

// readSome decodes the events of the first items, and returns how many these are. Codecs may do I/O, so each has as
// long as a handler.
func (l *lane) readSome(items []laneItem) (n int) {
	bytes := 0
	for n < min(len(items), l.most) && (n == 0 || l.mayGoOn()) {
		it := &items[n]
		if it.Bare {
			if bytes += it.Size; bytes > maxReadBytes && n > 0 {
				break
			}
		}
		if !it.read {
			l.read(it)
		}
		n++
	}
	return n
}

// read decodes an event. Decoders are the host's, and may end their goroutine.
func (l *lane) read(it *laneItem) {
	ctx, cancel := context.WithTimeout(l.held, l.cfg.HandlerTimeout)
	defer cancel()
	l.activity.Begin(handling.Call{Context: ctx, Function: "codec or upcaster", Action: it.Action, Type: it.Type, ID: it.EventID, Events: 1, Place: it.meta.origin.place()})
	defer l.activity.End()
	it.read = true
	err := contain.Do(func() error {
		if it.Bare {
			if err := l.print(&it.Delivery); err != nil {
				return err
			}
		}
		m, err := messageOf(&it.Delivery)
		if err != nil {
			return err
		}
		l.own.resolve(ctx, &it.item, m, it.Action)
		return nil
	})
	switch {
	case errors.Is(err, deliveries.ErrLost):
		l.lose(it.Ref)
	case err != nil && l.mayGoOn():
		it.class, it.err = classUndecodable, err
	}
}

// Printing 1 GB, which PostgreSQL refuses in the end, takes many seconds, and a role may have a shorter
// statement_timeout.
const (
	printTimeout = time.Minute
	printTries   = 3
)

// print reads payload and headers of a delivery that came without. The error is that of an event which PostgreSQL
// cannot print, or with the work on the batch, which has ended then.
func (l *lane) print(d *deliveries.Delivery) error {
	for try := 1; ; {
		began := time.Now()
		ctx, cancel := context.WithTimeout(l.held, printTimeout)
		err := l.store.Print(ctx, d)
		tooLong := pg.IsCancelled(err) || ctx.Err() != nil
		cancel()
		switch {
		case err == nil, pg.IsUnreadable(err), errors.Is(err, deliveries.ErrLost), !l.mayGoOn():
			return err
		case !tooLong:
			l.awaitPostgres(began, err)
		case try == printTries:
			return err
		default:
			try++
		}
	}
}

// messageOf returns the event as it would arrive in a record.
func messageOf(d *deliveries.Delivery) (*Message, error) {
	e := envelope{
		eventID: []byte(d.EventID), eventType: []byte(d.Type), source: []byte(d.Source), aggregateType: []byte(d.AggregateType),
		aggregateID: []byte(d.AggregateID), payload: d.Payload, contentType: []byte(d.ContentType), headers: d.Headers,
		occurredAt: appendTime(nil, d.OccurredAt),
	}
	type header struct {
		name  string
		value []byte
	}
	headers := make([]header, 0, recordHeaders)
	value, err := e.record(Binary, func(name string, value []byte) { headers = append(headers, header{name, value}) })
	if err != nil {
		return nil, err
	}
	return decodeRecord(value, func(yield func(string, []byte) bool) {
		for _, h := range headers {
			if !yield(h.name, h.value) {
				return
			}
		}
	})
}

// handleBatch runs the tasks of items in one transaction, or, if that fails, each in one of its
// own. It returns how many items it has dealt with.
func (l *lane) handleBatch(items []laneItem) int {
	const conflictsOfBatch = 3 // small transactions block each other less
	if n := slices.IndexFunc(items, l.isApart); n == 0 {
		l.handleEach(items[:1], nil)
		return 1
	} else if n > 0 {
		items = items[:n]
	}
	var tasks []task
	var streams []string
	for i := range items {
		tasks = items[i].appendInTx(tasks)
		if !slices.Contains(streams, items[i].Stream) {
			streams = append(streams, items[i].Stream)
		}
	}
	if !l.own.sharing(tasks) {
		l.handleEach(items, nil)
		return len(items)
	}
	for conflicts := 0; l.takeSlot(); {
		began := time.Now()
		next, err := l.own.processBatch(l.held, tasks, func(spent time.Duration) bool {
			return !l.mayGoOn() || spent >= transactionTime || slices.ContainsFunc(streams, l.pauses.IsPaused)
		})
		l.unlockRows(err)
		l.slots.Release()
		switch {
		case err == nil:
			l.works(began)
			return l.markDone(items, next, time.Since(began))
		case l.held.Err() != nil:
			return len(items)
		case errors.Is(err, deliveries.ErrLost):
			l.log.Warn("outbox: deliveries were taken over by another worker before they were done; they are rolled back here", "deliveries", len(items), "error", err)
			l.lose(items[0].Ref)
			return len(items)
		case isConflict(err) && conflicts < conflictsOfBatch:
			conflicts++
			wait.Sleep(l.stopping, conflictWait(conflicts))
		case l.own.isOutage(l.held, err, inTx, isLate(l.held, err)):
			l.awaitPostgres(began, err)
			if _, later := retryAfter(err); later {
				l.handleEach(items, postponed(err))
				return len(items)
			}
		default:
			l.log.Debug("outbox: deliveries are handled one by one", "deliveries", len(items), "error", err)
			var failed *taskError
			errors.As(err, &failed)
			l.handleEach(items, failed)
			return len(items)
		}
	}
	return len(items)
}

// isApart reports whether an item has no place in a transaction with others.
func (l *lane) isApart(it laneItem) bool {
	return it.gone || it.Suspect || it.class != "" || it.Action == "" || l.pauses.IsPaused(it.Stream) ||
		slices.ContainsFunc(it.tasks, func(t task) bool { return t.kind == noTx })
}

// markDone notes that the items before next are done, and returns how many these are. It adapts
// how many are tried together to what handlers do in transactionTime.
func (l *lane) markDone(items []laneItem, next *origin, took time.Duration) int {
	n := len(items)
	if next != nil {
		n = slices.IndexFunc(items, func(it laneItem) bool { return it.meta.origin == next })
	}
	for i := range items[:n] {
		l.drop(&items[i])
	}
	l.promoteBehind()
	switch {
	case n < len(items):
		l.most = n
	case took < transactionTime:
		l.most = min(2*l.most, l.cfg.MaxPoll)
	}
	return n
}

// lose ends the work on the batch, of which a delivery is not with this worker any more, or not the first of its key.
func (l *lane) lose(r deliveries.Ref) {
	l.hands.lose(r)
	l.lost()
}

// drop notes that a delivery is not with this worker any more.
func (l *lane) drop(it *laneItem) {
	it.gone = true
	l.hands.drop(it.Ref)
}

// complete ends the deliveries of tasks, in the transaction of their handlers.
func (l *lane) complete(ctx context.Context, tx handlerTx, results []taskResult) error {
	ids := map[int64]bool{}
	for _, r := range results { // an event that is upcast may have several tasks
		ids[r.meta.origin.delivery.id] = true
	}
	l.finished, l.promotedIn = l.those(ids), 0
	// Functions inside PostgreSQL may have changed settings, too.
	if tx.ChangedSettings() || len(results) == 1 {
		if _, err := tx.Own().Exec(ctx, sqlOwnSettings, l.session.role, l.session.user); err != nil {
			return unfinished(tx, err)
		}
	}
	promoted, err := l.store.FinishIn(ctx, tx.Own(), l.finished)
	l.promotedIn = promoted
	return unfinished(tx, err)
}

// unfinished says if an error is due to what a handler has done to its transaction.
func unfinished(tx handlerTx, err error) error {
	switch {
	case pg.Code(err) == "", pg.IsTransient(err), errors.Is(err, deliveries.ErrLost):
		return err
	case !tx.ChangedSettings() && (pg.IsOutage(err) || pg.IsLocked(err) || pg.IsCancelled(err)):
		return err
	}
	return fmt.Errorf("%w: %w", errUnfinished, err)
}

// unlockRows notes that a transaction has ended with an error or without, for which lockRows has locked rows. Those that
// are still with this worker were not renewed meanwhile.
func (l *lane) unlockRows(err error) {
	if l.own.begin == nil {
		return
	}
	l.hands.unlock(l.held)
	if err == nil || !l.mayGoOn() {
		return
	}
	ctx, cancel := context.WithTimeout(l.held, writeTimeout)
	defer cancel()
	if _, err := l.store.Renew(ctx, l.hands.of(l.held)); err != nil {
		l.log.Warn("outbox: deliveries are not renewed after their transaction was rolled back, others may handle them", "error", err)
	}
}

// lockRows locks the rows of tasks before their handlers run. Under another isolation level than
// READ COMMITTED, a row that is renewed meanwhile could not be ended. What is locked nobody takes.
func (l *lane) lockRows(ctx context.Context, tx handlerTx, tasks []task) error {
	ids := map[int64]bool{}
	for _, t := range tasks {
		ids[t.meta.origin.delivery.id] = true
	}
	if err := l.store.LockIn(ctx, tx.Own(), l.those(ids)); err != nil {
		return err
	}
	l.hands.lock(l.held)
	return nil
}

// sqlOwnSettings undoes what a handler has set for its transaction, and what would keep
// statements of the worker from working.
const sqlOwnSettings = `
SELECT CASE WHEN session_user <> $2::text THEN set_config('session_authorization', $2::text, true) END, set_config('role', $1::text, true), set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true)`

// those returns the deliveries with these ids.
func (l *lane) those(ids map[int64]bool) (all []deliveries.Delivery) {
	for i := range l.work {
		if it := &l.work[i]; ids[it.ID] {
			all = append(all, it.Delivery)
		}
	}
	return all
}

// promoteBehind has rows claimed that were promoted in a transaction which is committed now. Under
// another isolation level than READ COMMITTED they still have to be.
func (l *lane) promoteBehind() {
	if l.promotedIn < 0 {
		began := time.Now()
		var err error
		l.promotedIn, err = l.store.Promote(l.cut, l.finished)
		l.outages.Report(outagePromoting, began, err) // if it fails, what repairs heads does it
	}
	if l.promotedIn > 0 {
		l.promoted()
	}
	l.promotedIn = 0
}

// handleEach runs the tasks of each item by itself. One may have failed in a common transaction:
// that was its attempt.
func (l *lane) handleEach(items []laneItem, failed *taskError) {
	for i := range items {
		if !l.mayGoOn() {
			return
		}
		it := &items[i]
		if it.gone || l.pauses.IsPaused(it.Stream) {
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
func (l *lane) handleOne(it *laneItem, before *taskError) {
	if it.class == classUnknownType && l.cfg.Hooks.Unknown != nil {
		l.callHost("hook Unknown", it, func() { l.cfg.Hooks.Unknown(it.meta) })
	}
	if it.class != "" {
		l.fail(it, it.Action, it.class, it.err, true)
		return
	}
	plain := *l.own
	plain.complete = nil
	left := len(it.tasks)
	inTx := false // the last task ends the delivery in its transaction
	for t := range it.inOrder() {
		p := &plain
		if left--; left == 0 && t.kind != noTx {
			p, inTx = l.own, true
			l.flush() // of its key, what is handled is done before
		}
		err := l.try(p, it, t, before.of(t))
		before = nil
		switch {
		case errors.Is(err, errStopped):
			return
		case errors.Is(err, deliveries.ErrLost):
			l.log.WarnContext(handlerContext(l.held, t.meta), "outbox: a delivery was taken over by another worker before it was done; it is rolled back here", l.attrs(it, it.Action, "error", err)...)
			l.lose(it.Ref) // and with it what is behind it
			return
		case isPostponed(err):
			l.postpone(it, t, err)
			return
		case err != nil:
			l.failTask(it, t, err)
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

// try runs a task until it is done or has failed: conflicts and outages of PostgreSQL do not count. If it has failed
// in a common transaction, that was the first time.
func (l *lane) try(p *processor, it *laneItem, t task, before error) error {
	conflicts := 0
	switch {
	case isConflict(before):
		conflicts++
		l.awaitConflict(it, t, conflicts, before)
	case before != nil:
		return before
	}
	for {
		if !l.mayGoOn() || t.kind != noTx && !l.takeSlot() {
			return errStopped
		}
		began := time.Now()
		err := p.processOne(l.held, t)
		l.unlockRows(err)
		if t.kind != noTx {
			l.slots.Release()
		}
		switch {
		case err == nil:
			if t.kind != noTx {
				l.works(began)
			}
			return nil
		case l.held.Err() != nil:
			return errStopped
		case errors.Is(err, deliveries.ErrLost):
			return err
		case isConflict(err) && conflicts < mostConflicts:
			conflicts++
			l.awaitConflict(it, t, conflicts, err)
		case p.isOutage(l.held, err, t.kind, isLate(l.held, err)):
			l.awaitPostgres(began, err)
			if _, later := retryAfter(err); later {
				return &postponedError{err}
			}
		default:
			return err
		}
	}
}

// postponedError is the error of a handler in an outage of PostgreSQL, which is no attempt, that says when the event is
// to be tried again. Another event goes on meanwhile.
type postponedError struct{ error }

func (e *postponedError) Unwrap() error { return e.error }

func isPostponed(err error) bool {
	_, is := errors.AsType[*postponedError](err)
	return is
}

// postponed returns the error of a common transaction if it is that of a task, as a [*postponedError].
func postponed(err error) *taskError {
	failed, _ := errors.AsType[*taskError](err)
	if failed == nil {
		return nil
	}
	return &taskError{failed.task, &postponedError{failed.err}}
}

// postpone has a delivery tried again when the error of a task says, without counting an attempt.
func (l *lane) postpone(it *laneItem, t task, cause error) {
	f := l.failureOf(it, errorClass(cause), cause)
	f.Uncounted, f.Wait = true, l.retryWait(it, cause)
	if _, err := l.writeFailure(it, f); err != nil { // lost: whoever has it now decides
		return
	}
	l.log.InfoContext(handlerContext(l.held, it.meta), "outbox: handler failed in an outage of PostgreSQL, which is no attempt; trying again", l.attrs(it, t.action, "wait", f.Wait, "error", cause)...)
	l.promoted()
	l.retryAt(time.Now().Add(f.Wait))
}

func (l *lane) takeSlot() bool { return l.slots.Take(l.stopping) }

// awaitConflict waits before a task is repeated that PostgreSQL has rolled back.
func (l *lane) awaitConflict(it *laneItem, t task, n int, err error) {
	const unusual = 5
	level := slog.LevelDebug
	if n == unusual {
		level = slog.LevelWarn
	}
	l.log.Log(handlerContext(l.held, t.meta), level, "outbox: transaction conflicts with others, and is repeated", l.attrs(it, t.action, "conflicts", n, "error", err)...)
	if l.cfg.Hooks.Conflicted != nil {
		l.callHost("hook Conflicted", it, func() { l.cfg.Hooks.Conflicted(t.meta, t.action, err) })
	}
	wait.Sleep(l.stopping, conflictWait(n))
}

// failTask writes down that a task has failed: its delivery is tried again later, or is dead.
func (l *lane) failTask(it *laneItem, t task, err error) {
	if l.cfg.Hooks.Failed != nil {
		l.callHost("hook Failed", it, func() { l.cfg.Hooks.Failed(t.meta, t.action, err) })
	}
	usual := l.cfg.of(it.Stream).MaxRetries
	retries := usual
	if l.retriesFor != nil {
		l.callHost("RetriesFor", it, func() { retries = l.retriesFor(err) })
	}
	if retries > usual {
		// Workers that are gone count, too, and know of no error: from here on they may use up
		// as many attempts as of an event that has not failed yet, or as there are.
		it.MaxAttempts = max(it.MaxAttempts, attempts(min(retries, it.Attempt-1+attempts(usual))))
	}
	l.fail(it, t.action, errorClass(err), err, isPermanent(err) || it.Attempt > retries)
}

// fail writes down that an attempt of an action has failed.
func (l *lane) fail(it *laneItem, action, class string, cause error, dead bool) {
	f := l.failureOf(it, class, cause)
	f.Dead, f.Held = dead, dead && l.cfg.HoldDead
	if !dead {
		f.Wait = l.retryWait(it, cause)
	}
	promoted, err := l.writeFailure(it, f)
	if err != nil { // lost: whoever has it now decides
		return
	}
	l.report(it, action, f, cause)
	if promoted > 0 || dead {
		l.promoted()
	}
	if !dead {
		l.retryAt(time.Now().Add(f.Wait))
	}
}

func (l *lane) failureOf(it *laneItem, class string, cause error) deliveries.Failure {
	return deliveries.Failure{Of: it.Delivery, Code: short.Storable(class, 100), Message: short.Storable(cause.Error(), short.MaxText), MaxAttempts: it.MaxAttempts}
}

// writeFailure writes a failure down, until that is done or the delivery is lost. The deliveries behind it in
// its key wait behind it again.
func (l *lane) writeFailure(it *laneItem, f deliveries.Failure) (promoted int64, err error) {
	l.flush() // of its key, what is handled is done before
	var rest []deliveries.Delivery
	for i := range l.work {
		if other := &l.work[i]; other != it && !other.gone && it.Key.Ordered && other.Key == it.Key {
			rest = append(rest, other.Delivery)
		}
	}
	err = l.write(func(ctx context.Context) (err error) {
		promoted, err = l.store.Fail(ctx, f, rest)
		return err
	})
	for i := range l.work {
		if other := &l.work[i]; other == it || !other.gone && it.Key.Ordered && other.Key == it.Key {
			l.drop(other)
		}
	}
	return promoted, err
}

// report logs a failed attempt, and calls the hook of a dead delivery.
func (l *lane) report(it *laneItem, action string, f deliveries.Failure, cause error) {
	ctx := handlerContext(l.held, it.meta)
	if !f.Dead {
		l.log.WarnContext(ctx, "outbox: handler failed, trying again", l.attrs(it, action, "wait", f.Wait, "error_code", f.Code, "error", cause)...)
		if l.cfg.Hooks.Retried != nil {
			l.callHost("hook Retried", it, func() { l.cfg.Hooks.Retried(it.meta, action, cause) })
		}
		return
	}
	l.log.ErrorContext(ctx, "outbox: delivery is dead, an operator has to decide", l.attrs(it, action, "error_code", f.Code, "error", cause)...)
	if l.cfg.Hooks.DeadLettered != nil {
		l.callHost("hook DeadLettered", it, func() { l.cfg.Hooks.DeadLettered(it.meta, action, "", cause) })
	}
}

// retryWait returns how long to wait before the next attempt.
func (l *lane) retryWait(it *laneItem, err error) time.Duration {
	if d, ok := retryAfter(err); ok {
		return max(d, 0)
	}
	const jitter = 5                  // a fifth more or less
	const longest = math.MaxInt64 / 2 // so that a fifth more is no overflow
	d := min(l.cfg.of(it.Stream).waitAfter(it.Attempt), longest)
	return d - d/jitter + rand.N(2*(d/jitter)+1)
}

// flush writes down what is handled without a transaction.
func (l *lane) flush() {
	l.progress.writing.Lock()
	defer l.progress.writing.Unlock()
	done := l.progress.takeDone()
	if len(done) == 0 {
		return
	}
	var promoted int64
	err := l.write(func(ctx context.Context) (err error) {
		promoted, err = l.store.Finish(ctx, done)
		return err
	})
	if !l.noteLost(done, err) {
		l.forget(done, promoted)
	}
}

// relieve writes down what a lane has handled that is at a call for long, and returns what it has not begun: it does not
// any more.
func (l *lane) relieve(ctx context.Context) (rest []deliveries.Delivery) {
	l.progress.writing.Lock()
	defer l.progress.writing.Unlock()
	if done := l.progress.takeDone(); len(done) > 0 {
		promoted, err := l.store.Finish(ctx, done)
		switch {
		case l.noteLost(done, err):
		case err != nil:
			l.progress.putBack(done)
		default:
			l.forget(done, promoted)
		}
	}
	return l.progress.takeAhead()
}

// noteLost ends the work on the batch if one of its deliveries that are done is with another worker.
func (l *lane) noteLost(done []deliveries.Delivery, err error) bool {
	lost := errors.Is(err, deliveries.ErrLost)
	if lost {
		l.log.Warn("outbox: deliveries were taken over by another worker before they were written down as done; their handlers run once more", "deliveries", len(done), "error", err)
		l.lose(done[0].Ref) // and with them what is behind them
	}
	return lost
}

// forget notes that deliveries are not with this worker any more, and that some were promoted with that.
func (l *lane) forget(done []deliveries.Delivery, promoted int64) {
	for _, d := range done {
		l.hands.drop(d.Ref)
	}
	if promoted > 0 {
		l.promoted()
	}
}

// giveBack gives back what was not tried.
func (l *lane) giveBack() {
	var rest []deliveries.Delivery
	for i := range l.work {
		if it := &l.work[i]; !it.gone {
			rest = append(rest, it.Delivery)
		}
	}
	if len(rest) == 0 {
		return
	}
	if err := l.write(func(ctx context.Context) error { return l.store.Return(ctx, rest) }); err != nil && l.cut.Err() == nil {
		l.log.Warn("outbox: deliveries are not given back, others wait until their lease expires", "deliveries", len(rest), "error", err)
	}
	for _, d := range rest {
		l.hands.drop(d.Ref)
	}
	l.promoted()
}

// write runs a statement until it works. It gives up if that is lost which it is about, or with
// the stop of the worker.
func (l *lane) write(statement func(context.Context) error) error {
	for {
		began := time.Now()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(l.held), writeTimeout)
		err := statement(ctx)
		cancel()
		switch {
		case err == nil:
			l.works(began)
			return nil
		case errors.Is(err, deliveries.ErrLost), l.cut.Err() != nil:
			return err
		}
		l.awaitPostgres(began, err)
		if l.stopping.Err() != nil {
			return err
		}
	}
}

// writeTimeout bounds a statement with which a worker writes down what became of a delivery.
const writeTimeout = 10 * time.Second

// awaitPostgres waits a little while PostgreSQL is unavailable.
func (l *lane) awaitPostgres(began time.Time, err error) {
	l.outages.Report(outagePostgres, began, err)
	l.cfg.awaitAgain(l.stopping, l.outages)
}

// works ends an outage of PostgreSQL, if there is one.
func (l *lane) works(began time.Time) {
	if l.outages.Failing() {
		l.outages.Report(outagePostgres, began, nil)
	}
}

// callHost calls a hook, see [processor.callHost].
func (l *lane) callHost(function string, it *laneItem, f func()) {
	l.own.callHost(l.held, function, it.Action, &it.meta, f)
}

// attrs are what a log line says of a delivery.
func (l *lane) attrs(it *laneItem, action string, more ...any) []any {
	return append([]any{"stream", it.Stream, "type", it.Type, "event_id", it.EventID, "aggregate_type", it.AggregateType, "aggregate_id", it.AggregateID,
		"action", action, "attempt", it.Attempt, "delivery_id", it.ID}, more...)
}
