package outbox

import (
	"context"
	"errors"
	"fmt"
	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/places"
	"github.com/outboxgo/outbox/internal/wait"
)

// retrierParts is what a retrier uses.
type retrierParts struct {
	lease.Leadership
	cfg       relayRules
	store     *cursor.Failed
	deliverer *deliverer       // its sender is the retrier's own
	parked    *parking         // shared with the session
	places    *places.Registry // shared with the session
	probed    *probedKeys      // shared by the retriers
	breaker   *breaker.Breaker
	log       *slog.Logger
	outage    *outage.Log     // PostgreSQL
	retryNow  <-chan struct{} // wake requests
	eventDied func()          // called after an event has become dead
}

// retrier sends the events in outbox_failed again. It works beside the session, with a
// Kafka client of its own, so that an event that waits for one topic holds up no others.
// The parking keeps the two from overtaking each other.
//
// Each place that events wait for has a queue. One retrier sends what waits for good
// places, and for nothing in particular. Another one probes each bad place with one event:
// that may take long, and once it gets through, the rest of the queue is due.
type retrier struct {
	retrierParts
	reconcileAt time.Time // not before
}

// probedKeys has the keys of events that are being probed. Their heads must not change.
type probedKeys struct {
	mu   sync.Mutex // held while heads are chosen to be probed, and while heads change
	keys []string
}

// end is called when the events have been probed.
func (p *probedKeys) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys = nil
}

func newRetrier(p retrierParts) *retrier { return &retrier{retrierParts: p} }

// run retries what waits for no bad place until ctx is cancelled, then finishes what is in
// flight.
func (r *retrier) run(ctx context.Context) { r.repeat(ctx, r.retryNow, r.retryAll) }

// runProbes probes bad places until ctx is cancelled.
func (r *retrier) runProbes(ctx context.Context) { r.repeat(ctx, nil, r.probeAll) }

// repeat runs rounds, unless the breaker is open.
func (r *retrier) repeat(ctx context.Context, now <-chan struct{}, round func(context.Context) error) {
	for ctx.Err() == nil && r.Held.Err() == nil {
		if r.breaker.State() != breaker.Open { // a round that is skipped says nothing about PostgreSQL
			err := round(ctx)
			if r.Held.Err() != nil || errors.Is(err, lease.ErrLeaseLost) {
				return
			}
			r.outage.Report(err)
		}
		wait.Await(ctx, r.Held, now, r.cfg.RetryInterval)
	}
}

// retryAll retries every event that is due, some of each queue in turn. That may take long,
// and mistakes are corrected meanwhile.
func (r *retrier) retryAll(ctx context.Context) error {
	var reconciled time.Time
	for more := true; more && ctx.Err() == nil; {
		if time.Since(reconciled) >= r.cfg.RetryInterval {
			if err := r.reconcile(ctx); err != nil {
				return err
			}
			reconciled = time.Now()
		}
		read, cancel := r.WithStatementTimeout()
		queues, err := r.store.Places(read)
		cancel()
		if err != nil {
			return err
		}
		more = false
		for _, queue := range queues {
			some, err := r.retryQueue(ctx, queue.Name)
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

// errNotPermitted ends a round: Kafka or the breaker lets nothing through.
var errNotPermitted = errors.New("not all events were sent")

// retryQueue sends some heads of a queue, and what is parked behind those that get
// through. It reports whether there were any. All heads of a place that has recovered are
// due.
func (r *retrier) retryQueue(ctx context.Context, place string) (some bool, err error) {
	if place != "" {
		if !r.places.Claim(place, false) {
			return false, nil
		}
		defer r.places.Release(place)
	}
	events, err := r.find(func(ctx context.Context) ([]cursor.FailedRow, error) { return r.store.Due(ctx, place, place != "") })
	some = len(events) > 0
	for err == nil && len(events) > 0 && ctx.Err() == nil {
		var sent []string
		sent, err = r.retry(ctx, events, r.deliverer.attempt)
		if err != nil || len(sent) == 0 || r.cfg.PassFailedKeys { // then nothing is parked
			break
		}
		events, err = r.find(func(ctx context.Context) ([]cursor.FailedRow, error) { return r.store.Parked(ctx, sent) })
	}
	return some, err
}

// probeAll tries one event of each bad place.
func (r *retrier) probeAll(ctx context.Context) error {
	var names []string
	for _, bad := range r.places.All() {
		if r.places.Claim(bad.Name, true) {
			defer r.places.Release(bad.Name)
			names = append(names, bad.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	waiting, events, err := r.choose(names)
	if err != nil {
		return err
	}
	defer r.probed.end()
	r.forgetEmpty(names, waiting)
	if _, err = r.retry(ctx, events, r.deliverer.probe); errors.Is(err, errNotPermitted) {
		return nil
	}
	return err
}

// choose returns an event of each place, and those of them that are to be probed now. No
// head of their keys changes until they are.
func (r *retrier) choose(names []string) (waiting, events []cursor.FailedRow, err error) {
	r.probed.mu.Lock()
	defer r.probed.mu.Unlock()
	events, err = r.find(func(ctx context.Context) (_ []cursor.FailedRow, err error) {
		waiting, err = r.store.First(ctx, names)
		return waiting, err
	})
	for i := range events {
		r.probed.keys = append(r.probed.keys, events[i].Key)
	}
	return waiting, events, err
}

// emptyAfter is when a bad place is forgotten that no row waits for. The session writes
// the rows after it has found that the place is bad.
const emptyAfter = 5 * time.Second

// forgetEmpty forgets those of some bad places for which nothing waits any more, given an
// event of each other one.
func (r *retrier) forgetEmpty(names []string, events []cursor.FailedRow) {
	for _, bad := range r.places.All() {
		if !slices.Contains(names, bad.Name) { // nobody has looked
			continue
		}
		waits := slices.ContainsFunc(events, func(e cursor.FailedRow) bool { return e.Place == bad.Name })
		if !waits && time.Since(bad.Since) > emptyAfter {
			r.places.Forget(bad.Name)
		}
	}
}

// forgetMoved forgets the partitions whose probes have gone to other ones, because the
// number of partitions has changed. What waits for them is tried, and whatever still goes to
// a bad partition waits for that one again.
func (r *retrier) forgetMoved(events []cursor.FailedRow, outcomes []outcome) {
	for i, o := range outcomes {
		waited := events[i].Place
		if o.kind == outcomeSent && o.place != "" && o.place != waited && strings.Contains(waited, "/") {
			r.places.Forget(waited)
			r.deliverer.parts.onRecovered()
		}
	}
}

// reconcile corrects what operators and crashes cause: keys without a head, and wrong
// counts in the parking. It also retries dead events whose class says so. When stop ends,
// the rest is left to the next leader.
func (r *retrier) reconcile(stop context.Context) error {
	if time.Now().Before(r.reconcileAt) {
		return nil
	}
	start := time.Now()
	ctx, cancel := r.WithStatementTimeout()
	defer cancel()
	if err := r.store.RetryDead(ctx, r.Lease, r.cfg.RetryDeadAfter); err != nil {
		return err
	}
	if r.cfg.PassFailedKeys {
		return r.store.PromoteAll(stop, r.WithStatementTimeout, r.Lease)
	}
	var wrong []string
	page := r.store.Keys(r.WithStatementTimeout, &wrong)
	err := r.parked.recount(func(after string) ([]cursor.KeyRows, error) {
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

// promote gives keys their heads, but for those that are being probed: these have their
// turn in the next round.
func (r *retrier) promote(stop context.Context, keys []string) error {
	r.probed.mu.Lock()
	defer r.probed.mu.Unlock()
	keys = slices.DeleteFunc(keys, func(key string) bool { return slices.Contains(r.probed.keys, key) })
	return r.store.Promote(stop, r.WithStatementTimeout, r.Lease, keys)
}

// find returns the first of the events that a query finds, in their order: as many as
// fitting allows. It ends in front of an event that cannot be read, or returns that one
// alone.
func (r *retrier) find(query func(context.Context) ([]cursor.FailedRow, error)) ([]cursor.FailedRow, error) {
	ctx, cancel := r.WithStatementTimeout()
	found, err := query(ctx)
	cancel()
	for n := cursor.Fitting(found); err == nil && len(found) > 0; n = 1 {
		var events []cursor.FailedRow
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
	return r.store.ReadRows(ctx, found, payload)
}

// readUnreadable returns the first of some events without payload and headers, unless it
// can be read now: PostgreSQL may have failed for a moment.
func (r *retrier) readUnreadable(found []cursor.FailedRow, cause error) ([]cursor.FailedRow, error) {
	if isUnreadable(cause) {
		events, err := r.readRows(found[:1], true)
		if !isUnreadable(err) && !tookTooLong(err) {
			return events, err
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

// isUnreadable reports whether the row of an event cannot be read however often it is
// tried.
func isUnreadable(err error) bool { return pg.IsUnreadable(err) || errors.Is(err, cursor.ErrNoPayload) }

// tookTooLong reports whether a statement was cancelled: PostgreSQL needs seconds until it
// finds that a text is longer than 1 GB.
func tookTooLong(err error) bool {
	return pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded)
}

// retry sends events and saves the results. It returns the keys of which every event was
// sent, or errNotPermitted if an event was neither tried nor blocked.
func (r *retrier) retry(ctx context.Context, events []cursor.FailedRow,
	send func(stop, held context.Context, batch []envelope.Event) ([]outcome, error)) (sent []string, err error) {
	if len(events) == 1 && events[0].Unreadable != nil {
		return nil, r.rejectUnreadable(&events[0])
	}
	batch := make([]envelope.Event, len(events))
	for i := range events {
		batch[i] = events[i].Event
	}
	outcomes, err := send(ctx, r.Held, batch)
	if err != nil {
		return nil, err
	}
	var results []cursor.RetryResult
	for i, o := range outcomes {
		if o.kind == outcomePending {
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
	if err := r.save(results); err != nil {
		return nil, err
	}
	for _, result := range results {
		if result.Count > 0 {
			r.notifyRejected(result)
		}
	}
	return sentKeys(events, outcomes), err
}

// rejectUnreadable makes an event dead that cannot be read. If reading it took too long,
// that counts as a rejected retry, because PostgreSQL may be quicker another time.
func (r *retrier) rejectUnreadable(e *cursor.FailedRow) error {
	result := cursor.RetryResult{Event: e, Row: e.Row, Status: statusDead, Class: cursor.UnreadableRow, Err: e.Unreadable}
	if !isUnreadable(e.Unreadable) {
		result, _ = r.resultOf(e, outcome{kind: outcomeRejected, class: cursor.UnreadableRow, err: e.Unreadable})
	}
	if err := r.save([]cursor.RetryResult{result}); err != nil {
		return err
	}
	r.notifyRejected(result)
	return nil
}

// sentKeys returns the keys of which every event was sent, each once.
func sentKeys(events []cursor.FailedRow, outcomes []outcome) (keys []string) {
	skip := map[string]bool{}
	for i, o := range outcomes {
		if o.kind != outcomeSent {
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

// save writes results down. It is repeated until PostgreSQL has them or the lease is lost:
// without them, what Kafka has accepted would be sent again. What takes too long is saved in
// halves.
func (r *retrier) save(results []cursor.RetryResult) error {
	for uncertain := false; ; uncertain = true {
		err := r.trySave(results, uncertain)
		switch {
		case err == nil, errors.Is(err, lease.ErrLeaseLost), pg.IsUndefined(err):
			return err
		case r.Held.Err() != nil:
			return context.Cause(r.Held)
		case tookTooLong(err) && len(results) > 1:
			if err := r.save(results[:len(results)/2]); err != nil {
				return err
			}
			return r.save(results[len(results)/2:])
		}
		r.outage.Report(err)
		wait.Sleep(r.Held, r.outage.Backoff())
	}
}

// trySave writes results under the lock with which the session parks events. After a try
// of uncertain outcome it is not known which keys have got a new head, so all of them stay
// parked until they are counted again.
func (r *retrier) trySave(results []cursor.RetryResult, uncertain bool) error {
	r.parked.mu.Lock()
	defer r.parked.mu.Unlock()
	ctx, cancel := r.WithStatementTimeout()
	defer cancel()
	left, err := r.store.SaveResults(ctx, r.Lease, results, r.cfg.KeepSent)
	if err != nil {
		return err
	}
	for _, result := range results {
		gone := result.Status == statusResolved || result.Status == statusDead && !r.cfg.HoldDead
		if gone { // the row holds back nothing any more
			r.parked.rowRemoved(result.Event.Key)
		}
		if !gone || uncertain {
			left = append(left, result.Event.Key)
		}
	}
	r.parked.rowsLeft(left)
	return nil
}

// resultOf turns the outcome of a retry into what is saved. It returns false for an event
// that was not tried.
func (r *retrier) resultOf(e *cursor.FailedRow, o outcome) (result cursor.RetryResult, ok bool) {
	result = cursor.RetryResult{Event: e, Row: e.Row, Class: o.class, Err: o.err}
	switch o.kind {
	case outcomeSent:
		result.Status, result.Err = statusResolved, nil
	case outcomeRejected:
		result.Status, result.Count, result.Wait = statusFailed, 1, r.cfg.retryWait(e.Retries+2)
		if e.Retries+1 >= r.cfg.MaxRetries {
			result.Status = statusDead
		}
	case outcomeUnavailable:
		result.Status, result.Wait, result.Place = statusWaiting, r.cfg.RetryInterval, o.place
	case outcomePending, outcomeBlocked, outcomeParked:
		return result, false
	}
	return result, true
}

// notifyRejected logs a rejected retry and calls the hook.
func (r *retrier) notifyRejected(result cursor.RetryResult) {
	e := result.Event
	topic, _ := e.Destination() // "" if none follows from its type
	args := []any{"id", e.Id, "event_id", string(e.EventID), "type", string(e.EventType), "aggregate_id", string(e.AggregateID),
		"topic", topic, "key", string(e.Event.Key()), "attempt", e.Retries + result.Count, "class", result.Class, "error", result.Err}
	ctx, hook := e.Context(r.Held), r.cfg.Rejected
	if result.Status == statusDead {
		hook = r.cfg.Dead
		r.log.ErrorContext(ctx, "outbox: event is dead", append(args, "key_is_held", r.cfg.HoldDead)...)
		r.eventDied()
	} else {
		r.log.WarnContext(ctx, "outbox: retry failed", args...)
	}
	if hook != nil {
		hook(&e.Event, result.Class, result.Err, e.Retries+result.Count)
	}
}
