package main

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
)

// Orders are the commands of the order service. They are safe for concurrent use, also in many
// processes.
type Orders struct {
	store      *EventStore
	conflicted func() // called when another command was faster
}

// maxTries bounds how often a command decides. Who loses that often gets ErrConflict.
const maxTries = 5

// CreateOrder places an order.
func (s *Orders) CreateOrder(ctx context.Context, n NewOrder) (*Order, error) {
	id, err := newID()
	if err != nil {
		return nil, err
	}
	o, err := Create(id, n, time.Now())
	if err != nil {
		return nil, err
	}
	return o, s.store.Save(ctx, o)
}

// ConfirmOrder says that an order is paid.
func (s *Orders) ConfirmOrder(ctx context.Context, id uuid.UUID, paymentID *int64) (*Order, error) {
	return s.change(ctx, id, func(o *Order) error { return o.Confirm(paymentID, time.Now()) })
}

// CompleteOrder says that an order is delivered.
func (s *Orders) CompleteOrder(ctx context.Context, id uuid.UUID) (*Order, error) {
	return s.change(ctx, id, func(o *Order) error { return o.Complete(time.Now()) })
}

// CancelOrder cancels an order.
func (s *Orders) CancelOrder(ctx context.Context, id uuid.UUID, reason, by string) (*Order, error) {
	return s.change(ctx, id, func(o *Order) error { return o.Cancel(reason, by, time.Now()) })
}

// FailOrder says that nothing comes of an order.
func (s *Orders) FailOrder(ctx context.Context, id uuid.UUID, reason string) (*Order, error) {
	return s.change(ctx, id, func(o *Order) error { return o.Fail(reason, time.Now()) })
}

// change loads an order, decides, and saves. If another command has changed the order meanwhile,
// change loads it again: a decision that was right for the old version may be wrong for the new
// one. An order that was loaded is never locked.
func (s *Orders) change(ctx context.Context, id uuid.UUID, decide func(*Order) error) (*Order, error) {
	for try := 1; ; try++ {
		o, err := s.store.Load(ctx, id)
		if err != nil {
			return nil, err
		}
		if err := decide(o); err != nil {
			return nil, err
		}
		err = s.store.Save(ctx, o)
		if errors.Is(err, ErrConflict) {
			s.conflicted()
			if try < maxTries {
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		return o, nil
	}
}
