package main

import (
	"context"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlStatistics makes the tables of the statistics. like_changes says which likes are
// counted: each can begin once and end once.
const sqlStatistics = `
CREATE TABLE product_statistic (
    product_id  bigint PRIMARY KEY,
    like_count  bigint NOT NULL DEFAULT 0,
    sales_count bigint NOT NULL DEFAULT 0,
    view_count  bigint NOT NULL DEFAULT 0
);
CREATE TABLE like_changes (
    like_id bigint   NOT NULL,
    change  smallint NOT NULL CHECK (change IN (1, -1)),
    UNIQUE (like_id, change)
)`

// The actions of the group product-statistics.
const (
	salesCounted = "SALES_COUNT_INCREASED"
	viewsCounted = "VIEW_COUNT_INCREASED"
	likeCounted  = "LIKE_COUNT_INCREASED"
	likeTakenOff = "LIKE_COUNT_DECREASED"
)

// statistics counts what is liked, sold and viewed.
type statistics struct {
	db  *pgxpool.Pool
	log *slog.Logger
}

// handlers are those of the group product-statistics. Sales and views have no key of their own that
// identifies a repeat, so event_handled notes them. Sales are noted once per order, because an
// order may be announced twice. Views are noted once per event, because a customer who looks twice
// counts twice. Likes have a key of their own.
func (s statistics) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.OncePer(outbox.HandleBatch(salesCounted, s.orderPaid), func(e OrderPaidEventV1, _ outbox.Metadata) (string, string) {
			return "Order", number(e.OrderID)
		}),
		outbox.OncePer(outbox.HandleBatch(viewsCounted, s.productViewed), func(e ProductViewedEventV1, m outbox.Metadata) (string, string) {
			return "ProductView", number(e.ProductID) + "_" + m.ID
		}),
		outbox.HandleNoTx(likeCounted, s.likeCreated),
		outbox.HandleNoTx(likeTakenOff, s.likeCanceled),
	}
}

// sqlSold adds up before it writes, and locks the rows in the order of products: two
// partitions that sell the same products wait for each other, and never in a circle.
const sqlSold = `
INSERT INTO product_statistic AS s (product_id, sales_count)
SELECT product_id, sum(quantity)
  FROM unnest($1::bigint[], $2::bigint[]) AS sold (product_id, quantity)
 GROUP BY product_id
 ORDER BY product_id
    ON CONFLICT (product_id) DO UPDATE SET sales_count = s.sales_count + excluded.sales_count`

func (s statistics) orderPaid(ctx context.Context, tx pgx.Tx, orders []outbox.Received[OrderPaidEventV1]) error {
	var products, quantities []int64
	for _, order := range orders {
		for _, item := range order.Event.Items {
			products, quantities = append(products, item.ProductID), append(quantities, item.Quantity)
		}
		s.logCounted(ctx, "order counted", order.Metadata)
	}
	_, err := tx.Exec(ctx, sqlSold, products, quantities)
	return err
}

const sqlViewed = `
INSERT INTO product_statistic AS s (product_id, view_count)
SELECT product_id, count(*)
  FROM unnest($1::bigint[]) AS viewed (product_id)
 GROUP BY product_id
 ORDER BY product_id
    ON CONFLICT (product_id) DO UPDATE SET view_count = s.view_count + excluded.view_count`

func (s statistics) productViewed(ctx context.Context, tx pgx.Tx, views []outbox.Received[ProductViewedEventV1]) error {
	products := make([]int64, len(views))
	for i, view := range views {
		products[i] = view.Event.ProductID
		s.logCounted(ctx, "view counted", view.Metadata)
	}
	_, err := tx.Exec(ctx, sqlViewed, products)
	return err
}

// logCounted writes a line with the trace id of the request. The context of a handler of one
// event has it; a batch has many.
func (s statistics) logCounted(ctx context.Context, what string, m outbox.Metadata) {
	s.log.DebugContext(outbox.WithCorrelationID(ctx, m.Extensions["correlationid"]), what, "subject", m.Subject)
}

// sqlLiked counts a change if it is new. One statement is one transaction: nothing
// is counted that is not in like_changes, nor the other way round. A repeat finds
// its row, also when it comes after the like has ended. Were the row of a like
// deleted at its end instead, such a repeat would count as a new like.
const sqlLiked = `
WITH fresh AS (
	INSERT INTO like_changes (like_id, change) VALUES ($1, $2)
	    ON CONFLICT DO NOTHING
	RETURNING change)
INSERT INTO product_statistic AS s (product_id, like_count)
SELECT $3::bigint, change FROM fresh
    ON CONFLICT (product_id) DO UPDATE SET like_count = s.like_count + excluded.like_count`

func (s statistics) likeCreated(ctx context.Context, e LikeCreatedEventV1, _ outbox.Metadata) error {
	s.log.DebugContext(ctx, "like counted", "product", e.ProductID)
	_, err := s.db.Exec(ctx, sqlLiked, e.LikeID, 1, e.ProductID)
	return err
}

func (s statistics) likeCanceled(ctx context.Context, e LikeCanceledEventV1, _ outbox.Metadata) error {
	_, err := s.db.Exec(ctx, sqlLiked, e.LikeID, -1, e.ProductID)
	return err
}
