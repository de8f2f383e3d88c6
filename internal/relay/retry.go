package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// RetrierParts is what a retrier uses.
type RetrierParts struct {
	lease.Leadership
	Rules      Rules
	Hooks      Hooks
	Store      *cursor.Failed
	Deliverer  *Deliverer     // its sender is the retrier's own
	Parked     *Parking       // shared with the session
	Bad        *BadPartitions // shared with the session
	Unanswered *Unanswered    // shared with the session
	Probed     *ProbedKeys    // shared by the retriers
	Breaker    *breaker.Breaker
	Log        *slog.Logger
	Outage     *outage.Log     // PostgreSQL
	RetryNow   <-chan struct{} // wake requests
	ProbeNow   <-chan struct{} // wake requests: an event waits for a bad partition
	Waits      func()          // sends one to each retrier that probes
	EventDied  func()          // called after an event has become dead
	Exactly    *Exactly        // nil unless each event is to be sent exactly once; shared with the session
}

// retrier sends the events in outbox_failed again. It works alongside the session, with a Kafka client of its own,
// so an event that waits for one topic delays no other event. The parking keeps the two from overtaking each other.
//
// Each bad topic or partition has a queue, and so have the events that wait for none. One retrier sends the queues of
// good partitions and of none. Another one probes each bad partition with one event, which may take long, and a third
// one does so with suspects; once the probe gets through, the rest of the queue is due.
//
// Another transaction may have locked rows: an operator has changed them and not committed. Retriers wait for no row.
// They send no head that is locked. If a row is locked only when its event has been sent, the result stays in memory
// until it can be saved, and no event of its key is sent. All other keys go on.
type retrier struct {
	RetrierParts
	reconcileAt time.Time // not before
}

// NewRetrier returns a retrier. One of Run, RunProbes and RunSuspects is called on it.
func NewRetrier(p RetrierParts) *retrier { return &retrier{RetrierParts: p} }

// Run retries the events of good partitions until ctx is cancelled, then finishes the batch in flight.
func (r *retrier) Run(ctx context.Context) { r.repeat(ctx, r.RetryNow, r.pause, r.retryAll) }

// lockedInterval is the longest wait between two tries to change rows that another transaction has locked.
const lockedInterval = time.Second

// pause returns how long Run waits between two rounds, or between two corrections of mistakes in a long round.
func (r *retrier) pause() time.Duration {
	if r.Parked.mistaken.Load() || len(r.Parked.Unsaved()) > 0 {
		return min(lockedInterval, r.Rules.RetryInterval)
	}
	return r.Rules.RetryInterval
}

// repeat runs rounds, unless the breaker is open.
func (r *retrier) repeat(ctx context.Context, now <-chan struct{}, pause func() time.Duration, round func(context.Context) error) {
	for ctx.Err() == nil && r.Held.Err() == nil {
		open := r.Breaker.State() == breaker.Open
		if !open { // a round that is skipped says nothing about PostgreSQL
			err := round(ctx)
			if r.Held.Err() != nil || errors.Is(err, lease.ErrLeaseLost) {
				return
			}
			if err != nil || ctx.Err() == nil { // a round that a stop has ended may have asked PostgreSQL nothing
				r.Outage.Report(err)
			}
		}
		left := pause()
		if open { // then the pause may be over
			left = max(left, r.probeEvery())
		}
		wait.Await(ctx, r.Held, now, left)
	}
}

// retryAll retries every event that is due, some of each queue in turn. That may take long,
// and mistakes are corrected meanwhile.
func (r *retrier) retryAll(ctx context.Context) error {
	var corrected, listed time.Time
	var queues []cursor.BadPartition
	reached := map[string]pgtype.Timestamptz{}
	for more := true; more && ctx.Err() == nil; {
		if time.Since(corrected) >= r.pause() {
			if err := r.saveUnsaved(); err != nil {
				return err
			}
			if err := r.reconcile(ctx); err != nil {
				return err
			}
			corrected = time.Now()
		}
		if err := r.saveAnswered(); err != nil {
			return err
		}
		headless := r.Parked.takeHeadless() // also of the events that were answered
		if err := r.promote(ctx, headless); err != nil {
			r.Parked.addHeadless(headless)
			return err
		}
		if time.Since(listed) >= r.pause() {
			var err error
			if queues, err = r.listQueues(); err != nil {
				return err
			}
			listed = time.Now()
		}
		more = false
		for _, queue := range queues {
			some, err := r.retryQueue(ctx, queue.Name, reached)
			if errors.Is(err, errNotPermitted) {
				return nil
			}
			if err != nil {
				return err
			}
			more = more || some
		}
	}
	return nil
}

func (r *retrier) listQueues() ([]cursor.BadPartition, error) {
	ctx, cancel := r.WithStatementTimeout()
	defer cancel()
	return r.Store.BadPartitions(ctx)
}

// errNotPermitted ends a round: Kafka or the breaker lets nothing through.
var errNotPermitted = errors.New("not all events were sent")

// retryQueue sends some heads of a queue, and the events that are parked behind the heads that get through. It
// reports whether there were any. All heads of a partition that has recovered are due. Reached has, for each queue,
// when the last heads of this round were due: it goes on there, and begins again at the end.
func (r *retrier) retryQueue(ctx context.Context, place string, reached map[string]pgtype.Timestamptz) (some bool, err error) {
	if place != "" {
		if !r.Bad.Claim(place, false) {
			return false, nil
		}
		defer r.Bad.Release(place)
	}
	attempt := r.attempt()
	events, err := r.find(func(ctx context.Context, skip []string) ([]cursor.FailedRow, error) {
		found, err := r.Store.Due(ctx, place, place != "", reached[place], skip)
		if err == nil && len(found) == 0 && reached[place].Valid {
			found, err = r.Store.Due(ctx, place, place != "", pgtype.Timestamptz{}, skip)
		}
		if err == nil && len(found) == 0 && place == "" {
			found, err = r.Store.Ahead(ctx, max(r.Rules.RetryInterval, r.Rules.MaxRetryWait), skip)
		}
		return found, err
	})
	if some = len(events) > 0; some {
		reached[place] = events[len(events)-1].Due
	}
	for err == nil && len(events) > 0 && ctx.Err() == nil {
		var sent []string
		sent, err = r.retry(ctx, events, attempt)
		if err != nil || len(sent) == 0 || r.Rules.PassFailedKeys { // then nothing is parked
			break
		}
		events, err = r.find(func(ctx context.Context, skip []string) ([]cursor.FailedRow, error) {
			keys := slices.DeleteFunc(sent, func(key string) bool { return slices.Contains(skip, key) })
			if len(keys) == 0 {
				return nil, nil
			}
			return r.Store.Parked(ctx, keys)
		})
	}
	return some, err
}

// reconcile corrects what operators and crashes cause: keys without a head, and wrong counts in the parking. It also
// retries dead events whose class says so. When stop ends, it leaves the rest to the next leader.
func (r *retrier) reconcile(stop context.Context) error {
	if time.Now().Before(r.reconcileAt) {
		return nil
	}
	r.Parked.mistaken.Store(false)
	start := time.Now()
	ctx, cancel := r.WithStatementTimeout()
	defer cancel()
	if err := r.Store.RetryDead(ctx, r.Lease, r.Rules.RetryDeadAfter); err != nil {
		return err
	}
	if r.Rules.PassFailedKeys {
		return r.Store.PromoteAll(stop, r.WithStatementTimeout, r.Lease)
	}
	var wrong []string
	page := r.Store.Keys(r.WithStatementTimeout, &wrong)
	err := r.Parked.Recount(func(after string) ([]cursor.KeyRows, error) {
		if stop.Err() != nil {
			return nil, errStopping
		}
		return page(after)
	})
	if errors.Is(err, errStopping) {
		return nil
	}
	if err == nil {
		err = r.promote(stop, wrong)
	}
	// Over very many rows this takes long, and new failures wait meanwhile.
	r.reconcileAt = time.Now().Add(20 * time.Since(start))
	return err
}

// promote gives keys their heads. Keys that are being probed get theirs later.
func (r *retrier) promote(stop context.Context, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	r.Probed.mu.Lock()
	defer r.Probed.mu.Unlock()
	var free, probed []string
	for _, key := range keys {
		if r.Probed.keys[key] {
			probed = append(probed, key)
		} else {
			free = append(free, key)
		}
	}
	r.Parked.addHeadless(probed)
	left, err := r.Store.Promote(stop, r.WithStatementTimeout, r.Lease, free)
	if left > 0 {
		r.Parked.mistaken.Store(true)
	}
	return err
}

// find returns the first of the events that a query finds, in their order, as many as fit. It ends in front of an
// event that cannot be read, or returns that one alone. The query skips keys with unsaved results, and those of
// events without an answer. These keys are read before it runs: then it either skips a key or finds what was saved.
func (r *retrier) find(query func(ctx context.Context, skip []string) ([]cursor.FailedRow, error)) ([]cursor.FailedRow, error) {
	skip, _ := r.Unanswered.waiting()
	for _, unsaved := range r.Parked.Unsaved() {
		skip = append(skip, unsaved.Event.Key)
	}
	ctx, cancel := r.WithStatementTimeout()
	found, err := query(ctx, skip)
	cancel()
	for n := cursor.Fitting(found); err == nil && len(found) > 0; n = 1 {
		var events []cursor.FailedRow
		if found[0].Size > r.Store.Most {
			if events, err = r.readTooLarge(found[:1]); err != nil || len(events) > 0 {
				return events, err
			}
			found = found[1:]
			continue
		}
		events, err = r.readRows(found[:n], true)
		unreadable := r.Held.Err() == nil && (isUnreadable(err) || tookTooLong(err))
		switch {
		case len(events) > 0 && (err == nil || unreadable):
			return events, nil
		case unreadable && (n == 1 || isUnreadable(err)):
			return r.readUnreadable(found[:n], err)
		case unreadable:
			err = nil
		default:
			found = found[n:]
		}
	}
	return nil, err
}

func (r *retrier) readRows(found []cursor.FailedRow, payload bool) ([]cursor.FailedRow, error) {
	ctx, cancel := r.WithStatementTimeout()
	defer cancel()
	return r.Store.ReadRows(ctx, found, payload)
}

// readUnreadable returns the first of some events without payload and headers, unless it can be read now: PostgreSQL
// may have failed for a moment, or the connection.
func (r *retrier) readUnreadable(found []cursor.FailedRow, cause error) ([]cursor.FailedRow, error) {
	for tries := 1; tries < maxTooLong && r.Held.Err() == nil; tries++ {
		events, err := r.readRows(found[:1], true)
		if !isUnreadable(err) && !tookTooLong(err) {
			return events, err
		}
		if cause = err; isUnreadable(err) {
			break
		}
	}
	events, err := r.readRows(found[:1], false)
	if err != nil || len(events) == 0 {
		return nil, err
	}
	e := events[0]
	e.Unreadable = fmt.Errorf("row %d of outbox_failed: %w", e.Row, cause)
	return []cursor.FailedRow{e}, nil
}

// readTooLarge returns an event that is larger than any record, without payload and headers.
func (r *retrier) readTooLarge(found []cursor.FailedRow) ([]cursor.FailedRow, error) {
	events, err := r.readRows(found, false)
	for i := range events {
		e := &events[i]
		e.Unreadable = &envelope.TooLargeError{ID: e.ID, EventID: string(e.EventID), Size: e.Size, Most: r.Store.Most}
	}
	return events, err
}

// isUnreadable reports whether the row of an event can never be read.
func isUnreadable(err error) bool { return pg.IsUnreadable(err) || errors.Is(err, cursor.ErrNoPayload) }

// tookTooLong reports whether a statement was cancelled: PostgreSQL needs seconds to find that a text is longer than
// 1 GB.
func tookTooLong(err error) bool {
	return pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
}

// sendRows sends events of outbox_failed.
type sendRows func(stop, held context.Context, events []cursor.FailedRow) ([]Outcome, error)

// attempt returns what sends the rows that are read from now on.
func (r *retrier) attempt() sendRows { return r.sendBy(r.Deliverer.attempt) }

func (r *retrier) sendBy(send func(stop, held context.Context, batch []envelope.Event) ([]Outcome, error)) sendRows {
	if x := r.Exactly; x != nil {
		generation := x.generation.Load()
		return func(stop, held context.Context, events []cursor.FailedRow) ([]Outcome, error) {
			return x.retry(stop, held, generation, events)
		}
	}
	return func(stop, held context.Context, events []cursor.FailedRow) ([]Outcome, error) {
		return send(stop, held, eventsOf(events))
	}
}

func eventsOf(rows []cursor.FailedRow) []envelope.Event {
	events := make([]envelope.Event, len(rows))
	for i := range rows {
		events[i] = rows[i].Event
	}
	return events
}

// retry sends events and saves the results. It returns the keys of which every event was sent, or errNotPermitted if
// an event was neither tried nor blocked.
func (r *retrier) retry(ctx context.Context, events []cursor.FailedRow, send sendRows) (sent []string, err error) {
	if len(events) == 1 && events[0].Unreadable != nil {
		return nil, r.rejectUnreadable(&events[0])
	}
	outcomes, err := send(ctx, r.Held, events)
	if err != nil {
		return nil, err
	}
	var results []cursor.RetryResult
	for i, o := range outcomes {
		if o.Kind == OutcomePending {
			err = errNotPermitted
		}
		if result, ok := r.resultOf(&events[i], o); ok {
			results = append(results, result)
		}
	}
	if len(results) == 0 {
		return nil, err
	}
	r.forgetMoved(events, outcomes)
	if err := r.Save(results); err != nil {
		return nil, err
	}
	r.Unanswered.recorded(len(events), func(i int) *envelope.Event { return &events[i].Event })
	for _, result := range results {
		switch {
		case result.Count > 0:
			r.notifyRejected(result)
		case result.Place != "":
			r.Waits()
		}
	}
	return sentKeys(events, outcomes), err
}

// rejectUnreadable marks an event dead that cannot be read. If reading it took too long, that counts as a rejected
// retry instead, because PostgreSQL may be quicker another time. So does an event that is too large.
func (r *retrier) rejectUnreadable(e *cursor.FailedRow) error {
	result := cursor.RetryResult{Event: e, Row: e.Row, Status: statusDead, Class: cursor.UnreadableRow, Err: e.Unreadable}
	if isTooLarge(e.Unreadable) {
		result, _ = r.resultOf(e, Outcome{Kind: OutcomeRejected, Class: tooLarge, Err: e.Unreadable})
	} else if !isUnreadable(e.Unreadable) {
		result, _ = r.resultOf(e, Outcome{Kind: OutcomeRejected, Class: cursor.UnreadableRow, Err: e.Unreadable})
	}
	if err := r.Save([]cursor.RetryResult{result}); err != nil {
		return err
	}
	r.notifyRejected(result)
	return nil
}

// sentKeys returns the keys of which every event was sent or has expired, each once.
func sentKeys(events []cursor.FailedRow, outcomes []Outcome) (keys []string) {
	skip := map[string]bool{}
	for i, o := range outcomes {
		if o.Kind != OutcomeSent && o.Kind != OutcomeExpired {
			skip[events[i].Key] = true
		}
	}
	for i := range events {
		if key := events[i].Key; !skip[key] {
			keys, skip[key] = append(keys, key), true
		}
	}
	return keys
}

// resultOf turns the outcome of a retry into the result to save. It returns false for an event that was not tried.
func (r *retrier) resultOf(e *cursor.FailedRow, o Outcome) (result cursor.RetryResult, ok bool) {
	result = cursor.RetryResult{Event: e, Row: e.Row, Class: o.Class, Err: o.Err}
	switch o.Kind {
	case OutcomeSent:
		result.Status, result.Err = statusResolved, nil
		result.Partition, result.Offset, result.SentAt = o.Sent.Partition.Number, o.Sent.Offset, o.Sent.Time
	case OutcomeExpired:
		result.Status, result.Expired = statusResolved, true
	case OutcomeRejected:
		result.Status, result.Count, result.Wait = statusFailed, 1, r.Rules.WaitBefore(e.Retries+2)
		if e.Retries+1 >= r.Rules.MaxRetries {
			result.Status = statusDead
		}
	case OutcomeUnavailable:
		result.Status, result.Wait, result.Place = statusWaiting, r.Rules.RetryInterval, o.place
	case OutcomePending, OutcomeBlocked, OutcomeParked:
		return result, false
	}
	return result, true
}

// notifyRejected logs a rejected retry and calls the hook.
func (r *retrier) notifyRejected(result cursor.RetryResult) {
	e := result.Event
	topic, _ := e.Destination() // "" if none follows from its type
	args := []any{"id", e.ID, "event_id", string(e.EventID), "type", string(e.EventType), "aggregate_id", string(e.AggregateID),
		"topic", topic, "key", string(e.Event.Key()), "attempt", e.Retries + result.Count, "class", result.Class, "error", result.Err}
	ctx, hook := e.Context(r.Held), r.Hooks.Rejected
	if result.Status == statusDead {
		hook = r.Hooks.Dead
		r.Log.ErrorContext(ctx, "outbox: event is dead", append(args, "key_is_held", r.Rules.HoldDead)...)
		r.EventDied()
	} else {
		r.Log.WarnContext(ctx, "outbox: retry failed", args...)
	}
	if hook != nil {
		hook(failedEvent(&e.Event, result.Class, result.Err, e.Retries+result.Count))
	}
}
