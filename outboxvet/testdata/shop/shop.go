// Package shop has event types, and a registry of some of them. // want package:"shop.Placed"
package shop

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

type Placed struct{ ID string }

func (e Placed) OccurredAt() time.Time { return time.Time{} }
func (e Placed) Order() string         { return e.ID }

type Canceled struct{ ID string }

func (e Canceled) OccurredAt() time.Time { return time.Time{} }

type Paid struct{ ID string }

func (e Paid) OccurredAt() time.Time { return time.Time{} }
func (e Paid) Order() string         { return e.ID }

func Events() outbox.Definition {
	return outbox.Event("acme.order.placed.v1", "Order", Placed.Order)
}

func Cancel(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder, id string) error {
	return rec.Record(ctx, tx, Placed{id}, &Canceled{id})
}

func Pay(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder, id string) error {
	return rec.Record(ctx, tx, outbox.With(Paid{id}, outbox.EventOptions{Key: id}))
}
