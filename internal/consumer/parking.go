package consumer

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/short"
)

// consumerParking parks events for the workers of a consumer.
//
// A consumer with a database does not wait for an event whose handler has failed. It parks the
// event: the event becomes a row of event_delivery. Later events of the same key are parked behind
// it, for this action only. All other events are handled, and offsets are committed.
//
// Before an event is handled, its key must not be blocked by a parked event. Workers check this when its transaction
// begins, which leaves out the events of blocked keys; and at its end, which also sees keys that were blocked
// meanwhile. Package internal/delivery says why both checks are needed. While most events are of blocked keys,
// workers check before the transaction, too, so that none begins in vain.
//
// A record that no handler gets has one row for all actions, whose key is that of no action. Under HoldDead, all tasks
// of the later records of its key are parked with that key, see blockAll.
type consumerParking struct {
	store    *delivery.Store
	breakers *handling.ActionBreakers
	session  delivery.SessionSettings
	group    string
	dueAt    func(time.Time)
}

// subjectOf returns the subject of a task, by which event_delivery identifies it.
func (p *consumerParking) subjectOf(t handling.Task) delivery.Subject {
	return delivery.Subject{Action: t.Action, Key: p.keyOf(t.Action, &t.Meta), Digest: handling.IdentityOf(&t.Meta).Digest()}
}

// keyOf returns the key of an event for an action. Events without a key have no order.
func (p *consumerParking) keyOf(action string, m *envelope.Received) delivery.Key {
	if len(m.Kafka.Key) == 0 {
		return delivery.Key{}
	}
	return delivery.KeyOf(p.group, action, m.Kafka.Topic, string(m.Kafka.Key))
}

func (p *consumerParking) subjectsOf(tasks []handling.Task) []delivery.Subject {
	subjects := make([]delivery.Subject, len(tasks))
	for i, t := range tasks {
		subjects[i] = p.subjectOf(t)
	}
	return subjects
}

// wholeOf returns a subject with the key of rows without an action. It returns false if the event does not wait for
// such rows. The subject has no digest: it asks whether the key is blocked by any event.
func (w *partitionWorker) wholeOf(m *envelope.Received) (s delivery.Subject, ok bool) {
	s.Key = w.parking.keyOf("", m)
	return s, w.cfg.HoldDead && s.Key.Ordered
}

// blockedError is the error of a transaction with tasks whose keys are blocked. These tasks are to
// be parked. Those of whole stand for their events, see blockAll.
type blockedError struct{ tasks, whole []handling.Task }

func (*blockedError) Error() string { return "an earlier event of the key is parked" }

func isBlocked(err error) bool {
	_, is := errors.AsType[*blockedError](err)
	return is
}

// mayPark reports whether a failed task is parked. Otherwise it is tried again in place.
func (w *partitionWorker) mayPark(t handling.Task) bool { return w.parking != nil && !t.InPlace }

// findBlocked marks the tasks of items whose keys are blocked. It checks tasks without a transaction, which have no
// check at their end; and all tasks if most were blocked before. The only error is ErrStopped.
func (w *partitionWorker) findBlocked(items []recordItem) error {
	if w.parking == nil {
		return nil
	}
	_, err := w.look(items, w.mostBlock)
	w.noteShare(items)
	return err
}

// look asks for the tasks of items without a transaction, or for all, whether their keys are blocked, and marks those.
// If it finds any, it marks those of all tasks. It reports whether there are any. The only error is ErrStopped.
func (w *partitionWorker) look(items []recordItem, all bool) (found bool, err error) {
	found, err = w.markBlocked(items, all)
	if err == nil && found && !all { // tasks with a transaction may have the same key
		_, err = w.markBlocked(items, true)
	}
	return found, err
}

// markBlocked is look without the second step.
func (w *partitionWorker) markBlocked(items []recordItem, all bool) (found bool, err error) {
	w.lookedAt = time.Now()
	var tasks []handling.Task
	var of []*recordItem
	var subjects []delivery.Subject // of tasks, and behind them those of wholeOf
	for i := range items {
		for _, t := range items[i].Tasks {
			if (all || t.Kind == handling.NoTx) && !items[i].isBlocked(t) {
				tasks, of, subjects = append(tasks, t), append(of, &items[i]), append(subjects, w.parking.subjectOf(t))
			}
		}
	}
	if len(tasks) == 0 {
		return false, nil
	}
	for _, it := range slices.Compact(slices.Clone(of)) {
		if whole, ok := w.wholeOf(&it.Meta); ok {
			of, subjects = append(of, it), append(subjects, whole)
		}
	}
	var blocked []int
	err = w.write(func(ctx context.Context) (err error) {
		blocked, err = w.parking.store.Blocked(ctx, subjects)
		return err
	})
	for _, n := range blocked {
		if n < len(tasks) {
			of[n].block(tasks[n])
		} else {
			of[n].blockAll()
		}
	}
	return len(blocked) > 0, err
}

// noteShare notes whether most of the tasks of items are blocked.
func (w *partitionWorker) noteShare(items []recordItem) {
	blocked, all := 0, 0
	for i := range items {
		blocked, all = blocked+len(items[i].blocked), all+len(items[i].Tasks)
	}
	w.mostBlock = blocked > all/2
}

// lookAgainAfter is how long a look serves for calls without a transaction.
const lookAgainAfter = 100 * time.Millisecond

// lookAgain returns a [*blockedError] if the key of a task without a transaction is blocked. It asks if lookAgainAfter
// has passed since the last look: for all that the batch still has, because this look serves for these tasks, too. It
// parks those that are blocked. The other error is ErrStopped.
func (w *partitionWorker) lookAgain(t *handling.Task) error {
	if w.parking == nil || t.Kind != handling.NoTx || time.Since(w.lookedAt) < lookAgainAfter {
		return nil
	}
	found, err := w.look(w.rest, false)
	if err != nil || !found {
		return err
	}
	if err := w.parkBlocked(w.rest); err != nil {
		return err
	}
	if w.rest[0].isBlocked(*t) {
		return &blockedError{}
	}
	return nil
}

// queueBlocked asks, when the transaction of tasks begins, whether their keys are blocked.
func (w *partitionWorker) queueBlocked(b *pgx.Batch, tasks []handling.Task) {
	w.asked = w.ask(tasks)
	w.parking.store.QueueBlocked(b, w.asked.subjects, &w.blockedAtBegin)
}

// checkInTx returns the tasks whose keys were blocked when their transaction began. The handlers of the others see
// whatever was done before. For a task alone, and for keys that are blocked for all actions, it returns a
// [*blockedError].
func (w *partitionWorker) checkInTx(_ context.Context, _ handling.Tx, tasks []handling.Task) (blocked []int, err error) {
	err = w.blockedAmong(w.asked, w.blockedAtBegin)
	found, _ := errors.AsType[*blockedError](err)
	if found == nil || len(tasks) == 1 || len(found.whole) > 0 {
		return nil, err
	}
	return slices.Sorted(slices.Values(w.blockedAtBegin)), nil
}

// recheckInTx checks at the end of a transaction whether keys of its tasks are blocked. From then on
// until the transaction ends, no other transaction can block these keys.
func (w *partitionWorker) recheckInTx(ctx context.Context, tx handling.Tx, results []handling.TaskResult) error {
	asked := w.asked
	notCalled := func(r handling.TaskResult) bool { return r.Repeat || r.Excluded }
	if len(results) < len(asked.tasks) || slices.ContainsFunc(results, notCalled) {
		var tasks []handling.Task
		for _, r := range results {
			if !notCalled(r) {
				tasks = append(tasks, *r.Task)
			}
		}
		if len(tasks) == 0 {
			return nil
		}
		asked = w.ask(tasks)
	}
	blocked, err := w.parking.store.BlockedIn(ctx, tx.Own(), asked.subjects, w.parking.session.Restoration(tx, len(results)))
	if err != nil {
		return delivery.AsUnfinished(tx, err)
	}
	return w.blockedAmong(asked, blocked)
}

// askedKeys are tasks, with their subjects. Behind those are the subjects of wholeOf, each with the first task of its
// event.
type askedKeys struct {
	tasks, first []handling.Task
	subjects     []delivery.Subject
}

// ask returns what to ask of PostgreSQL for tasks.
func (w *partitionWorker) ask(tasks []handling.Task) askedKeys {
	asked := askedKeys{tasks: tasks, subjects: w.parking.subjectsOf(tasks)}
	for i, t := range tasks {
		if i > 0 && tasks[i-1].Meta.Origin == t.Meta.Origin {
			continue
		}
		if whole, ok := w.wholeOf(&t.Meta); ok {
			asked.subjects, asked.first = append(asked.subjects, whole), append(asked.first, t)
		}
	}
	return asked
}

// blockedAmong returns a [*blockedError] if subjects are blocked, and nil otherwise.
func (w *partitionWorker) blockedAmong(asked askedKeys, blocked []int) error {
	if len(blocked) == 0 {
		return nil
	}
	found := &blockedError{}
	for _, n := range blocked {
		if n < len(asked.tasks) {
			found.tasks = append(found.tasks, asked.tasks[n])
		} else {
			found.whole = append(found.whole, asked.first[n-len(asked.tasks)])
		}
	}
	return found
}

// requeueReplays makes deliveries pending again that are DEAD and whose dead letters were replayed.
// Their tasks are handled as parked events, not here. The only error is ErrStopped.
func (w *partitionWorker) requeueReplays(items []recordItem) error {
	for i := range items {
		it := &items[i]
		if w.parking == nil || !isReplay(it.record) || len(it.Tasks) == 0 && it.Class == "" {
			continue
		}
		unread := w.parking.subjectOf(noTask(it)) // of an event that could not be read then
		byPlace := unread
		byPlace.Digest = w.placeOf(it)
		subjects := append(w.parking.subjectsOf(it.Tasks), unread, byPlace)
		replay := w.owed(it, noTask(it))
		if err := w.write(func(ctx context.Context) error {
			again, err := w.parking.store.Requeue(ctx, subjects, &replay, it.replay.edited)
			for _, n := range again {
				w.parking.dueAt(time.Now())
				if n < len(it.Tasks) {
					it.noteParked(it.Tasks[n])
					continue
				}
				for _, t := range it.Tasks { // the delivery of an unread event handles all of them
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

// noteBlocked marks the tasks that a [*blockedError] names. It reports whether err is one.
func (w *partitionWorker) noteBlocked(items []recordItem, err error) bool {
	found, is := errors.AsType[*blockedError](err)
	if !is {
		return false
	}
	w.mostBlock = true // at least in this batch
	for _, t := range found.whole {
		items[itemsBefore(items, t.Meta.Origin)].blockAll()
	}
	for _, t := range found.tasks {
		items[itemsBefore(items, t.Meta.Origin)].block(t)
	}
	for _, t := range slices.Concat(found.tasks, found.whole) {
		at := itemsBefore(items, t.Meta.Origin)
		w.blockBehind(&items[at], t, items[at+1:]) // the transaction may not have reached them
	}
	return true
}

// blockBehind marks the tasks of later records with the action and key of a parked task of it.
func (w *partitionWorker) blockBehind(it *recordItem, parked handling.Task, behind []recordItem) {
	key := w.parking.keyOf(parked.Action, &parked.Meta)
	for i := range behind {
		if it.whole && string(behind[i].record.Key) == string(it.record.Key) { // they have the topic in common
			behind[i].blockAll()
		}
		for _, t := range behind[i].Tasks {
			if key.Ordered && t.Action == parked.Action && !behind[i].isBlocked(t) && w.parking.keyOf(t.Action, &t.Meta) == key {
				behind[i].block(t)
			}
		}
	}
}

// parkBlocked parks the marked tasks of items. The only error is ErrStopped.
func (w *partitionWorker) parkBlocked(items []recordItem) error {
	var rows []delivery.Received
	var tasks []handling.Task
	for i := range items {
		for _, t := range items[i].takeBlocked() {
			row := w.owed(&items[i], t)
			row.Key = w.parking.keyOf(items[i].keyAction(t), &t.Meta)
			rows, tasks = append(rows, row), append(tasks, t)
		}
	}
	parked, err := w.park(rows...)
	for i, p := range parked {
		if p.Status == "" {
			w.processor.Notify(w.held, []handling.TaskResult{{Task: &tasks[i], Repeat: true}})
		}
	}
	return err
}

// park inserts rows of event_delivery; in an outage of PostgreSQL it tries again. It returns what has
// become of each event: it gets no row if it has one already or is handled. The only error is
// ErrStopped.
func (w *partitionWorker) park(rows ...delivery.Received) (parked []delivery.ParkResult, err error) {
	if len(rows) == 0 {
		return nil, nil
	}
	err = w.write(func(ctx context.Context) (err error) {
		parked, err = w.parking.store.Park(ctx, rows)
		return err
	})
	if err != nil {
		return nil, err
	}
	for i, p := range parked {
		if p.Status == "" {
			w.logNotParked(&rows[i], p)
		}
		if p.Status == delivery.Pending {
			w.parking.dueAt(time.Now().Add(rows[i].Wait))
		}
	}
	return parked, nil
}

// logNotParked logs which row or note justifies that an event gets no row.
func (w *partitionWorker) logNotParked(r *delivery.Received, p delivery.ParkResult) {
	table, id := "event_delivery", p.Row
	if id == 0 {
		table, id = "event_handled", p.Note
	}
	w.log.Debug("outbox: an event is not parked, because it has a row already or is handled", "action", r.Action,
		"type", r.Type, "source", r.Source, "event_id", uuid.UUID(r.EventID), "partition", w.partition.Name(), "offset", r.Offset, "in", table, "row", id)
}

// write runs a statement until it succeeds or the worker is stopped. The only error is ErrStopped.
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
		case err == nil: // an outage that other workers report may go on: event_handled may be locked
			return nil
		case w.held.Err() == nil:
			w.awaitPostgres(began, err)
		}
	}
	return handling.ErrStopped
}

// parkFailed parks a task whose attempt has failed. The only error is ErrStopped.
func (w *partitionWorker) parkFailed(it *recordItem, t handling.Task, o handling.Outcome) error {
	row := w.owed(it, t)
	row.Attempt, row.Wait = o.Attempt, o.Wait
	if o.Result != handling.Postponed {
		row.MaxAttempts = delivery.Attempts(o.Retries)
	}
	if o.Result == handling.Postponed || o.Uncounted {
		row.Attempt--
	}
	parked, err := w.parkTried(it, row, o)
	if err == nil && parked.Status != "" {
		w.attempts.ReportAgain(&t, o)
	}
	return err
}

// parkTried parks a row with the error of its last attempt. If the key is blocked for all actions, which this attempt
// has not checked, the row waits behind the others. The only error is ErrStopped.
func (w *partitionWorker) parkTried(it *recordItem, row delivery.Received, o handling.Outcome) (delivery.ParkResult, error) {
	if whole, ok := w.wholeOf(&it.Meta); ok && row.Action != "" {
		if err := w.write(func(ctx context.Context) error {
			blocked, err := w.parking.store.Blocked(ctx, []delivery.Subject{whole})
			if len(blocked) > 0 {
				row.Key, it.whole = whole.Key, true
			}
			return err
		}); err != nil {
			return delivery.ParkResult{}, err
		}
	}
	if o.Result != handling.Postponed { // its handler has not failed
		row.Code, row.Message = short.Storable(o.Class, 100), short.Storable(o.Message(), short.MaxText)
	}
	parked, err := w.park(row)
	if err != nil {
		return delivery.ParkResult{}, err
	}
	return parked[0], nil
}

// giveUp ends the attempts of a task, or of a record that no handler gets. With a database the task
// is parked without an attempt left: the process that claims the row sends the dead letter. Without
// a database the dead letter is sent here. The only error is ErrStopped.
func (w *partitionWorker) giveUp(it *recordItem, t handling.Task, o handling.Outcome) error {
	if w.parking == nil {
		return w.sendToDLQ(it, o)
	}
	if t.Handler == nil {
		t = noTask(it)
	}
	row := w.owed(it, t)
	row.Attempt, row.MaxAttempts = max(o.Attempt, 1), max(o.Attempt, 1)
	_, err := w.parkTried(it, row, o)
	return err
}

// awaitDead waits until the dead letter of a task was sent, for a handler with RetryInPlace. Without
// the wait, later events of its key would be parked, and other events would overtake it. The only
// error is ErrStopped.
func (w *partitionWorker) awaitDead(t handling.Task) error {
	const often = 10 * time.Millisecond
	// Without a digest: it asks whether the key is blocked by any event.
	key := []delivery.Subject{{Action: t.Action, Key: w.parking.keyOf(t.Action, &t.Meta)}}
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
