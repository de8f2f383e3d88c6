package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/trace"
)

// send sends a batch, and moves the cursor behind the events that have an outcome. The move behind the last batch of
// a window is left to the statement that opens the next window. If ctx or the lease ends first, the next holder
// sends the rest.
func (s *Session) send(ctx context.Context, batch []envelope.Event) error {
	s.Window.prefetch(s.pos, s.statement, s.group.Go)
	if s.Exactly != nil {
		return s.sendExactly(ctx, batch)
	}
	start := time.Now()
	outcomes, err := s.Deliverer.Deliver(ctx, s.Held, batch, s.Parked)
	decided, failures := s.Failures(batch, outcomes)
	for i, o := range outcomes {
		if o.Kind == OutcomeSent {
			s.recent.add(&batch[i], s.pos.CursorID)
		}
	}
	if decided > 0 {
		s.Health.CursorMoved()
		s.pos.Sent = placesOf(batch[:decided], outcomes)
		s.pos.Last = batch[decided-1].ID
		s.pos.Highest = max(s.pos.Highest, s.pos.Last)
		s.recorded = false
	}
	s.Log.Debug("outbox: batch sent", "events", decided, "of", len(batch), "failed", len(failures), "last", s.pos.Last,
		"took", time.Since(start))
	if errors.Is(err, lease.ErrLeaseLost) {
		return err
	}
	if decided < len(batch) || len(failures) > 0 || !s.Window.drained() {
		if merr := s.record(failures); merr != nil {
			return merr
		}
		s.notifyRejected(failures)
	}
	return err
}

// placesOf returns where the events of a batch are, and which had expired.
func placesOf(batch []envelope.Event, outcomes []Outcome) tables.SentRow {
	var e tables.SentEncoder
	for i := range batch {
		s := tables.Sent{OutboxID: batch[i].ID, Expired: outcomes[i].Kind == OutcomeExpired}
		if o := &outcomes[i]; o.Kind == OutcomeSent {
			s.Topic, s.Partition, s.Offset = o.Sent.Partition.Topic, o.Sent.Partition.Number, o.Sent.Offset
		}
		e.Add(s, outcomes[i].Sent.Time)
	}
	return e.Row()
}

// Failures returns how many events from the start of the batch have an outcome, and those
// of them that did not get through.
func (s *Session) Failures(batch []envelope.Event, outcomes []Outcome) (decided int, failures []cursor.Failure) {
	for i, o := range outcomes {
		e := &batch[i]
		status, wait := statusParked, time.Duration(0)
		if _, damaged := errors.AsType[*envelope.UnreadableError](e.Unreadable); damaged { // whatever it waits for, it cannot be copied
			o.Class, o.Err = cursor.UnreadableRow, e.Unreadable
		}
		switch o.Kind {
		case OutcomePending:
			return i, failures
		case OutcomeSent, OutcomeExpired:
			continue
		case OutcomeRejected:
			status, wait = statusFailed, s.Rules.WaitBefore(1)
			if o.Class == cursor.UnreadableRow && s.Lease.Exclusive() {
				status, wait = statusDead, 0
			}
		case OutcomeUnavailable:
			status = statusWaiting
		case OutcomeBlocked, OutcomeParked:
		}
		topic, _ := s.Deliverer.Topic(e)
		failures = append(failures, cursor.Failure{
			Event: e, Key: tables.ParkingKey(topic, e.Key()), Status: status, Class: o.Class, Err: o.Err, Wait: wait, Place: o.place,
			Rejected: o.Kind == OutcomeRejected, Pending: o.Kind == OutcomeParked,
			Held: status == statusDead && s.Rules.HoldDead,
		})
	}
	return len(batch), failures
}

// notifyRejected logs the rejected events and calls the hooks, once the cursor has passed them.
func (s *Session) notifyRejected(failures []cursor.Failure) {
	for _, f := range failures {
		if !f.Rejected {
			continue
		}
		e, hook := f.Event, s.Hooks.Rejected
		topic, _ := e.Destination() // "" if none follows from its type
		args := []any{"id", e.ID, "event_id", string(e.EventID), "type", string(e.EventType),
			"aggregate_id", string(e.AggregateID), "topic", topic, "key", string(e.Key()), "class", f.Class, "error", f.Err}
		if f.Status == statusDead {
			hook = s.Hooks.Dead
			s.Log.ErrorContext(e.Context(s.Held), "outbox: event is dead", append(args, "key_is_held", f.Held)...)
			s.EventDied()
		} else {
			s.Log.WarnContext(e.Context(s.Held), "outbox: event rejected", args...)
		}
		if hook != nil {
			s.Health.Progressed()
			hook(failedEvent(e, f.Class, f.Err, 0))
		}
	}
}

// record writes the position, unless it is written already, and the failures that it passes.
func (s *Session) record(failures []cursor.Failure) error {
	if s.recorded {
		return nil
	}
	if len(failures) > 0 {
		s.Parked.mu.Lock()
		defer s.Parked.mu.Unlock()
		s.Parked.assign(failures)
	}
	return s.try(func(ctx context.Context) error {
		var step trace.Step
		if trace.On {
			step = trace.Begin("move", "epoch", s.Lease.Epoch, "at", s.pos.Highest, "failed", idsOf(len(failures), func(i int) *envelope.Event { return failures[i].Event }))
		}
		id, err := s.Cursors.Move(ctx, s.Lease, s.pos, failures)
		if trace.On {
			step.End("ok", err == nil, "no", errors.Is(err, cursor.ErrStale))
		}
		if err != nil {
			return err
		}
		s.isFresh()
		s.pos.CursorID, s.pos.Epoch, s.pos.Sent, s.recorded = id, s.Lease.Epoch, tables.SentRow{}, true
		s.Parked.rowsWritten(failures)
		s.Unanswered.recorded(len(failures), func(i int) *envelope.Event { return failures[i].Event })
		if slices.ContainsFunc(failures, func(f cursor.Failure) bool { return f.Place != "" }) {
			s.Waits()
		}
		return nil
	})
}
