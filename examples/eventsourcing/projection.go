package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlReadModel makes the tables that are read. All of it can be made again from the events.
const sqlReadModel = `
CREATE TABLE orders (
    id              uuid PRIMARY KEY,
    order_number    text        NOT NULL,
    user_id         bigint      NOT NULL,
    total_amount    bigint      NOT NULL,
    discount_amount bigint      NOT NULL,
    final_amount    bigint      NOT NULL,
    used_coupon_id  bigint,
    status          text        NOT NULL,
    payment_id      bigint,
    reason          text        NOT NULL,
    cancelled_by    text        NOT NULL,
    refund_amount   bigint,
    version         int         NOT NULL,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL
);
CREATE TABLE order_items (
    order_id   uuid   NOT NULL REFERENCES orders ON DELETE CASCADE,
    product_id bigint NOT NULL,
    quantity   bigint NOT NULL,
    price      bigint NOT NULL,
    PRIMARY KEY (order_id, product_id)
)`

// orderProjected is the action of the projection.
const orderProjected = "ORDER_PROJECTED"

// projection keeps the read model.
type projection struct {
	db  *pgxpool.Pool
	log *slog.Logger
}

// handlers are those of the group order-projection, of a consumer or of a worker.
func (p projection) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.Handle(orderProjected, on[OrderCreated](p)),
		outbox.Handle(orderProjected, on[OrderConfirmed](p)),
		outbox.Handle(orderProjected, on[OrderCompleted](p)),
		outbox.Handle(orderProjected, on[OrderCancelled](p)),
		outbox.Handle(orderProjected, on[OrderFailed](p)),
	}
}

func on[E OrderEvent](p projection) func(context.Context, pgx.Tx, E, outbox.Metadata) error {
	return func(ctx context.Context, tx pgx.Tx, e E, _ outbox.Metadata) error { return p.project(ctx, tx, e) }
}

// project brings an order forward by one event, in the transaction of the consumer. It changes
// nothing but the version before that of the event. Where another one is there, a rebuild was
// faster, or something is wrong.
func (p projection) project(ctx context.Context, tx pgx.Tx, e OrderEvent) error {
	var change Order
	change.apply(e)
	update := p.update
	if change.Version == 1 {
		update = p.insert
	}
	changed, err := update(ctx, tx, change.State)
	if err != nil {
		return fmt.Errorf("project version %d of order %s: %w", change.Version, change.ID, err)
	}
	p.log.DebugContext(ctx, "order projected", "order", change.ID, "version", change.Version, "changed", changed)
	if changed {
		return nil
	}
	return p.catchUp(ctx, tx, e.fact())
}

const sqlInsertOrder = `
WITH new AS (
    INSERT INTO orders (id, order_number, user_id, total_amount, discount_amount, final_amount, used_coupon_id,
                        status, payment_id, reason, cancelled_by, refund_amount, version, created_at, updated_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)
        ON CONFLICT (id) DO NOTHING
    RETURNING id)
INSERT INTO order_items (order_id, product_id, quantity, price)
SELECT new.id, item.* FROM new, unnest($16::bigint[], $17::bigint[], $18::bigint[]) AS item`

func (p projection) insert(ctx context.Context, tx pgx.Tx, s State) (changed bool, err error) {
	var products, quantities, prices []int64
	for _, item := range s.Items {
		products, quantities, prices = append(products, item.ProductID), append(quantities, item.Quantity), append(prices, item.Price)
	}
	tag, err := tx.Exec(ctx, sqlInsertOrder,
		s.ID, s.OrderNumber, s.UserID, s.TotalAmount, s.DiscountAmount, s.FinalAmount, s.UsedCouponID,
		s.Status, s.PaymentID, s.Reason, s.CancelledBy, s.RefundAmount, s.Version, s.CreatedAt, s.UpdatedAt,
		products, quantities, prices)
	return tag.RowsAffected() > 0, err
}

const sqlUpdateOrder = `
UPDATE orders
   SET status = $3, payment_id = coalesce($4, payment_id), reason = $5, cancelled_by = $6, refund_amount = $7,
       updated_at = $8, version = $2
 WHERE id = $1 AND version = $2 - 1`

func (p projection) update(ctx context.Context, tx pgx.Tx, s State) (changed bool, err error) {
	tag, err := tx.Exec(ctx, sqlUpdateOrder, s.ID, s.Version, s.Status, s.PaymentID, s.Reason, s.CancelledBy, s.RefundAmount, s.UpdatedAt)
	return tag.RowsAffected() > 0, err
}

const sqlIsProjected = `SELECT EXISTS (SELECT FROM orders WHERE id = $1 AND version >= $2)`

// catchUp is for an event that does not follow the version in the read model.
func (p projection) catchUp(ctx context.Context, tx pgx.Tx, f Fact) error {
	var projected bool
	if err := tx.QueryRow(ctx, sqlIsProjected, f.OrderID, f.Version).Scan(&projected); err != nil || projected {
		return err
	}
	return p.rebuild(ctx, tx, f.OrderID)
}

// RebuildOrder makes an order of the read model again from its events, while others come.
func (p projection) RebuildOrder(ctx context.Context, id uuid.UUID) error {
	return pgx.BeginFunc(ctx, p.db, func(tx pgx.Tx) error { return p.rebuild(ctx, tx, id) })
}

// rebuild removes the order before it reads the events. So who projects an event of the order
// waits until this transaction has ended, and then finds all that was stored when it read: it
// can neither overwrite something newer nor be overwritten by something older. Had it read
// first, an event that came in between would be lost.
func (p projection) rebuild(ctx context.Context, tx pgx.Tx, id uuid.UUID) error {
	if _, err := tx.Exec(ctx, `DELETE FROM orders WHERE id = $1`, id); err != nil {
		return fmt.Errorf("rebuild order %s: %w", id, err)
	}
	events, err := history(ctx, tx, id, 0, present)
	if err != nil || len(events) == 0 {
		return err
	}
	o, err := Rebuild(events) // not from a snapshot: this is a repair
	if err != nil {
		return err
	}
	// If it was not there to be removed, its first event may be projected just now. What
	// follows comes by itself.
	if _, err = p.insert(ctx, tx, o.State); err != nil {
		return fmt.Errorf("rebuild order %s: %w", id, err)
	}
	return nil
}

const sqlAllOrders = `SELECT DISTINCT aggregate_id FROM order_events WHERE aggregate_id > $1 ORDER BY aggregate_id LIMIT 1000`

// RebuildAll makes the read model again, while events flow. Each order has a transaction of
// its own, which locks nothing else.
func (p projection) RebuildAll(ctx context.Context) error {
	for last := uuid.Nil; ; {
		rows, _ := p.db.Query(ctx, sqlAllOrders, last) // CollectRows returns its error
		ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		if err != nil || len(ids) == 0 {
			return err
		}
		for _, id := range ids {
			if err := p.RebuildOrder(ctx, id); err != nil {
				return err
			}
		}
		last = ids[len(ids)-1]
	}
}
