package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlShop makes the shop's own tables.
const sqlShop = `
CREATE TABLE products (
    id    bigint PRIMARY KEY,
    stock bigint NOT NULL
);
CREATE TABLE orders (
    id      bigserial PRIMARY KEY,
    user_id bigint  NOT NULL,
    paid    boolean NOT NULL DEFAULT false
);
CREATE TABLE order_items (
    order_id   bigint NOT NULL REFERENCES orders,
    product_id bigint NOT NULL REFERENCES products,
    quantity   bigint NOT NULL,
    PRIMARY KEY (order_id, product_id)
);
CREATE TABLE likes (
    id         bigserial PRIMARY KEY,
    product_id bigint NOT NULL REFERENCES products,
    user_id    bigint NOT NULL,
    UNIQUE (product_id, user_id)
)`

// shop sells. It is safe for concurrent use.
type shop struct {
	db   *pgxpool.Pool
	rec  *outbox.Recorder
	wake func() // called after each commit
}

// commit runs f in a transaction and records the events that it returns: either all
// of it is there afterwards, or nothing.
func (s *shop) commit(ctx context.Context, f func(tx pgx.Tx) ([]outbox.DomainEvent, error)) error {
	err := pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		events, err := f(tx)
		if err != nil {
			return err
		}
		return s.rec.Record(ctx, tx, events...)
	})
	if err == nil {
		s.wake()
	}
	return err
}

const sqlOrder = `
WITH placed AS (INSERT INTO orders (user_id) VALUES ($1) RETURNING id),
     items AS (INSERT INTO order_items SELECT id, i.* FROM placed, unnest($2::bigint[], $3::bigint[]) AS i)
SELECT id FROM placed`

func (s *shop) place(ctx context.Context, o *Order) error {
	return s.commit(ctx, func(tx pgx.Tx) ([]outbox.DomainEvent, error) {
		var products, quantities []int64
		for _, item := range o.Items {
			products, quantities = append(products, item.ProductID), append(quantities, item.Quantity)
		}
		err := tx.QueryRow(ctx, sqlOrder, o.UserID, products, quantities).Scan(&o.ID)
		return o.Place(now()), err
	})
}

const (
	sqlPaid = `UPDATE orders SET paid = true WHERE id = $1 AND NOT paid`
	sqlTake = `UPDATE products SET stock = stock - $2 WHERE id = $1 RETURNING stock`
)

// pay is called when the money has come in, by a provider who may call twice. A
// second call changes nothing, and yet announces the order again: nobody has
// thought of it, and the statistics must be right all the same.
func (s *shop) pay(ctx context.Context, o Order) error {
	return s.commit(ctx, func(tx pgx.Tx) ([]outbox.DomainEvent, error) {
		events := o.Pay(now())
		paid, err := tx.Exec(ctx, sqlPaid, o.ID)
		if err != nil || paid.RowsAffected() == 0 {
			return events, err
		}
		for _, item := range o.Items { // sorted, so that two orders do not wait for each other
			var left int64
			if err := tx.QueryRow(ctx, sqlTake, item.ProductID, item.Quantity).Scan(&left); err != nil {
				return nil, err
			}
			events = append(events, item.Taken(left, now())...)
		}
		return events, nil
	})
}

func (s *shop) decline(ctx context.Context, o Order) error {
	return s.commit(ctx, func(pgx.Tx) ([]outbox.DomainEvent, error) { return o.Decline(now()), nil })
}

func (s *shop) view(ctx context.Context, user, product int64) error {
	return s.commit(ctx, func(pgx.Tx) ([]outbox.DomainEvent, error) {
		return []outbox.DomainEvent{ProductViewedEventV1{ProductID: product, UserID: user, happened: now()}}, nil
	})
}

const (
	sqlLike   = `INSERT INTO likes (product_id, user_id) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING id`
	sqlUnlike = `DELETE FROM likes WHERE product_id = $1 AND user_id = $2 RETURNING id`
)

// like is a click on the heart: it likes a product, or no longer does.
func (s *shop) like(ctx context.Context, user, product int64) error {
	return s.commit(ctx, func(tx pgx.Tx) ([]outbox.DomainEvent, error) {
		var id int64
		err := tx.QueryRow(ctx, sqlLike, product, user).Scan(&id)
		if err == nil {
			return []outbox.DomainEvent{LikeCreatedEventV1{LikeID: id, UserID: user, ProductID: product, happened: now()}}, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, err
		}
		if err = tx.QueryRow(ctx, sqlUnlike, product, user).Scan(&id); err == nil {
			return []outbox.DomainEvent{LikeCanceledEventV1{LikeID: id, UserID: user, ProductID: product, happened: now()}}, nil
		}
		if errors.Is(err, pgx.ErrNoRows) { // another click came in between
			err = nil
		}
		return nil, err
	})
}

// Every third product runs out of stock in a run of some hundred visits.
const sqlProducts = `
INSERT INTO products (id, stock)
SELECT id, CASE WHEN id % 3 = 0 THEN 10 ELSE 1000000 END FROM generate_series(1, $1::bigint) AS id`

// open fills the shelves and renders the pages.
func (s *shop) open(ctx context.Context, pages pages) error {
	if _, err := s.db.Exec(ctx, sqlProducts, products); err != nil {
		return fmt.Errorf("fill shelves: %w", err)
	}
	for product := range int64(products) {
		if err := pages.put(ctx, product+1, "<h1>Product</h1>"); err != nil {
			return fmt.Errorf("render pages: %w", err)
		}
	}
	return nil
}
