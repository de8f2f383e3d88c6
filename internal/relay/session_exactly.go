package relay

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/exactly"
)

// hasPosition makes the first position of a relay that has none, so that retention keeps what it has to send.
func (s *Session) hasPosition() error {
	err := s.try(func(ctx context.Context) error {
		_, err := s.Exactly.Cursors.Load(ctx, s.Lease)
		return err
	})
	if errors.Is(err, cursor.ErrOtherCluster) { // retention removes nothing beside such a position
		return nil
	}
	return err
}

// startExactly makes ready what sends exactly once, if it is not, and loads the position.
func (s *Session) startExactly(ctx context.Context) error {
	if s.Exactly == nil || s.Exactly.IsReady() {
		return nil
	}
	store := s.Exactly.Cursors
	begun := func() (has bool, err error) {
		err = s.try(func(ctx context.Context) (err error) {
			has, err = store.HasBegun(ctx)
			return err
		})
		return has, err
	}
	identity := func() (cfg exactly.Config, err error) {
		err = s.try(func(ctx context.Context) (err error) {
			cfg, err = s.Exactly.identity(ctx)
			return err
		})
		return cfg, err
	}
	if err := s.Exactly.Start(ctx, begun, identity); err != nil {
		return err
	}
	if ctx.Err() != nil {
		s.recorded = true // the next leader reads in Kafka what was sent
		return nil        //nolint:nilerr // the stop has ended the start
	}
	err := s.Load()
	if err == nil {
		s.Exactly.Ready()
	}
	return err
}

// sendExactly sends a batch in transactions.
func (s *Session) sendExactly(ctx context.Context, batch []envelope.Event) error {
	for len(batch) > 0 && ctx.Err() == nil {
		decided, err := s.sendTransaction(ctx, batch)
		if err != nil {
			return err
		}
		if batch = batch[decided:]; len(batch) > 0 || !s.Window.drained() {
			if err := s.record(nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendTransaction sends the first events of a batch in a transaction that is committed meanwhile, and returns their
// number.
func (s *Session) sendTransaction(ctx context.Context, batch []envelope.Event) (decided int, err error) {
	x, start := s.Exactly, time.Now()
	if !x.Lock() {
		return 0, errDoubt(errUnready)
	}
	defer x.Unlock()
	outcomes, err := x.Deliver(ctx, s.Held, batch, s.Parked)
	if err != nil {
		return 0, err
	}
	decided, failures := s.Failures(batch, outcomes)
	if decided == 0 { // the relay stops
		return 0, nil
	}
	last := batch[decided-1].ID
	s.pos.Last, s.pos.Highest, s.recorded = last, max(s.pos.Highest, last), false
	if len(failures) > 0 {
		if err := s.record(failures); err != nil {
			return 0, err
		}
	}
	if err := x.Commit(batch[:decided], outcomes[:decided]); err != nil {
		return 0, err
	}
	s.Log.Debug("outbox: transaction sent", "events", decided, "of", len(batch), "failed", len(failures), "last", last, "took", time.Since(start))
	s.notifyRejected(failures)
	return decided, nil
}

// awaitConfirmed waits until Kafka has confirmed what was sent. Then the position has to be written once more, as
// confirmed.
func (s *Session) awaitConfirmed() error {
	if s.Exactly == nil || !s.Exactly.IsReady() {
		return nil
	}
	ctx, cancel := context.WithTimeout(s.Held, s.Rules.SendTimeout)
	defer cancel()
	confirmed, err := s.Exactly.AwaitConfirmed(ctx)
	if err != nil {
		return err
	}
	if confirmed {
		return nil
	}
	s.recorded = false
	return s.record(nil)
}
