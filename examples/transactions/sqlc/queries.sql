-- name: CreateOrder :exec
INSERT INTO orders (id, product, quantity) VALUES ($1, $2, $3);

-- name: CreateShipment :exec
INSERT INTO shipments (order_id, quantity) SELECT o.id, o.quantity FROM orders o WHERE o.id = $1;
