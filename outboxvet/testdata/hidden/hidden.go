// Package hidden records types that no other package can register. // want package:"hidden.placed"
package hidden

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

type placed struct{ id string }

func (e placed) OccurredAt() time.Time { return time.Time{} }
func (e placed) order() string         { return e.id }

type canceled struct{ id string }

func (e canceled) OccurredAt() time.Time { return time.Time{} }
func (e canceled) order() string         { return e.id }

type paid struct{ id string }

func (e paid) OccurredAt() time.Time { return time.Time{} }
func (e paid) order() string         { return e.id }

func define[E outbox.DomainEvent](name string, id func(E) string) outbox.Definition {
	return outbox.Event("acme.order."+name+".v1", "Order", id)
}

func Events() []outbox.Definition {
	return []outbox.Definition{outbox.Event("acme.order.placed.v1", "Order", placed.order), define("paid", paid.order)}
}

// Handlers use types, which registers none.
func Handlers() outbox.Handler {
	return outbox.Handle("A", func(context.Context, pgx.Tx, canceled, outbox.Metadata) error { return nil })
}

func Record(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder, batch *pgx.Batch, e outbox.DomainEvent) error {
	all := []outbox.DomainEvent{canceled{"1"}}
	if err := rec.Record(ctx, tx, all...); err != nil {
		return err
	}
	if err := rec.Queue(ctx, batch, placed{"1"}, &canceled{"1"}); err != nil { // want `canceled is not registered`
		return err
	}
	return rec.Record(ctx, tx, placed{"1"}, paid{"1"}, e, canceled{"1"}) // want `canceled is not registered`
}
