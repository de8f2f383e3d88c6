package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Deliver makes an attempt of an action on an event of the table outbox, within tx. Events expire by the clock of
// PostgreSQL, which it sets ahead. It reports whether the event was a repeat, for which no handler is called.
func (w *Worker) Deliver(
	ctx context.Context, tx pgx.Tx, outboxID int64, action string, attempt int, ahead time.Duration,
) (repeated bool, err error) {
	d, err := w.readRecorded(ctx, tx, outboxID)
	if err != nil {
		return false, fmt.Errorf("outbox: deliver event %d: %w", outboxID, err)
	}
	own := w.processor.ForOne(new(handling.Activity))
	own.Store, own.Ahead = &storeWithin{w.notes, tx}, ahead
	rules := *own.Rules
	rules.Hooks.Handled = nil
	rules.Hooks.Repeated = func(*envelope.Received, string) { repeated = true }
	own.Rules = &rules
	d.Attempt = attempt
	it := handling.Item{Meta: delivery.ReceivedOf(&d, new(envelope.Origin))}
	m, err := delivery.ReadOutboxEvent(&d, &it.Meta)
	if err != nil {
		return false, err
	}
	if own.Resolve(ctx, &it, m, action); it.Err != nil {
		return false, it.Err
	}
	for t := range it.InOrder() {
		if _, err := own.ProcessOne(ctx, t); err != nil {
			return false, err
		}
	}
	return repeated, nil
}

// sqlDeliverRecorded reads an event with the columns of a delivery.
const sqlDeliverRecorded = `
SELECT coalesce(topic, ''), event_id::text, event_type, source, aggregate_type, aggregate_id,
       coalesce(pg_catalog.convert_to(payload::text, 'UTF8'), payload_bytes),
       content_type, coalesce(partition_key, ''), pg_catalog.convert_to((` + tables.Headers + `)::text, 'UTF8'), occurred_at, created_at
  FROM {schema}.outbox AS o WHERE id = $1`

// readRecorded leaves the settings of the transaction as they are.
func (w *Worker) readRecorded(ctx context.Context, tx pgx.Tx, id int64) (d delivery.Delivery, err error) {
	part, err := tx.Begin(ctx)
	if err != nil {
		return d, err
	}
	defer func() { err = errors.Join(err, part.Rollback(ctx)) }()
	err = pg.QueryRow(ctx, part, pg.InSchema(sqlDeliverRecorded, w.processor.Rules.Schema), id).Scan(
		&d.Stream, &d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID, &d.Payload,
		&d.ContentType, &d.PartitionKey, &d.Headers, pg.Instant{At: &d.OccurredAt}, pg.Instant{At: &d.RecordedAt})
	if err == nil {
		d.Stream, err = eventHead{eventType: d.Type, topic: d.Stream}.destination()
	}
	return d, err
}

// storeWithin is a [handling.Transactor] that works in a transaction of the caller.
type storeWithin struct {
	*handling.Notes
	tx pgx.Tx
}

// Now implements [handling.Transactor].
func (s *storeWithin) Now(ctx context.Context) (now time.Time, err error) {
	err = s.tx.QueryRow(ctx, pg.SQLNow).Scan(&now)
	return now, err
}

// InTx implements [handling.Transactor], with a savepoint.
func (s *storeWithin) InTx(
	ctx context.Context, _ *handling.Activity, keys []handling.NoteKey, _ bool, queue func(*pgx.Batch), f handling.TxFunc,
) error {
	part, err := s.tx.Begin(ctx)
	if err != nil {
		return &handling.NoteError{Err: err}
	}
	defer func() { _ = part.Rollback(ctx) }() // has no effect after the commit; needed if f ends its goroutine
	fresh, err := s.NoteIn(ctx, part, keys)
	if err != nil {
		return &handling.NoteError{Err: fmt.Errorf("note what is handled: %w", err)}
	}
	var b pgx.Batch
	queue(&b)
	if err := part.SendBatch(ctx, &b).Close(); err != nil {
		return &handling.NoteError{Err: err}
	}
	if err := f(guardtx.Within(part), fresh); err != nil {
		return err
	}
	return part.Commit(ctx)
}
