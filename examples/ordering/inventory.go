package main

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlInventory makes the tables of the inventory. What is taken and given back is a row of stock_movement each, with
// nothing that would hide one that is there twice.
const sqlInventory = `
CREATE TABLE stock (
    product_id text   PRIMARY KEY,
    initial    bigint NOT NULL,
    available  bigint NOT NULL CHECK (available >= 0)
);
CREATE TABLE reservation (
    order_id uuid PRIMARY KEY,
    status   text NOT NULL CHECK (status IN ('RESERVED', 'SHORT', 'RELEASED'))
);
CREATE TABLE stock_movement (
    order_id   uuid   NOT NULL,
    product_id text   NOT NULL REFERENCES stock,
    quantity   bigint NOT NULL
);
CREATE INDEX stock_movement_order_idx ON stock_movement (order_id)`

const inventoryGroup = "inventory"

// inventory puts items aside for orders. It knows nothing of orders but what is in the events.
type inventory struct{ events recorder }

// handlers are those of the group inventory. What they do, the answer that they record and the note that it is done
// commit together. It is done once for an order, also if the request comes under another event id.
func (i inventory) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.OncePer(outbox.Handle("STOCK_RESERVED", i.reserve),
			func(e ReservationRequested, _ outbox.Metadata) (string, string) { return aggregate, e.order() }),
		outbox.OncePer(outbox.Handle("STOCK_RELEASED", i.release),
			func(e ReleaseRequested, _ outbox.Metadata) (string, string) { return aggregate, e.order() }),
	}
}

const (
	// sqlClaim does nothing for an order that was released before: see sqlRelease.
	sqlClaim = `INSERT INTO reservation (order_id, status) VALUES ($1, 'RESERVED') ON CONFLICT (order_id) DO NOTHING`
	sqlShort = `UPDATE reservation SET status = 'SHORT' WHERE order_id = $1`
	sqlTake  = `
WITH taken AS (
    INSERT INTO stock_movement (order_id, product_id, quantity)
    SELECT $1, product_id, -quantity FROM unnest($2::text[], $3::bigint[]) AS wanted (product_id, quantity)
    RETURNING product_id, quantity)
UPDATE stock AS s SET available = available + quantity FROM taken WHERE s.product_id = taken.product_id`
)

// reserve puts all items of an order aside, or none.
func (i inventory) reserve(ctx context.Context, tx pgx.Tx, e ReservationRequested, _ outbox.Metadata) error {
	claimed, err := tx.Exec(ctx, sqlClaim, e.OrderID)
	if err != nil || claimed.RowsAffected() == 0 {
		return err
	}
	products, quantities := make([]string, len(e.Items)), make([]int64, len(e.Items))
	for n, item := range e.Items {
		products[n], quantities[n] = item.ProductID, item.Quantity
	}
	available, err := lock(ctx, tx, products)
	if err != nil {
		return err
	}
	for n, product := range products {
		if available[product] < quantities[n] { // also if there never was such a product
			if _, err := tx.Exec(ctx, sqlShort, e.OrderID); err != nil {
				return err
			}
			return i.events.Record(ctx, tx, StockShort{now(e.OrderID), product, available[product], quantities[n]})
		}
	}
	if _, err := tx.Exec(ctx, sqlTake, e.OrderID, products, quantities); err != nil {
		return err
	}
	return i.events.Record(ctx, tx, StockReserved{now(e.OrderID)})
}

// sqlLock locks products in the same order in all transactions, so that no two wait for each other.
const sqlLock = `SELECT product_id, available FROM stock WHERE product_id = ANY($1) ORDER BY product_id FOR UPDATE`

// lock returns how many pieces of products are there, and keeps that so until the commit.
func lock(ctx context.Context, tx pgx.Tx, products []string) (map[string]int64, error) {
	available := map[string]int64{}
	var product string
	var n int64
	rows, _ := tx.Query(ctx, sqlLock, products) // its error is that of ForEachRow
	_, err := pgx.ForEachRow(rows, []any{&product, &n}, func() error {
		available[product] = n
		return nil
	})
	return available, err
}

const (
	// sqlRelease leaves a row also where no reservation was: if its request had failed and an operator has it
	// handled after all, nothing is put aside for an order that is cancelled.
	sqlRelease = `
INSERT INTO reservation (order_id, status) VALUES ($1, 'RELEASED')
    ON CONFLICT (order_id) DO UPDATE SET status = 'RELEASED'`

	sqlTaken    = `SELECT product_id FROM stock_movement WHERE order_id = $1`
	sqlGiveBack = `
WITH back AS (
    INSERT INTO stock_movement (order_id, product_id, quantity)
    SELECT order_id, product_id, -sum(quantity) FROM stock_movement WHERE order_id = $1 GROUP BY 1, 2
    RETURNING product_id, quantity)
UPDATE stock AS s SET available = available + quantity FROM back WHERE s.product_id = back.product_id`
)

// release gives back what was put aside for an order, if anything was.
func (i inventory) release(ctx context.Context, tx pgx.Tx, e ReleaseRequested, _ outbox.Metadata) error {
	if _, err := tx.Exec(ctx, sqlRelease, e.OrderID); err != nil {
		return err
	}
	products, err := taken(ctx, tx, e.OrderID)
	if err != nil || len(products) == 0 {
		return err
	}
	if _, err := lock(ctx, tx, products); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, sqlGiveBack, e.OrderID)
	return err
}

// taken returns the products that are put aside for an order.
func taken(ctx context.Context, tx pgx.Tx, order uuid.UUID) ([]string, error) {
	rows, _ := tx.Query(ctx, sqlTaken, order) // its error is that of CollectRows
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
