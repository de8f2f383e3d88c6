package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// retrier sends again what stands in outbox_failed. It works beside the session,
// with a Kafka client of its own, so that what waits for one topic holds up
// nothing else; the parking keeps the two from overtaking each other.
type retrier struct {
	*Relay
	lease    *lease
	held     context.Context
	producer *producer
	parked   *parking

	correctAt time.Time // not before
}

const (
	dueAtOnce    = 50  // heads in a round trip
	behindAtOnce = 500 // events of one key behind its head
)

func newRetrier(s *session) *retrier {
	p := newProducer(s.Relay, s.lease, outage.NewLog(s.log, "Kafka, for retries,"))
	p.sparing = true // what waits for one partition fails in company of its own
	return &retrier{
		Relay: s.Relay, lease: s.lease, held: s.held, producer: p, parked: &s.parked,
	}
}

// run retries until ctx is cancelled, then finishes what is in flight.
func (r *retrier) run(ctx context.Context) {
	defer r.producer.close()
	for ctx.Err() == nil && r.held.Err() == nil {
		if r.breaker.state() != BreakerOpen { // a round that is skipped says nothing about PostgreSQL
			err := r.round(ctx)
			if r.held.Err() != nil || errors.Is(err, errLeaseLost) {
				return
			}
			r.retryOutage.Report(err)
		}
		wait.Await(ctx, r.held, r.breakerClosed, r.cfg.RetryInterval)
	}
}

// round retries all that is due.
func (r *retrier) round(ctx context.Context) error {
	if err := r.tend(); err != nil {
		return err
	}
	for ctx.Err() == nil {
		read, cancel := r.soon(r.held)
		due, err := r.failed.due(read, dueAtOnce)
		cancel()
		if err != nil || len(due) == 0 {
			return err
		}
		through, done, err := r.retry(ctx, due)
		if err != nil || !done {
			return err
		}
		for _, key := range through {
			if err := r.follow(ctx, key); err != nil {
				return err
			}
		}
	}
	return nil
}

// tend puts right what operators and crashes leave: keys without a head, and
// counts that are no longer so. It revives what is to be tried again.
func (r *retrier) tend() error {
	if time.Now().Before(r.correctAt) {
		return nil
	}
	start := time.Now()
	ctx, cancel := r.soon(r.held)
	defer cancel()
	if err := r.failed.revive(ctx, r.lease, r.cfg.RetryDeadAfter); err != nil {
		return err
	}
	wrong, err := r.correct(ctx)
	if err == nil && wrong {
		err = r.failed.promote(ctx, r.lease)
	}
	// Over very many rows this takes long, and new failures wait meanwhile.
	r.correctAt = time.Now().Add(20 * time.Since(start))
	return err
}

// correct makes the counts true, and reports whether there is something to promote.
func (r *retrier) correct(ctx context.Context) (wrong bool, err error) {
	r.parked.mu.Lock()
	defer r.parked.mu.Unlock()
	keys, wrong, err := r.failed.keys(ctx)
	if err == nil {
		r.parked.correct(keys)
	}
	return wrong, err
}

// follow sends what is parked behind a head that got through, in order, as long
// as all of it gets through.
func (r *retrier) follow(ctx context.Context, key string) error {
	for ctx.Err() == nil {
		read, cancel := r.soon(r.held)
		events, err := r.failed.behind(read, key, behindAtOnce)
		cancel()
		if err != nil || len(events) == 0 {
			return err
		}
		through, done, err := r.retry(ctx, events)
		if err != nil || !done || len(through) == 0 {
			return err
		}
	}
	return nil
}

// retry sends events and writes down what became of them. It returns the keys of
// which nothing failed, and whether all was decided.
func (r *retrier) retry(ctx context.Context, events []failedEvent) (through []string, done bool, err error) {
	batch := make([]envelope, len(events))
	for i := range events {
		batch[i] = events[i].envelope
	}
	start := time.Now()
	outcomes, err := r.producer.attempt(ctx, r.held, batch)
	r.producer.tellSent(batch, outcomes, start, true)
	if err != nil {
		return nil, false, err
	}
	var verdicts []verdict
	var tell []func() // once it is written down
	var free []string // keys of rows that hold nothing back any more
	failed := map[string]bool{}
	done = true
	for i, f := range outcomes {
		e := &events[i]
		v, ok := r.judge(e, f)
		done = done && f.kind != outcomePending
		if f.kind != outcomeSent {
			failed[e.key] = true
		}
		if !ok {
			continue
		}
		verdicts = append(verdicts, v)
		if f.kind == outcomeRejected {
			tell = append(tell, func() { r.tellRefused(e, f, v.status == StatusDead) })
		}
		if v.status == StatusResolved || v.status == StatusDead && !r.cfg.HoldDead {
			free = append(free, e.key)
		}
	}
	if len(verdicts) == 0 {
		return nil, done, nil
	}
	if err := r.settle(verdicts, free); err != nil {
		return nil, false, err
	}
	for _, say := range tell {
		say()
	}
	for _, e := range events {
		if !failed[e.key] {
			through, failed[e.key] = append(through, e.key), true // once
		}
	}
	return through, done, nil
}

// settle writes verdicts down under the lock with which the session parks.
func (r *retrier) settle(verdicts []verdict, free []string) error {
	r.parked.mu.Lock()
	defer r.parked.mu.Unlock()
	ctx, cancel := r.soon(r.held)
	defer cancel()
	if err := r.failed.settle(ctx, r.lease, verdicts, r.cfg.KeepSent); err != nil {
		return err
	}
	for _, key := range free {
		r.parked.removed(key)
	}
	return nil
}

// judge turns the outcome of a retry into what is written down. There is nothing to
// write for an event that was not tried.
func (r *retrier) judge(e *failedEvent, f outcome) (v verdict, ok bool) {
	v = verdict{row: e.row, class: f.class, err: f.err}
	switch f.kind {
	case outcomeSent:
		v.status, v.err = StatusResolved, nil
	case outcomeRejected:
		v.status, v.count, v.wait = StatusFailed, 1, retryWait(e.retries+2)
		if e.retries+1 >= r.cfg.MaxRetries {
			v.status = StatusDead
		}
	case outcomeUnavailable:
		v.status, v.wait = StatusWaiting, r.cfg.RetryInterval
	case outcomePending, outcomeBlocked, outcomeParked:
		return v, false
	}
	return v, true
}

func (r *retrier) tellRefused(e *failedEvent, f outcome, dead bool) {
	args := []any{"id", e.id, "event_id", string(e.eventID), "type", string(e.eventType), "aggregate_id", string(e.aggregateID),
		"key", string(e.envelope.key()), "attempt", e.retries + 1, "class", f.class, "error", f.err}
	ctx := e.context(r.held)
	if dead {
		r.log.ErrorContext(ctx, "outbox: event is dead", append(args, "key_is_held", r.cfg.HoldDead)...)
		wait.Signal(r.alarm)
	} else {
		r.log.WarnContext(ctx, "outbox: retry failed", args...)
	}
	hook := r.cfg.Hooks.Rejected
	if dead {
		hook = r.cfg.Hooks.Dead
	}
	if hook != nil {
		hook(failedEventOf(&e.envelope, f.class, f.err, e.retries+1))
	}
}
