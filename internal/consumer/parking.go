package consumer

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/short"
)

// A consumer with a database does not wait for an event that its handler could not handle: it parks
// the event, which becomes a row of event_delivery, and so do the events behind it of the same key, for this
// action. Everything else goes on, offsets too. See internal/deliveries for why an event must
// be looked for twice, before it is handled and at the end of its transaction.

// consumerParking is where the workers of a consumer park events.
type consumerParking struct {
	store    *delivery.Store
	breakers *handling.ActionBreakers
	session  delivery.SessionSettings
	group    string
	dueAt    func(time.Time)
	seen     atomic.Int64 // when something was found to be blocked last, in Unix nanoseconds; 0 for never
}

// wariness is how long a consumer looks for blocked keys before it calls handlers, after it has found one. Otherwise it
// looks behind them only, in their transaction.
const wariness = time.Minute

func (p *consumerParking) isWary() bool {
	seen := p.seen.Load()
	return seen != 0 && time.Since(time.Unix(0, seen)) < wariness
}

func (p *consumerParking) noteSeen() { p.seen.Store(time.Now().UnixNano()) }

// subjectOf returns what the table knows a task by.
func (p *consumerParking) subjectOf(t handling.Task) delivery.Subject {
	return delivery.Subject{Action: t.Action, Key: p.keyOf(t.Action, &t.Meta), Digest: digestOf(handling.SourceKeyOf(&t.Meta), t.Meta.ID)}
}

// KeyOf returns the key of an event for an action. Events without a key have no order.
func (p *consumerParking) keyOf(action string, m *envelope.Received) delivery.Key {
	if len(m.Kafka.Key) == 0 {
		return delivery.Key{}
	}
	return delivery.KeyOf(p.group, action, m.Kafka.Topic, string(m.Kafka.Key))
}

func digestOf(parts ...string) (digest [16]byte) {
	var all []byte
	for _, part := range parts {
		all = append(append(all, part...), 0)
	}
	sum := sha256.Sum256(all)
	copy(digest[:], sum[:])
	return digest
}

func (p *consumerParking) subjectsOf(tasks []handling.Task) []delivery.Subject {
	subjects := make([]delivery.Subject, len(tasks))
	for i, t := range tasks {
		subjects[i] = p.subjectOf(t)
	}
	return subjects
}

// blockedError means that tasks must not be handled, because their keys are blocked. They are to be parked.
type blockedError struct{ tasks []handling.Task }

func (*blockedError) Error() string { return "an earlier event of the key is parked" }

func isBlocked(err error) bool {
	_, is := errors.AsType[*blockedError](err)
	return is
}

// mayPark reports whether a task that has failed is parked, and not tried again in place.
func (w *partitionWorker) mayPark(t handling.Task) bool { return w.parking != nil && !t.InPlace }

// findBlocked finds the tasks of items that must not be handled here. It looks if some were blocked lately, and for handlers
// without a transaction, because nobody can look at the end of that. The error is ErrStopped.
func (w *partitionWorker) findBlocked(items []recordItem) error {
	if w.parking == nil {
		return nil
	}
	wary := w.parking.isWary()
	var tasks []handling.Task
	var of []*recordItem
	for i := range items {
		for _, t := range items[i].Tasks {
			if (wary || t.Kind == handling.NoTx) && !items[i].isBlocked(t) {
				tasks, of = append(tasks, t), append(of, &items[i])
			}
		}
	}
	if len(tasks) == 0 {
		return nil
	}
	found := false
	err := w.write(func(ctx context.Context) error {
		blocked, err := w.parking.store.Blocked(ctx, w.parking.subjectsOf(tasks))
		for _, n := range blocked {
			of[n].block(tasks[n])
			w.parking.noteSeen()
			found = true
		}
		return err
	})
	if err == nil && found && !wary { // those with a transaction may have the same action, and the same key
		return w.findBlocked(items)
	}
	return err
}

// lookAgain looks at the end of a transaction whether its tasks were blocked meanwhile. From then on until it has
// ended, nobody blocks them.
func (w *partitionWorker) lookAgain(ctx context.Context, tx handling.Tx, results []handling.TaskResult) error {
	tasks := make([]handling.Task, 0, len(results))
	for _, r := range results {
		if !r.Repeat {
			tasks = append(tasks, r.Task)
		}
	}
	if len(tasks) == 0 {
		return nil
	}
	if tx.ChangedSettings() || len(results) == 1 { // functions inside PostgreSQL may have changed some, too
		if _, err := tx.Own().Exec(ctx, delivery.SQLRestoreSettings, w.parking.session.Role, w.parking.session.User); err != nil {
			return delivery.AsUnfinished(tx, err)
		}
	}
	blocked, err := w.parking.store.BlockedIn(ctx, tx.Own(), w.parking.subjectsOf(tasks))
	if err != nil {
		return delivery.AsUnfinished(tx, err)
	}
	if len(blocked) == 0 {
		return nil
	}
	w.parking.noteSeen()
	found := &blockedError{}
	for _, n := range blocked {
		found.tasks = append(found.tasks, tasks[n])
	}
	return found
}

// requeueReplays has the events of items that are DEAD, and whose dead letters were sent back, handled again as what they are:
// parked events. The error is ErrStopped.
func (w *partitionWorker) requeueReplays(items []recordItem) error {
	for i := range items {
		it := &items[i]
		if w.parking == nil || !isReplay(it.record) || len(it.Tasks) == 0 && it.Class == "" {
			continue
		}
		unread := w.parking.subjectOf(noTask(it)) // of what could not be read then
		byPlace := unread
		byPlace.Digest = w.placeOf(it)
		subjects := append(w.parking.subjectsOf(it.Tasks), unread, byPlace)
		if err := w.write(func(ctx context.Context) error {
			again, err := w.parking.store.Requeue(ctx, subjects)
			for _, n := range again {
				w.parking.noteSeen()
				w.parking.dueAt(time.Now())
				if n < len(it.Tasks) {
					it.noteParked(it.Tasks[n])
					continue
				}
				for _, t := range it.Tasks { // all are handled with it
					it.noteParked(t)
				}
				it.Class = ""
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// noteBlocked notes which tasks of items an error says are blocked, and reports whether it says that.
func (w *partitionWorker) noteBlocked(items []recordItem, err error) bool {
	found, is := errors.AsType[*blockedError](err)
	if !is {
		return false
	}
	for _, t := range found.tasks {
		items[itemsBefore(items, t.Meta.Origin)].block(t)
	}
	return true
}

// blockBehind notes that the tasks behind a parked one, of its action and key, are to be parked too.
func (w *partitionWorker) blockBehind(parked handling.Task, behind []recordItem) {
	key := w.parking.keyOf(parked.Action, &parked.Meta)
	for i := range behind {
		for _, t := range behind[i].Tasks {
			if key.Ordered && t.Action == parked.Action && !behind[i].isBlocked(t) && w.parking.keyOf(t.Action, &t.Meta) == key {
				behind[i].block(t)
			}
		}
	}
}

// parkBlocked parks the tasks of items that are blocked. The error is ErrStopped.
func (w *partitionWorker) parkBlocked(items []recordItem) error {
	var rows []delivery.Received
	var tasks []handling.Task
	for i := range items {
		for _, t := range items[i].takeBlocked() {
			rows, tasks = append(rows, w.owed(&items[i], t)), append(tasks, t)
		}
	}
	became, err := w.park(rows...)
	for i, status := range became {
		if status == "" {
			w.processor.Notify(w.held, []handling.TaskResult{{Task: tasks[i], Repeat: true}})
		}
	}
	return err
}

// park makes rows, until that is done, and returns what they have become: those of events that have a row, or are handled, nothing. Those
// that are due are claimed, here or elsewhere. The error is ErrStopped.
func (w *partitionWorker) park(rows ...delivery.Received) (became []delivery.Status, err error) {
	if len(rows) == 0 {
		return nil, nil
	}
	err = w.write(func(ctx context.Context) (err error) {
		became, err = w.parking.store.Park(ctx, rows)
		return err
	})
	if err != nil {
		return nil, err
	}
	w.parking.noteSeen()
	for i, status := range became {
		if status == delivery.Pending {
			w.parking.dueAt(time.Now().Add(rows[i].Wait))
		}
	}
	return became, nil
}

// write runs a statement until it works, or the worker is to end. The error is ErrStopped.
func (w *partitionWorker) write(statement func(context.Context) error) error {
	for failed := false; w.stopping.Err() == nil; failed = true {
		began := time.Now()
		ctx, cancel := context.WithTimeout(w.held, delivery.WriteTimeout)
		err := statement(ctx)
		cancel()
		switch {
		case err == nil && failed:
			w.reportPostgresWorks(began)
			return nil
		case err == nil: // of an outage that others have reported it says nothing: event_handled may be locked
			return nil
		case w.held.Err() == nil:
			w.awaitPostgres(began, err)
		}
	}
	return handling.ErrStopped
}

// parkFailed parks a task whose first attempt has failed. The error is errStopped.
func (w *partitionWorker) parkFailed(it *recordItem, t handling.Task, o handling.Outcome) error {
	row := w.owed(it, t)
	row.Attempt, row.MaxAttempts, row.Wait = o.Attempt, delivery.Attempts(o.Retries), o.Wait
	err := w.parkTried(row, o)
	if err == nil {
		w.attempts.ReportAgain(&t, o)
	}
	return err
}

// parkTried parks a row with the error of its last attempt. The error is ErrStopped.
func (w *partitionWorker) parkTried(row delivery.Received, o handling.Outcome) error {
	row.Code, row.Message = short.Storable(o.Class, 100), short.Storable(o.Err.Error(), short.MaxText)
	_, err := w.park(row)
	return err
}

// giveUp gives up a task, or a record that no handler gets. With a database it is parked without an attempt left: whoever
// claims it sends its dead letter. Without one, that is sent here. The error is ErrStopped.
func (w *partitionWorker) giveUp(it *recordItem, t handling.Task, o handling.Outcome) error {
	if w.parking == nil {
		return w.sendToDLQ(it, o)
	}
	if t.Handler == nil {
		t = noTask(it)
	}
	row := w.owed(it, t)
	row.Attempt, row.MaxAttempts = max(o.Attempt, 1), max(o.Attempt, 1)
	return w.parkTried(row, o)
}

// awaitDead waits until the dead letter of a task was sent whose handler needs the order of its partition: what is behind it in
// its key would be parked behind it until then, and what is not would be handled before that. The error is ErrStopped.
func (w *partitionWorker) awaitDead(t handling.Task) error {
	const often = 10 * time.Millisecond
	key := []delivery.Subject{{Action: t.Action, Key: w.parking.keyOf(t.Action, &t.Meta)}} // of no event: its own is DEAD
	for {
		var open []int
		if err := w.write(func(ctx context.Context) (err error) {
			open, err = w.parking.store.Blocked(ctx, key)
			return err
		}); err != nil || len(open) == 0 {
			return err
		}
		w.pause(often)
	}
}
