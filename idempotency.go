package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
)

// event_handled has a row for each event that an action has handled: the consumer group, the action, and the
// source, id and type of the event, or what [OncePer] says. The type is that with which the event arrived, before any
// [Upcaster]. The row commits with the effect of the handler, so an
// event that arrives again is skipped for as long as the row is kept. An event that arrives after its row was
// removed is handled again.

// OncePer returns a copy of a [Handle] or [HandleBatch] handler whose action is done once for each key.
// The key is an aggregate type of at most 100 characters and an id of at most 255. Every event with the
// same key is a repeat, and is skipped. Two handlers with the same action and key are repeats of one
// another, also for different event types. Without OncePer, or with a nil key, the action is done once
// for each event, as it always is for a tombstone, which has no payload to take a key from.
//
// E is the event type of h. [NewConsumer] and [NewWorker] reject another type, and a handler of
// [HandleNoTx], because no row of event_handled records its effect.
func OncePer[E DomainEvent](h Handler, key func(event E, m Metadata) (aggregateType, aggregateID string)) Handler {
	return changed(h, func(own *handling.Handler) {
		own.Key, own.KeyType = nil, reflect.TypeFor[E]()
		if key != nil {
			own.Key = func(e any, m *envelope.Received) (string, string) { return key(e.(E), metadataOf(m)) }
		}
	})
}

// CleanHandled removes old rows of event_handled and event_delivery from a schema, in batches, and returns how many
// it removed. Empty means the schema public. A row of event_handled is old after keep.HandledFor, and a row of
// event_delivery keep.DeliveredFor after it was done; zero means their defaults, and the other fields of keep are
// not used. A relay or a worker of the schema does this itself. Where neither of them runs, call CleanHandled at
// intervals, from any number of processes. The error names every bad argument, or is PostgreSQL's; some rows may have
// been removed before it.
func CleanHandled(ctx context.Context, db *pgxpool.Pool, schema string, keep RetentionConfig) (int64, error) {
	schema = cmp.Or(schema, pg.DefaultSchema)
	keep = keep.withDefaults()
	err := errors.Join(
		check.Schema(schema),
		check.NotNegative("HandledFor", keep.HandledFor),
		check.NotNegative("DeliveredFor", keep.DeliveredFor),
	)
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return 0, fmt.Errorf("outbox: clean handled: %w", err)
	}
	removed, err := retention.CleanHandled(ctx, db, schema, keep.rules())
	if err != nil {
		err = fmt.Errorf("outbox: %w", err)
	}
	return removed, err
}
