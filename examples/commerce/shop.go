package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlShop makes the shop's own tables.
const sqlShop = `
CREATE TABLE products (
    id    bigint PRIMARY KEY,
    price bigint NOT NULL,
    stock bigint NOT NULL
);
CREATE TABLE orders (
    id      bigserial PRIMARY KEY,
    user_id bigint NOT NULL,
    state   text   NOT NULL DEFAULT 'placed' CHECK (state IN ('placed', 'paid', 'declined'))
);
CREATE TABLE order_items (
    order_id   bigint NOT NULL REFERENCES orders,
    product_id bigint NOT NULL REFERENCES products,
    quantity   bigint NOT NULL CHECK (quantity > 0),
    price      bigint NOT NULL,
    PRIMARY KEY (order_id, product_id)
);
CREATE TABLE likes (
    id         bigserial PRIMARY KEY,
    product_id bigint NOT NULL REFERENCES products,
    user_id    bigint NOT NULL,
    UNIQUE (product_id, user_id)
)`

var (
	errNotFound = errors.New("there is no such thing")
	errConflict = errors.New("the order is not in a state for this")
)

// shop sells. It is safe for concurrent use.
type shop struct {
	rec   *outbox.Recorder
	inbox *outbox.Inbox
	inTx  func(ctx context.Context, f func(pgx.Tx) error) error // commits, and wakes the relay
}

// commit runs f in a transaction and records the events that it returns: either all
// of it is there afterwards, or nothing.
func (s *shop) commit(ctx context.Context, f func(tx pgx.Tx) ([]outbox.DomainEvent, error)) error {
	return s.inTx(ctx, func(tx pgx.Tx) error {
		events, err := f(tx)
		if err != nil {
			return err
		}
		return s.rec.Record(ctx, tx, events...)
	})
}

const (
	sqlPrices = `SELECT id, price FROM products WHERE id = ANY ($1)`
	sqlOrder  = `
WITH placed AS (INSERT INTO orders (user_id) VALUES ($1) RETURNING id),
     items AS (INSERT INTO order_items SELECT id, i.* FROM placed, unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS i)
SELECT id FROM placed`
)

// place places an order, and returns the answer to the request.
func (s *shop) place(ctx context.Context, o *Order) (answer json.RawMessage, err error) {
	err = s.inTx(ctx, func(tx pgx.Tx) (err error) {
		answer, err = s.placeIn(ctx, tx, o)
		return err
	})
	return answer, err
}

// placeOnce is place for a request that clients may send again, also at the same time: the order is placed once, and
// all get the same answer.
func (s *shop) placeOnce(ctx context.Context, request outbox.InboxMessage, o *Order) (answer json.RawMessage, err error) {
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		// A repeat waits for the first request no longer than this; then it gets a 409.
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '2s'`); err != nil {
			return err
		}
		answer, err = s.inbox.Once(ctx, tx, request, func() ([]byte, error) { return s.placeIn(ctx, tx, o) })
		return err
	})
	return answer, err
}

// placeIn gives an order its prices and its id, and records what has happened.
func (s *shop) placeIn(ctx context.Context, tx pgx.Tx, o *Order) (answer []byte, err error) {
	at := now()
	var products, quantities, prices []int64
	for _, item := range o.Items {
		products, quantities = append(products, item.ProductID), append(quantities, item.Quantity)
	}
	list := map[int64]int64{}
	rows, _ := tx.Query(ctx, sqlPrices, products) // ForEachRow returns its error
	var id, price int64
	if _, err := pgx.ForEachRow(rows, []any{&id, &price}, func() error { list[id] = price; return nil }); err != nil {
		return nil, err
	}
	for i, item := range o.Items {
		price, sells := list[item.ProductID]
		if !sells {
			return nil, fmt.Errorf("product %d: %w", item.ProductID, errNotFound)
		}
		o.Items[i].Price, prices = price, append(prices, price)
	}
	if err := tx.QueryRow(ctx, sqlOrder, o.UserID, products, quantities, prices).Scan(&o.ID); err != nil {
		return nil, err
	}
	if err := s.rec.Record(ctx, tx, o.Place(at)...); err != nil {
		return nil, err
	}
	return json.Marshal(orderAnswer{o.ID, o.Total()})
}

const (
	sqlFind    = `SELECT user_id FROM orders WHERE id = $1`
	sqlItems   = `SELECT product_id, quantity, price FROM order_items WHERE order_id = $1 ORDER BY product_id`
	sqlPaid    = `UPDATE orders SET state = 'paid' WHERE id = $1 AND state = 'placed'`
	sqlIsPaid  = `SELECT state = 'paid' FROM orders WHERE id = $1`
	sqlDecline = `UPDATE orders SET state = 'declined' WHERE id = $1 AND state = 'placed'`
	sqlTake    = `UPDATE products SET stock = stock - $2 WHERE id = $1 RETURNING stock`
)

func find(ctx context.Context, tx pgx.Tx, id int64) (Order, error) {
	o := Order{ID: id}
	err := tx.QueryRow(ctx, sqlFind, id).Scan(&o.UserID)
	if errors.Is(err, pgx.ErrNoRows) {
		return o, fmt.Errorf("order %d: %w", id, errNotFound)
	}
	if err != nil {
		return o, err
	}
	rows, _ := tx.Query(ctx, sqlItems, id) // CollectRows returns its error
	o.Items, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Item])
	return o, err
}

// pay is called when the money has come in, by a provider who may call twice. A second call changes
// nothing in the order, and yet announces it again. This is a deliberate mistake: the statistics
// must be right all the same.
func (s *shop) pay(ctx context.Context, id int64) error {
	at := now()
	return s.commit(ctx, func(tx pgx.Tx) ([]outbox.DomainEvent, error) {
		o, err := find(ctx, tx, id)
		if err != nil {
			return nil, err
		}
		events := o.Pay(at)
		paid, err := tx.Exec(ctx, sqlPaid, id)
		if err != nil {
			return nil, err
		}
		if paid.RowsAffected() == 0 {
			var isPaid bool
			if err := tx.QueryRow(ctx, sqlIsPaid, id).Scan(&isPaid); err != nil || isPaid {
				return events, err
			}
			return nil, fmt.Errorf("pay order %d: %w", id, errConflict)
		}
		for _, item := range o.Items { // sorted, so that two orders do not wait for each other
			var left int64
			if err := tx.QueryRow(ctx, sqlTake, item.ProductID, item.Quantity).Scan(&left); err != nil {
				return nil, err
			}
			events = append(events, item.Taken(left, at)...)
		}
		return events, nil
	})
}

// decline is called when the money does not come.
func (s *shop) decline(ctx context.Context, id int64) error {
	at := now()
	return s.commit(ctx, func(tx pgx.Tx) ([]outbox.DomainEvent, error) {
		o, err := find(ctx, tx, id)
		if err != nil {
			return nil, err
		}
		declined, err := tx.Exec(ctx, sqlDecline, id)
		if err == nil && declined.RowsAffected() == 0 {
			err = fmt.Errorf("decline order %d: %w", id, errConflict)
		}
		return o.Decline(at), err
	})
}

func (s *shop) view(ctx context.Context, user, product int64) error {
	at := now()
	return s.commit(ctx, func(pgx.Tx) ([]outbox.DomainEvent, error) {
		return []outbox.DomainEvent{ProductViewedEventV1{ProductID: product, UserID: user, happened: at}}, nil
	})
}

const (
	sqlLike   = `INSERT INTO likes (product_id, user_id) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING id`
	sqlUnlike = `DELETE FROM likes WHERE product_id = $1 AND user_id = $2 RETURNING id`
)

// like is a click on the heart: it likes a product, or no longer does.
func (s *shop) like(ctx context.Context, user, product int64) error {
	at := now()
	return s.commit(ctx, func(tx pgx.Tx) ([]outbox.DomainEvent, error) {
		var id int64
		err := tx.QueryRow(ctx, sqlLike, product, user).Scan(&id)
		if err == nil {
			return []outbox.DomainEvent{LikeCreatedEventV1{LikeID: id, UserID: user, ProductID: product, happened: at}}, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, err
		}
		if err = tx.QueryRow(ctx, sqlUnlike, product, user).Scan(&id); err == nil {
			return []outbox.DomainEvent{LikeCanceledEventV1{LikeID: id, UserID: user, ProductID: product, happened: at}}, nil
		}
		if errors.Is(err, pgx.ErrNoRows) { // another click came in between
			err = nil
		}
		return nil, err
	})
}
