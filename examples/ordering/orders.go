package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlOrders makes the table of the orders service.
const sqlOrders = `
CREATE TABLE orders (
    id          uuid        PRIMARY KEY,
    customer_id text        NOT NULL,
    items       jsonb       NOT NULL,
    total       bigint      NOT NULL,
    status      text        NOT NULL DEFAULT 'CREATED' CHECK (status IN ('CREATED', 'COMPLETED', 'CANCELLED')),
    reason      text        CHECK ((reason IS NOT NULL) = (status = 'CANCELLED')),
    created_at  timestamptz NOT NULL DEFAULT now(),
    ended_at    timestamptz
)`

// recorder is all that a service knows of how events travel: there is no Kafka in it.
type recorder interface {
	Record(ctx context.Context, tx pgx.Tx, events ...outbox.DomainEvent) error
}

// inTx runs a function in a transaction and commits it, as outbox.Waker.InTx does.
type inTx func(ctx context.Context, f func(tx pgx.Tx) error) error

// orders is the orders service. It is safe for concurrent use, in any number of processes.
type orders struct {
	inTx   inTx
	events recorder
}

const sqlCreate = `INSERT INTO orders (id, customer_id, items, total) VALUES ($1, $2, $3, $4) ON CONFLICT (id) DO NOTHING`

// createOrder takes an order, and asks three services to do their part: all of that commits, or nothing. An order
// that is there already stays as it is.
func (s orders) createOrder(ctx context.Context, o NewOrder) error {
	if err := o.check(); err != nil {
		return err
	}
	return s.inTx(ctx, func(tx pgx.Tx) error {
		sum := total(o.Items)
		added, err := tx.Exec(ctx, sqlCreate, o.ID, o.CustomerID, o.Items, sum)
		if err != nil || added.RowsAffected() == 0 {
			return err
		}
		is := now(o.ID)
		return s.events.Record(ctx, tx,
			OrderCreated{is, o.CustomerID, o.Items, sum},
			ReservationRequested{is, o.Items},
			PointsEarned{is, o.CustomerID, points(sum)},
			NotificationRequired{is, o.CustomerID, Created, "we have your order"},
		)
	})
}

// cancelOrder cancels an order that is not completed.
func (s orders) cancelOrder(ctx context.Context, id uuid.UUID, reason string) error {
	return s.inTx(ctx, func(tx pgx.Tx) error { return s.cancel(ctx, tx, id, reason) })
}

// cancel is the compensation: it takes back the requests of createOrder, whether or not they are
// done by now.
func (s orders) cancel(ctx context.Context, tx pgx.Tx, id uuid.UUID, reason string) error {
	if reason == "" {
		return fmt.Errorf("order %s: %w", id, errReason)
	}
	ended, o, err := end(ctx, tx, id, Cancelled, &reason)
	if err != nil || !ended {
		return err
	}
	is := now(id)
	return s.events.Record(ctx, tx,
		OrderCancelled{is, o.customer, reason},
		ReleaseRequested{is},
		PointsRevoked{is, o.customer, points(o.total)},
		NotificationRequired{is, o.customer, Cancelled, "your order is cancelled: " + reason},
	)
}

// completeOrder completes an order that is not cancelled.
func (s orders) completeOrder(ctx context.Context, id uuid.UUID) error {
	return s.inTx(ctx, func(tx pgx.Tx) error { return s.complete(ctx, tx, id) })
}

func (s orders) complete(ctx context.Context, tx pgx.Tx, id uuid.UUID) error {
	ended, o, err := end(ctx, tx, id, Completed, nil)
	if err != nil || !ended {
		return err
	}
	is := now(id)
	return s.events.Record(ctx, tx,
		OrderCompleted{is, o.customer, o.total},
		NotificationRequired{is, o.customer, Completed, "your order is on its way"},
	)
}

// endedOrder is what events say of an order that has ended.
type endedOrder struct {
	customer string
	total    int64
}

const (
	sqlEnd    = `UPDATE orders SET status = $2, reason = $3, ended_at = now() WHERE id = $1 AND status = 'CREATED' RETURNING customer_id, total`
	sqlStatus = `SELECT status FROM orders WHERE id = $1`
)

// end ends an order. A customer and the inventory may want that at the same time, each in another way: the row has a
// lock, and who is second gets errEnded. Who asks again for what is done already gets no error, and false.
func end(ctx context.Context, tx pgx.Tx, id uuid.UUID, as Status, reason *string) (ended bool, o endedOrder, err error) {
	err = tx.QueryRow(ctx, sqlEnd, id, as, reason).Scan(&o.customer, &o.total)
	if !errors.Is(err, pgx.ErrNoRows) {
		return err == nil, o, err
	}
	var is Status
	err = tx.QueryRow(ctx, sqlStatus, id).Scan(&is)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = fmt.Errorf("order %s: %w", id, errUnknown)
	case err == nil && is != as:
		err = fmt.Errorf("order %s is %s: %w", id, is, errEnded)
	}
	return false, o, err
}

const ordersGroup = "orders"

// handlers are those of the group orders: what the inventory answers. Their changes, the events that they record, and
// the note that the answer was handled commit together.
func (s orders) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.Handle("ORDER_COMPLETED", func(ctx context.Context, tx pgx.Tx, e StockReserved, _ outbox.Metadata) error {
			err := s.complete(ctx, tx, e.OrderID)
			if errors.Is(err, errEnded) {
				return nil // the customer has cancelled meanwhile, and so asked the inventory for the release
			}
			return err
		}),
		outbox.Handle("ORDER_CANCELLED", func(ctx context.Context, tx pgx.Tx, e StockShort, _ outbox.Metadata) error {
			return s.cancel(ctx, tx, e.OrderID, fmt.Sprintf("%d of %s are left, and %d were ordered", e.Available, e.ProductID, e.Wanted))
		}),
	}
}
