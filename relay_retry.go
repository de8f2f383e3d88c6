package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// retrierParts is what a retrier uses.
type retrierParts struct {
	leadership
	cfg       RelayConfig
	store     *failedStore
	deliverer *deliverer // its sender is the retrier's own
	parked    *parking   // shared with the session
	breaker   *breaker
	log       *slog.Logger
	outage    *outage.Log     // PostgreSQL
	retryNow  <-chan struct{} // wake requests
	eventDied func()          // called after an event has become dead
}

// retrier sends the events in outbox_failed again. It works beside the session, with a
// Kafka client of its own, so that an event that waits for one topic holds up no others.
// The parking keeps the two from overtaking each other.
type retrier struct {
	retrierParts
	reconcileAt time.Time // not before
}

const (
	maxHeads  = 50  // heads that are read at once
	maxParked = 500 // events of one key that are read at once
)

func newRetrier(p retrierParts) *retrier { return &retrier{retrierParts: p} }

// run retries until ctx is cancelled, then finishes what is in flight.
func (r *retrier) run(ctx context.Context) {
	for ctx.Err() == nil && r.held.Err() == nil {
		if r.breaker.state() != BreakerOpen { // a round that is skipped says nothing about PostgreSQL
			err := r.retryAll(ctx)
			if r.held.Err() != nil || errors.Is(err, errLeaseLost) {
				return
			}
			r.outage.Report(err)
		}
		wait.Await(ctx, r.held, r.retryNow, r.cfg.RetryInterval)
	}
}

// retryAll retries every event that is due.
func (r *retrier) retryAll(ctx context.Context) error {
	if err := r.reconcile(); err != nil {
		return err
	}
	for ctx.Err() == nil {
		due, err := r.find(func(ctx context.Context) ([]failedEvent, error) { return r.store.due(ctx, maxHeads) })
		if err != nil || len(due) == 0 {
			return err
		}
		sent, decided, err := r.retry(ctx, due)
		if err != nil || !decided {
			return err
		}
		for _, key := range sent {
			if err := r.retryParked(ctx, key); err != nil {
				return err
			}
		}
	}
	return nil
}

// reconcile corrects what operators and crashes cause: keys without a head, and wrong
// counts in the parking. It also retries dead events whose class says so.
func (r *retrier) reconcile() error {
	if time.Now().Before(r.reconcileAt) {
		return nil
	}
	start := time.Now()
	ctx, cancel := r.withStatementTimeout()
	defer cancel()
	if err := r.store.retryDead(ctx, r.lease, r.cfg.RetryDeadAfter); err != nil {
		return err
	}
	wrong, err := r.correctParking(ctx)
	if err == nil && wrong {
		err = r.store.promote(ctx, r.lease)
	}
	// Over very many rows this takes long, and new failures wait meanwhile.
	r.reconcileAt = time.Now().Add(20 * time.Since(start))
	return err
}

// correctParking corrects the counts of the parking, and reports whether a key has a
// wrong head.
func (r *retrier) correctParking(ctx context.Context) (wrong bool, err error) {
	r.parked.mu.Lock()
	defer r.parked.mu.Unlock()
	keys, wrong, err := r.store.keys(ctx)
	if err == nil {
		r.parked.correct(keys)
	}
	return wrong, err
}

// retryParked sends the events that are parked behind a head that was sent, in order, as
// long as all of them get through.
func (r *retrier) retryParked(ctx context.Context, key string) error {
	for ctx.Err() == nil {
		events, err := r.find(func(ctx context.Context) ([]failedEvent, error) { return r.store.parked(ctx, key, maxParked) })
		if err != nil || len(events) == 0 {
			return err
		}
		sent, decided, err := r.retry(ctx, events)
		if err != nil || !decided || len(sent) == 0 {
			return err
		}
	}
	return nil
}

// find returns the first of the events that a query finds, in their order: as many as
// fitting allows. It ends in front of an event that cannot be read, or returns that one
// alone.
func (r *retrier) find(query func(context.Context) ([]failedEvent, error)) ([]failedEvent, error) {
	ctx, cancel := r.withStatementTimeout()
	found, err := query(ctx)
	cancel()
	for n := fitting(found); err == nil && len(found) > 0; n = 1 {
		var events []failedEvent
		events, err = r.readRows(found[:n], true)
		unreadable := r.held.Err() == nil && (isUnreadable(err) || tookTooLong(err))
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

func (r *retrier) readRows(found []failedEvent, payload bool) ([]failedEvent, error) {
	ctx, cancel := r.withStatementTimeout()
	defer cancel()
	return r.store.readRows(ctx, found, payload)
}

// readUnreadable returns the first of some events without payload and headers.
func (r *retrier) readUnreadable(found []failedEvent, cause error) ([]failedEvent, error) {
	events, err := r.readRows(found, false)
	if err != nil || len(events) == 0 {
		return nil, err
	}
	e := events[0]
	e.unreadable = fmt.Errorf("row %d of outbox_failed: %w", e.row, cause)
	return []failedEvent{e}, nil
}

// isUnreadable reports whether the row of an event cannot be read however often it is
// tried.
func isUnreadable(err error) bool { return pg.IsUnreadable(err) || errors.Is(err, errNoPayload) }

// tookTooLong reports whether a statement was cancelled: PostgreSQL needs seconds until it
// finds that a text is longer than 1 GB.
func tookTooLong(err error) bool {
	return pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
}

// retry sends events and saves the results. It returns the keys of which every event was
// sent, and whether every event was tried or blocked.
func (r *retrier) retry(ctx context.Context, events []failedEvent) (sent []string, decided bool, err error) {
	if len(events) == 1 && events[0].unreadable != nil {
		return nil, true, r.rejectUnreadable(&events[0])
	}
	batch := make([]envelope, len(events))
	for i := range events {
		batch[i] = events[i].envelope
	}
	outcomes, err := r.deliverer.attempt(ctx, r.held, batch)
	if err != nil {
		return nil, false, err
	}
	var results []retryResult
	decided = true
	for i, o := range outcomes {
		decided = decided && o.kind != outcomePending
		if result, ok := r.resultOf(&events[i], o); ok {
			results = append(results, result)
		}
	}
	if len(results) == 0 {
		return nil, decided, nil
	}
	if err := r.save(results); err != nil {
		return nil, false, err
	}
	for _, result := range results {
		if result.count > 0 {
			r.notifyRejected(result)
		}
	}
	return sentKeys(events, outcomes), decided, nil
}

// rejectUnreadable makes an event dead that cannot be read. If reading it took too long,
// that counts as a rejected retry, because PostgreSQL may be quicker another time.
func (r *retrier) rejectUnreadable(e *failedEvent) error {
	result := retryResult{event: e, row: e.row, status: StatusDead, class: unreadableRow, err: e.unreadable}
	if !isUnreadable(e.unreadable) {
		result, _ = r.resultOf(e, outcome{outcomeRejected, unreadableRow, e.unreadable})
	}
	if err := r.save([]retryResult{result}); err != nil {
		return err
	}
	r.notifyRejected(result)
	return nil
}

// sentKeys returns the keys of which every event was sent, each once.
func sentKeys(events []failedEvent, outcomes []outcome) (keys []string) {
	skip := map[string]bool{}
	for i, o := range outcomes {
		if o.kind != outcomeSent {
			skip[events[i].key] = true
		}
	}
	for i := range events {
		if key := events[i].key; !skip[key] {
			keys, skip[key] = append(keys, key), true
		}
	}
	return keys
}

// save writes results under the lock with which the session parks events.
func (r *retrier) save(results []retryResult) error {
	r.parked.mu.Lock()
	defer r.parked.mu.Unlock()
	ctx, cancel := r.withStatementTimeout()
	defer cancel()
	if err := r.store.saveResults(ctx, r.lease, results, r.cfg.KeepSent); err != nil {
		return err
	}
	for _, result := range results {
		if result.status == StatusResolved || result.status == StatusDead && !r.cfg.HoldDead {
			r.parked.rowRemoved(result.event.key) // the row holds back nothing any more
		}
	}
	return nil
}

// resultOf turns the outcome of a retry into what is saved. It returns false for an event
// that was not tried.
func (r *retrier) resultOf(e *failedEvent, o outcome) (result retryResult, ok bool) {
	result = retryResult{event: e, row: e.row, class: o.class, err: o.err}
	switch o.kind {
	case outcomeSent:
		result.status, result.err = StatusResolved, nil
	case outcomeRejected:
		result.status, result.count, result.wait = StatusFailed, 1, r.cfg.retryWait(e.retries+2)
		if e.retries+1 >= r.cfg.MaxRetries {
			result.status = StatusDead
		}
	case outcomeUnavailable:
		result.status, result.wait = StatusWaiting, r.cfg.RetryInterval
	case outcomePending, outcomeBlocked, outcomeParked:
		return result, false
	}
	return result, true
}

// notifyRejected logs a rejected retry and calls the hook.
func (r *retrier) notifyRejected(result retryResult) {
	e := result.event
	topic, _ := e.destination() // "" if none follows from its type
	args := []any{"id", e.id, "event_id", string(e.eventID), "type", string(e.eventType), "aggregate_id", string(e.aggregateID),
		"topic", topic, "key", string(e.envelope.key()), "attempt", e.retries + result.count, "class", result.class, "error", result.err}
	ctx, hook := e.context(r.held), r.cfg.Hooks.Rejected
	if result.status == StatusDead {
		hook = r.cfg.Hooks.Dead
		r.log.ErrorContext(ctx, "outbox: event is dead", append(args, "key_is_held", r.cfg.HoldDead)...)
		r.eventDied()
	} else {
		r.log.WarnContext(ctx, "outbox: retry failed", args...)
	}
	if hook != nil {
		hook(failedEventOf(&e.envelope, result.class, result.err, e.retries+result.count))
	}
}
