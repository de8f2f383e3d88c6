package main

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlReward makes the table of the reward service. Points are what their entries sum up to, so it does not matter in
// which order they come. Nothing but event_handled keeps an entry from being there twice.
const sqlReward = `
CREATE TABLE reward_entry (
    order_id    uuid   NOT NULL,
    customer_id text   NOT NULL,
    points      bigint NOT NULL
)`

const (
	rewardGroup = "reward"
	sqlPoints   = `INSERT INTO reward_entry (order_id, customer_id, points) VALUES ($1, $2, $3)`
)

// rewardHandlers are those of the group reward: points for an order, and the compensation.
func rewardHandlers() []outbox.Handler {
	book := func(ctx context.Context, tx pgx.Tx, order uuid.UUID, customer string, points int64) error {
		_, err := tx.Exec(ctx, sqlPoints, order, customer, points)
		return err
	}
	return []outbox.Handler{
		outbox.Handle("POINTS_EARNED", func(ctx context.Context, tx pgx.Tx, e PointsEarned, _ outbox.Metadata) error {
			return book(ctx, tx, e.OrderID, e.CustomerID, e.Points)
		}),
		outbox.Handle("POINTS_REVOKED", func(ctx context.Context, tx pgx.Tx, e PointsRevoked, _ outbox.Metadata) error {
			return book(ctx, tx, e.OrderID, e.CustomerID, -e.Points)
		}),
	}
}

// sqlSales makes a read model: what was sold. It is one row, which all transactions of the group wait for; where that
// is too slow, outbox.HandleBatch adds up many events first.
const sqlSales = `
CREATE TABLE sales (
    orders bigint NOT NULL,
    cents  bigint NOT NULL
);
INSERT INTO sales VALUES (0, 0)`

const (
	salesGroup = "sales"
	sqlSold    = `UPDATE sales SET orders = orders + 1, cents = cents + $1`
)

// salesHandlers are those of the group sales. The group came later than the others, and no other
// service was changed for it: the events are there.
func salesHandlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.Handle("SALE_COUNTED", func(ctx context.Context, tx pgx.Tx, e OrderCompleted, _ outbox.Metadata) error {
			_, err := tx.Exec(ctx, sqlSold, e.Total)
			return err
		}),
	}
}
