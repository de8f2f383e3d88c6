package main

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlTrading makes the tables of signals, intents and attempts.
const sqlTrading = `
CREATE TABLE signal (
    id           bigint PRIMARY KEY,
    strategy_key text   NOT NULL,
    market       text   NOT NULL,
    side         text   NOT NULL,
    quantity     bigint NOT NULL
);
CREATE TABLE order_intent (
    id        uuid   PRIMARY KEY,
    signal_id bigint NOT NULL UNIQUE REFERENCES signal,
    owner_id  text   NOT NULL
);
CREATE TABLE order_attempt (
    order_intent_id   uuid        NOT NULL REFERENCES order_intent,
    attempt_no        int         NOT NULL,
    identifier        text        NOT NULL UNIQUE,
    state             text        NOT NULL DEFAULT 'PREPARED',
    valid_until       timestamptz,
    exchange_order_id text,
    reason            text,
    answered_in_time  boolean     NOT NULL DEFAULT false, -- before the event OrderOverdue was due
    updated_at        timestamptz NOT NULL DEFAULT now(),
    UNIQUE (order_intent_id, attempt_no)
)`

// bot turns signals into orders. It knows no exchange: what it decides is committed, and that
// includes the command to the executor.
type bot struct {
	db    *pgxpool.Pool
	bus   EventBus
	worth time.Duration // how long a signal is worth an order
}

const (
	sqlSignal = `INSERT INTO signal (id, strategy_key, market, side, quantity) VALUES ($1, $2, $3, $4, $5)`
	sqlIntent = `INSERT INTO order_intent (id, signal_id, owner_id) VALUES ($1, $2, $3)`
)

// decide commits a signal, the intent that follows from it, and the command to place it: all
// of that or nothing. A command that no executor has begun in time, because the kill switch was on
// for example, has expired and is never placed. One that was begun, and has to wait for the exchange, has the
// deadline in its intent. Whatever follows from it carries the same correlation id.
func (b bot) decide(ctx context.Context, s Signal, id uuid.UUID) error {
	ctx = outbox.WithCorrelationID(ctx, id.String())
	command := CreateOrderAttempt{happened: now()}
	command.OrderIntent = OrderIntent{ID: id, SignalID: s.ID, Scope: s.Scope, Side: s.Side, Quantity: s.Quantity, Deadline: command.At.Add(b.worth)}
	return pgx.BeginFunc(ctx, b.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlSignal, s.ID, s.StrategyKey, s.Market, s.Side, s.Quantity); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sqlIntent, id, s.ID, s.OwnerID); err != nil {
			return err
		}
		return b.bus.Record(ctx, tx, outbox.With(command, outbox.EventOptions{Expires: command.Deadline}))
	})
}
